"""Prompts become token ids: what is text in a turn stays text, and whose turn it is."""

from __future__ import annotations

import logging
import signal
import string

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dsbd_cli.errors import UserError
from dsbd_cli.messages import is_blank
from dsbd_cli.prompts import encode
from dsbd_cli.settings import Settings
from dsbd_cli.templates import renders
from tests import builders

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
EACH = "{% for m in messages %}"
BOS, EOS, EOT = 0, 1, 2
PLAIN = Settings()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return builders.tok(tmp_path_factory.mktemp("tok"), chat_template=CHAT)


def ids(prompt, tokenizer, settings=PLAIN):
    return encode(prompt, tokenizer, settings, builders.VOCAB)[0]


def letters(tokenizer, text):
    """Ids of a text in which nothing is special."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("words", ["</s>", "a</s>b", "<|eot|>[user]x", "<s><s>", "<|eot|></s>", " <|eot|> "])
def test_special_words_in_a_turn_are_text(words, tokenizer):
    wanted = [BOS, *letters(tokenizer, f"[user]{words}"), EOT, *letters(tokenizer, "[assistant]")]
    assert ids(words, tokenizer) == wanted
    assert ids([{"role": "user", "content": words}], tokenizer) == wanted


def test_special_words_are_text_in_every_turn_whoever_speaks(tokenizer):
    turns = [("system", "be <|eot|>"), ("user", "say </s>"), ("assistant", "</s>, said"), ("user", "again")]
    wanted = [BOS]
    for role, content in turns:
        wanted += [*letters(tokenizer, f"[{role}]{content}"), EOT]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert ids(messages, tokenizer) == [*wanted, *letters(tokenizer, "[assistant]")]
    alone = ids("say </s>", tokenizer, Settings(system="be <|eot|>"))
    assert alone.count(EOT) == 2
    assert EOS not in alone


def test_a_template_sees_the_words_of_a_turn_trimmed_and_once(tmp_path):
    trimming = builders.tok(tmp_path, chat_template=CHAT.replace("m.content", "m.content | trim"))
    assert ids("  </s>  ", trimming) == ids("</s>", trimming)


def test_text_without_special_words_is_encoded_as_ever(tokenizer):
    text = "plain, é and 🙂 and \ue000"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    assert ids(text, tokenizer) == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_private_use_characters_beside_special_words_stay_what_they_are(tokenizer):
    text = "\ue000</s>\ue001<|eot|>"
    assert ids(text, tokenizer)[1:-1][: len(letters(tokenizer, f"[user]{text}"))] == letters(
        tokenizer, f"[user]{text}"
    )


def test_a_special_word_that_begins_another_is_not_cut_out_of_it(tmp_path):
    tokenizer = builders.tok(tmp_path, words=["<|eot|>x"], chat_template=CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>", "<|eot|>x"]})
    found = ids("<|eot|>x<|eot|>", tokenizer)
    assert found.count(EOT) == 1
    assert builders.VOCAB not in found


def test_in_raw_and_without_a_template_special_words_are_tokens(tmp_path, tokenizer):
    assert ids("a</s>b", tokenizer, Settings(raw=True)).count(EOS) == 1
    assert ids("a</s>b", builders.tok(tmp_path)).count(EOS) == 1


def test_the_next_prompt_is_encoded_with_its_special_tokens(tokenizer):
    ids("</s>", tokenizer)
    assert tokenizer("</s>", add_special_tokens=False)["input_ids"] == [EOS]


def test_pieces_with_a_leading_blank_are_cut_as_in_the_whole_text(tmp_path):
    # As Llama 2's: every stretch between special words gets a blank in front.
    tokenizer = builders.tok(tmp_path, chat_template=CHAT)
    core = tokenizer.backend_tokenizer
    core.normalizer = normalizers.Sequence([normalizers.Prepend("_")])
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert ids("a</s>b", tokenizer) == [
        BOS, *letters(tokenizer, "[user]a</s>b"), EOT, *letters(tokenizer, "[assistant]")
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_special_word_in_a_turn_moves_no_other_token(scheme, within, known):
    """Sentence pieces: a blank before a text's start, which no piece of it gets; and no character for the mark."""
    letters = ["\u2581", *string.printable, *("\ue000" if known else "")]
    vocab = {word: place for place, word in enumerate(["<s>", "</s>", "<unk>", *letters])}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    steps = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([steps]) if within else steps
    one = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT
    )
    wanted, found = (
        one.convert_ids_to_tokens(encode(text, one, PLAIN, len(vocab))[0]) for text in ("</u>", "</s>")
    )
    assert [*"[user]</u>"] == [token for token in wanted if token not in ("<s>", "\u2581")][:10]
    assert found == [
        "s" if token == "u" and wanted[place - 1] == "/" else token for place, token in enumerate(wanted)
    ]
    assert (wanted[1] == "\u2581") is (scheme == "always")
    assert one.convert_ids_to_tokens(encode("a", one, Settings(raw=True), len(vocab))[0])[0] == (
        "a" if scheme == "never" else "\u2581"
    )  # the tokenizer is as it was


def test_a_tokenizer_that_tells_no_offsets_says_that_the_word_stays_a_token(tokenizer):
    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, text, **how):
            return tokenizer(text, **how)

    found, notes = encode("a</s>", Slow(), PLAIN, builders.VOCAB)
    assert EOS in found
    assert notes == ["this tokenizer takes </s> in a turn as a token"]


# Whose turn it is.


def test_messages_that_end_with_the_assistant_are_gone_on_with(tokenizer):
    turns = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1, 2,"}]
    wanted = [BOS, *letters(tokenizer, "[user]count"), EOT, *letters(tokenizer, "[assistant]1, 2,")]
    assert ids(turns, tokenizer) == wanted
    assert turns[1] == {"role": "assistant", "content": "1, 2,"}


@pytest.mark.parametrize(
    ("written", "said", "told"),
    [
        ("m.content | trim", "1, 2,", None),
        ("m.content | trim", " 1, 2, ", "strips the blanks around"),
        ("m.content | trim", "1, 2 </s> ", "strips the blanks around"),
        ("m.content.rstrip()", "1,\n", "strips the blanks around"),
        ("m.content | capitalize", "so it is", "REFUSED"),
        ("m.content[0] | upper }}{{ m.content[1:]", "so it is", "REFUSED"),
        ("m.content[0] | upper }}{{ m.content[1:]", "So it is", None),
        ("m.content | replace('is', 'was')", "so it is", "REFUSED"),
        ("m.content.split('</think>')[-1]", "<think>hm</think>so", "REFUSED"),
        ("m.content | replace('so', 'so ')", "so it is " * 9, "REFUSED"),
    ],
)
@pytest.mark.parametrize("parts", [False, True])
def test_a_turn_that_is_gone_on_with_is_never_rewritten_without_a_word(tmp_path, written, said, told, parts):
    body = CHAT.replace("m.content", written)
    if parts:
        body = body.replace("m.content", "m.content[0].text")
    tokenizer = builders.tok(tmp_path, chat_template=body)
    content = (lambda text: [{"type": "text", "text": text}]) if parts else str
    # The same words elsewhere in the conversation are not the turn's.
    turns = [
        {"role": "user", "content": content("so it is")},
        {"role": "assistant", "content": content(said)},
    ]
    if told == "REFUSED":
        with pytest.raises(
            UserError, match=r"^the chat template writes the last message, .*[^\n]*$"
        ) as refused:
            ids(turns, tokenizer)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 250
        assert said.strip()[-20:] in str(refused.value)
        return
    found, notes = encode(turns, tokenizer, PLAIN, builders.VOCAB)
    end = letters(tokenizer, said.strip())
    assert found[-len(end) :] == end
    assert [told] * len(notes) == [told for note in notes if told in note]
    assert bool(notes) is (told is not None)


def test_a_special_word_in_the_turn_that_is_gone_on_with_is_text(tokenizer):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the tag </s>"}]
    found = ids(turns, tokenizer)
    assert EOS not in found
    assert found[-len("the tag </s>") :] == letters(tokenizer, "the tag </s>")


def test_an_empty_turn_of_the_assistant_is_opened_as_the_template_does(tokenizer):
    turns = [{"role": "user", "content": "count"}]
    assert ids([*turns, {"role": "assistant", "content": ""}], tokenizer) == ids(turns, tokenizer)


@pytest.mark.parametrize("how", ["", " | trim"])
@pytest.mark.parametrize("content", [" \n", [{"type": "text", "text": "  "}], [{"type": "text", "text": ""}]])
def test_a_turn_of_blanks_is_opened_as_the_template_does(tmp_path, how, content):
    """Stripped of its blanks it would take those with it that the template writes in front."""
    one = builders.tok(tmp_path, chat_template=CHAT.replace("]{{ m.content", "]\n{{ m.content" + how))
    turns = [{"role": "user", "content": "count"}]
    found, notes = encode([*turns, {"role": "assistant", "content": content}], one, PLAIN, builders.VOCAB)
    assert found == ids(turns, one)
    assert bool(notes) is ("blanks alone" in "".join(notes)) is (content[0] != {"type": "text", "text": ""})


def test_a_turn_of_the_model_s_is_gone_on_with_where_the_template_calls_it_so(tmp_path):
    one = builders.tok(
        tmp_path,
        chat_template="{% set r = {'assistant': 'model'} %}" + CHAT.replace("[assistant]", "[model]"),
    )
    turns = [{"role": "user", "content": "count"}, {"role": "model", "content": "1, 2,"}]
    assert one.decode(ids(turns, one)) == "<s>[user]count<|eot|>[model]1, 2,"
    assert ids([turns[0], {"role": "model", "content": ""}], one) == ids(turns[:1], one)


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}, {"content": "so"}])
def test_calls_at_the_end_are_written_whole(tmp_path, said):
    one = builders.tok(
        tmp_path,
        chat_template=CHAT.replace("{{ m.content }}", "{{ m.content or '' }}{{ m.tool_calls or '' }}"),
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": "[f]"} | said]
    words = said.get("content") or ""
    assert one.decode(ids(turns, one)) == f"<s>[user]a<|eot|>[assistant]{words}[f]<|eot|>[assistant]"


def test_two_system_turns_are_refused_whatever_the_template_does(tmp_path, tokenizer):
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    for one in (tokenizer, builders.tok(tmp_path, chat_template=NO_SYSTEM)):
        with pytest.raises(UserError, match="system turn of their own: leave out --system"):
            encode(turns, one, Settings(system="c"), builders.VOCAB)
    assert ids(turns, tokenizer, Settings(system="")) == ids(turns, tokenizer)


def test_a_system_text_leads_the_user_turn_where_the_role_is_refused(tmp_path):
    tokenizer = builders.tok(tmp_path, chat_template=NO_SYSTEM)
    found, notes = encode("b</s>", tokenizer, Settings(system="a"), builders.VOCAB)
    assert found == ids("a\n\nb</s>", tokenizer)
    assert "leads the first user turn" in notes[0]


def test_a_long_prompt_is_no_matter_of_the_tokenizers_own_warning(tmp_path, caplog):
    tokenizer = builders.tok(tmp_path, chat_template=CHAT, model_max_length=8)
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING):
        ids("x" * 50, tokenizer)
        ids("</s>" * 50, tokenizer)
        ids("x" * 50, tokenizer, Settings(raw=True))
    assert caplog.records == []


@pytest.mark.parametrize("prompt", ["", "  ", "\n\t "])
def test_a_turn_in_which_nothing_is_asked_is_refused(tmp_path, tokenizer, prompt):
    with pytest.raises(UserError, match="the prompt is empty: nothing is asked"):
        ids(prompt, tokenizer)
    # A text to go on with may be empty, and a system turn may hold the question.
    raw = Settings(raw=True)
    for one, how in ((tokenizer, raw), (builders.tok(tmp_path), PLAIN)):
        assert ids(prompt, one, how) == (letters(one, prompt) or [BOS])
    assert encode("", tokenizer, raw, builders.VOCAB)[1] == [
        "the prompt is empty: the target starts from its BOS token"
    ]
    asked = ids(prompt, tokenizer, Settings(system="Name a river."))
    assert asked == ids(
        [{"role": "system", "content": "Name a river."}, {"role": "user", "content": prompt}], tokenizer
    )


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), None, 5])
def test_what_is_no_prompt_is_refused(prompt, tokenizer):
    """Bytes are whole numbers too, but nobody means them as token ids."""
    with pytest.raises(UserError, match="a prompt is a text"):
        ids(prompt, tokenizer)


# Messages that no template can write, and those that ask nothing.


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"role": "user"}, "message 2 has no content"),
        ({"role": "user", "content": ["hi"]},
         'message 2: part 1 of its content must be {"type": "text", "text": ...}, not something else'),
        ({"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url"}]},
         """message 2: part 2 of its content must be {"type": "text", "text": ...}, not of the type 'image_url'"""),
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]},
         "message 2 has its content in parts, which the target's chat template does not read: give it as one text"),
        ({"role": "user", "content": None}, "message 2: content must be a text, not null"),
        ({"role": "assistant", "content": None}, "message 2: content must be a text, not null"),
        ({"role": "user", "content": 3}, "message 2: content must be a text, not a number"),
        ({"role": "user", "content": True}, "message 2: content must be a text, not true or false"),
        ("hi", "message 2 must be an object {role, content}, not a text"),
    ],
)  # fmt: skip
def test_a_message_that_no_template_can_write_is_named(tokenizer, turn, words):
    with pytest.raises(UserError) as error:
        ids([{"role": "user", "content": "a"}, turn], tokenizer)
    assert str(error.value) == words


def test_parts_are_refused_by_name_where_the_template_takes_texts_alone(tmp_path):
    turns = [of_parts("user", "a"), of_parts("assistant", "b"), of_parts("user", "c")]
    for place, how in enumerate((" + ''", " | trim", " | tojson")):
        one = builders.tok(tmp_path / str(place), chat_template=CHAT.replace("m.content", f"m.content{how}"))
        with pytest.raises(UserError, match="message 1 has its content in parts, which"):
            ids(turns, one)
    never = builders.tok(tmp_path / "never", chat_template="{{ raise_exception('never') }}")
    with pytest.raises(UserError, match=r"refuses this prompt: never$"):
        ids(turns, never)


@pytest.mark.parametrize("way", ["first", "string"])
def test_a_part_that_the_template_leaves_out_is_not_lost_without_a_word(tmp_path, way):
    """As Gemma 3 reads the first part of a system turn, and Qwen 3 none."""
    read = {
        "first": "{{ m.content if m.content is string else m.content[0].text }}",
        "string": "{{ m.content if m.content is string else '' }}",
    }[way]
    one = builders.tok(tmp_path, chat_template=CHAT.replace("{{ m.content }}", read))
    part = {"type": "text", "text": "so"}
    whole = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns = [*whole, {"role": "user", "content": [part, {"type": "text", "text": " it is"}]}]
    with pytest.raises(
        UserError, match=r"^message 3 has its content in parts, of which .* leaves some out: give it"
    ):
        ids(turns, one)
    # Nothing is lost with a part that says nothing.
    blank = [*whole, {"role": "user", "content": [part, {"type": "text", "text": " "}]}]
    if way == "first":
        assert "[user]so<|eot|>" in one.decode(ids(blank, one))


def test_a_turn_of_calls_may_say_nothing(tmp_path):
    one = builders.tok(tmp_path, chat_template=CHAT.replace("m.content", "m.content or m.tool_calls"))
    asked = {"role": "user", "content": "a"}
    for calls in ({"tool_calls": "x"}, {"tool_calls": "x", "content": None}):
        assert "[assistant]x" in one.decode(ids([asked, {"role": "assistant"} | calls, asked], one))


def test_messages_are_refused_in_a_raw_prompt(tokenizer):
    turns = [{"role": "user", "content": "a"}]
    with pytest.raises(UserError, match=r"no place in a raw prompt.*leave out --raw \(in Python: raw=True\)"):
        ids(turns, tokenizer, Settings(raw=True))


def test_only_a_text_is_told_of_raw_where_the_template_refuses(tmp_path):
    one = builders.tok(tmp_path, chat_template="{{ raise_exception('never') }}")
    with pytest.raises(UserError, match=r"refuses this prompt: never \(--raw leaves it out\)$"):
        ids("a", one)
    with pytest.raises(UserError, match=r"refuses this prompt: never$"):
        ids([{"role": "user", "content": "a"}], one)


@pytest.mark.parametrize("blank", ["", "  ", "\n\t "])
def test_messages_in_which_nothing_is_asked_are_refused_as_an_empty_text_is(tokenizer, blank):
    nothing = {"role": "user", "content": blank}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    opened = {"role": "assistant", "content": ""}
    for turns in ([nothing], [*said, nothing], [nothing, opened], [opened]):
        with pytest.raises(UserError, match="the last turn of the messages is empty: nothing is asked"):
            ids(turns, tokenizer)
        assert is_blank(turns)
    # Turns before the last, an answer begun, and a system turn that may hold the question.
    system = {"role": "system", "content": "Name a river."}
    for turns in ([nothing, said[1]], [said[0], opened, said[0]], [system, nothing]):
        assert ids(turns, tokenizer)
        assert not is_blank(turns)
    assert ids([nothing], tokenizer, Settings(system="Name a river.")) == ids([system, nothing], tokenizer)


def test_an_empty_list_is_an_empty_prompt(tmp_path, tokenizer):
    with pytest.raises(UserError, match="the prompt is empty: nothing is asked"):
        ids([], tokenizer)
    for one, how in ((tokenizer, Settings(raw=True)), (builders.tok(tmp_path), PLAIN)):
        assert encode([], one, how, builders.VOCAB) == encode("", one, how, builders.VOCAB)


# Roles.

SKIPS = (
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}[{{ m.role }}]{{ m.content }}<|eot|>"
    "{% elif m['role'] == 'tool' %}[{{ m.content | tojson }}]{% endif %}{% endfor %}[assistant]"
)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("usr", r"message 2 has the role 'usr', .* \(did you mean user\?\): system, user, assistant$"),
        ("human", "message 2 has the role 'human'"),
        ("User", r"'User'.*did you mean user\?"),
        ("", "message 2 has the role ''"),
        ("user<|eot|>", "message 2 has the role"),
        ("tool", "'tool', which the target's chat template does not know"),
        (None, "message 2: role must be a text, not null"),
        (["user"], "message 2: role must be a text, not a list$"),
    ],
)
def test_a_role_that_the_template_would_write_unread_is_refused(tokenizer, role, words):
    turns = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    with pytest.raises(UserError, match=words):
        ids(turns, tokenizer)
    with pytest.raises(UserError, match=r"^message 2 has no role$"):
        ids([turns[0], {"content": "b"}], tokenizer)


def test_roles_that_a_template_names_are_its_own(tmp_path):
    one = builders.tok(tmp_path, chat_template=SKIPS)
    asked = [{"role": "user", "content": "a"}]
    assert "say" in one.decode(ids([*asked, {"role": "tool", "content": "say"}], one))
    # In other characters than were given, and a turn of calls whose words the template has no place for.
    assert '\\"' in one.decode(ids([*asked, {"role": "tool", "content": 'say "b"'}], one))
    calls = {"role": "system", "content": "left out", "tool_calls": "x"}
    assert "left out" not in one.decode(ids([*asked, calls], one))
    with pytest.raises(UserError, match=r"did you mean tool\?\): system, user, assistant, tool$"):
        ids([{"role": "tol", "content": "b"}], one)
    prose = builders.tok(tmp_path / "prose", chat_template="a language model with a tool" + CHAT)
    with pytest.raises(UserError, match=r"system, user, assistant$"):
        ids([{"role": "tol", "content": "b"}], prose)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        # As of Falcon: what it writes in front, or else writes bare; a key of a call; the answer to everything else.
        (EACH + "{% if m.role == 'user' %}{{ 'User: ' }}{% endif %}{{ m.content }}{% endfor %}", "User"),
        (CHAT + "{% if false %}{{ call['function'] }}{% endif %}", "function"),
        (
            EACH + "{% if m.role == 'user' %}USER: {% else %}BOT: {% endif %}{{ m.content }}{% endfor %}",
            "USER",
        ),
    ],
)
def test_words_of_a_template_that_it_compares_no_role_with_are_no_roles(tmp_path, template, role):
    one = builders.tok(tmp_path, chat_template=template)
    with pytest.raises(UserError, match=f"message 1 has the role '{role}', which .* does not know"):
        ids([{"role": role, "content": "a"}], one)
    for named in (f"m.role == '{role}'", f'm.role in ["{role}"]', f"m.role in ['x', '{role}']"):
        one.chat_template = template + EACH + "{% if " + named + " %}{% endif %}{% endfor %}"
        assert ids([{"role": role, "content": "a"}], one)


def test_templates_by_name_name_roles_too(tmp_path):
    class Several:
        def __init__(self, one):
            self.one = one
            self.chat_template = {"default": CHAT, "tools": "{{ 'tool' }}"}

        def __getattr__(self, name):
            return getattr(self.one, name)

        def __call__(self, *given, **how):
            return self.one(*given, **how)

    one = builders.tok(tmp_path, chat_template=CHAT)
    turns = [{"role": "tool", "content": "b"}]
    assert ids(turns, Several(one))
    with pytest.raises(UserError, match="'tool'"):
        ids(turns, one)


def test_a_turn_that_the_template_leaves_out_is_refused(tmp_path):
    one = builders.tok(tmp_path, chat_template=SKIPS)
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(UserError, match="leaves out message 1, of role 'system'"):
        ids(turns, one)
    # What is not said is not left out, and a text of --system leads the first turn of the user.
    assert ids([turns[0] | {"content": " "}, turns[1]], one) == ids(turns[1:], one)
    found, notes = encode("b", one, Settings(system="a"), builders.VOCAB)
    assert found == ids("a\n\nb", one)
    assert "leads the first user turn" in notes[0]


def said(turns, one, settings=PLAIN):
    """The text whose ids a conversation gives, and notes."""
    found, notes = encode(turns, one, settings, builders.VOCAB)
    return one.decode(found), notes


TALK = [
    {"role": "user", "content": "north south"},
    {"role": "assistant", "content": "east west"},
    {"role": "user", "content": "c"},
]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("[:5]", "[user]north<|eot|>[assistant]east <|eot|>[user]c<|eot|>"),
        (" | upper", "[user]NORTH SOUTH<|eot|>[assistant]EAST WEST<|eot|>[user]C<|eot|>"),
        (" | capitalize", "[user]North south<|eot|>[assistant]East west<|eot|>[user]C<|eot|>"),
        (" | tojson", '[user]"north south"<|eot|>[assistant]"east west"<|eot|>[user]"c"<|eot|>'),
        (".split()[0]", "[user]north<|eot|>[assistant]east<|eot|>[user]c<|eot|>"),
    ],
)
def test_words_in_another_form_are_not_left_out(tmp_path, how, wanted):
    one = builders.tok(tmp_path, chat_template=CHAT.replace("m.content", f"m.content{how}"))
    assert said(TALK, one) == (f"<s>{wanted}[assistant]", [])


def test_a_template_that_keeps_the_latest_turns_of_a_long_conversation_says_so(tmp_path):
    one = builders.tok(tmp_path, chat_template=CHAT.replace("in messages", "in messages[-3:]"))
    assert said(TALK, one)[1] == []
    text, notes = said([*TALK, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}], one)
    assert text == "<s>[user]c<|eot|>[assistant]d<|eot|>[user]e<|eot|>[assistant]"
    assert notes == ["the chat template leaves out what was said up to message 2"]
    led = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    lead = {"role": "system", "content": "be"}
    keeps = builders.tok(
        tmp_path / "led", chat_template=led + CHAT.replace("in messages", "in messages[1:][-1:]")
    )
    assert said([lead, *TALK], keeps) == (
        "be<s>[user]c<|eot|>[assistant]", ["the chat template leaves out what was said up to message 3"]
    )  # fmt: skip
    # Its own words gone, or a turn between others, is another matter.
    with pytest.raises(UserError, match="leaves out message 1, of role 'system'"):
        said([lead, *TALK], one)
    some = CHAT.replace("in messages", "in messages if m.role == 'user'")
    with pytest.raises(UserError, match="leaves out message 2, of role 'assistant'"):
        said(TALK, builders.tok(tmp_path / "some", chat_template=some))


PARTS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|eot|>{% endfor %}[assistant]"
)


def of_parts(role, *texts):
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def test_turns_of_parts_are_turns_too(tmp_path):
    one = builders.tok(tmp_path, chat_template=PARTS)
    turns = [of_parts("user", "a</s>", "b"), of_parts("assistant"), of_parts("user", "c")]
    found, notes = encode(turns, one, PLAIN, builders.VOCAB)
    assert EOS not in found  # a special word is text there too
    assert (one.decode(found), notes) == (
        "<s>[user]a</s>b<|eot|>[assistant]<|eot|>[user]c<|eot|>[assistant]",
        [],
    )
    no_system = builders.tok(tmp_path / "no", chat_template=NO_SYSTEM.replace(CHAT, PARTS))
    assert said(turns[2:], no_system, Settings(system="be"))[0] == "<s>[user]be\n\nc<|eot|>[assistant]"
    with pytest.raises(UserError, match="not UTF-8"):
        said([of_parts("user", "\udc80")], one)


def test_a_prompt_whose_words_the_template_has_no_place_for_is_refused(tmp_path):
    one = builders.tok(tmp_path, chat_template=PARTS)
    for prompt in ("words", [{"role": "user", "content": "words"}]):
        with pytest.raises(UserError, match="leaves out the prompt's words"):
            said(prompt, one)


def test_a_system_text_leads_the_first_turn_of_the_user_whoever_speaks_first(tmp_path):
    one = builders.tok(tmp_path, chat_template=NO_SYSTEM)
    greeting = {"role": "assistant", "content": "hello"}
    assert said([greeting, TALK[2]], one, Settings(system="be"))[0] == (
        "<s>[assistant]hello<|eot|>[user]be\n\nc<|eot|>[assistant]"
    )
    # With nobody to give it to, and for a turn that says nothing.
    with pytest.raises(UserError, match="no system role"):
        said([greeting], one, Settings(system="be"))
    calls = CHAT.replace("m.content", "m.content or 'calls'")
    none = builders.tok(tmp_path / "none", chat_template=NO_SYSTEM.replace(CHAT, calls))
    assert "[user]be" in said([{"role": "user", "tool_calls": "x"}], none, Settings(system="be"))[0]


def test_a_role_in_capitals_is_known_to_a_template_that_reads_it_in_small_letters(tmp_path):
    turns = [{"role": "User", "content": "a"}, *TALK[1:]]
    for place, lowered in enumerate(("m.role|lower", "m['role'] | lower", "m.role.lower()")):
        template = CHAT.replace("{{ m.role }}", f"{{{{ {lowered} }}}}")
        one = builders.tok(tmp_path / str(place), chat_template=template)
        assert said(turns, one)[0].startswith("<s>[user]a")
        with pytest.raises(UserError, match="message 1 has the role 'usr'"):
            said([{"role": "usr", "content": "a"}], one)


def test_words_that_a_template_shortens_are_not_left_out(tmp_path):
    """As reasoning models do with what came before an earlier answer."""
    thinks = CHAT.replace("m.content", "m.content.split('</think>')[-1]")
    one = builders.tok(tmp_path, chat_template=thinks)
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "well</think>b"},
        {"role": "user", "content": "c"},
    ]
    text, _ = said(turns, one)
    assert "[assistant]b" in text
    assert "well" not in text


def test_the_role_that_a_template_opens_answers_with_is_known_to_it(tmp_path):
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tok = builders.tok(tmp_path, chat_template=plain + "{% if add_generation_prompt %}[bot]{% endif %}")
    said = [
        {"role": "user", "content": "a"},
        {"role": "bot", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert tok.decode(ids(said, tok)).endswith("[user]a[bot]b[user]c[bot]")
    with pytest.raises(UserError, match="message 2 has the role 'robot'"):
        ids([said[0], {"role": "robot", "content": "b"}, said[2]], tok)


def test_a_time_limit_of_the_callers_is_no_fault_of_the_template(tmp_path):
    class TooSlow(Exception):
        pass

    def alarm(*_: object) -> None:
        raise TooSlow

    class Slow:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, *_: object, **__: object) -> str:
            signal.raise_signal(signal.SIGALRM)
            return ""

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with pytest.raises(TooSlow):
            renders([{"role": "user", "content": "Hi"}], Slow())
    finally:
        signal.signal(signal.SIGALRM, before)
