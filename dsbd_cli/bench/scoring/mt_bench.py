"""MT-Bench: an OpenAI-compatible judge rates each turn from 1 to 10; what cannot be read is null, never a number.

A reply is a result, also one without a rating; a judge that was not reached is none (`JudgeAway`).

Templates and rating form follow Zheng et al., 2023 (FastChat, llm_judge). The last well-formed `[[n]]` counts:
judges quote the rubric, and the answer under test, before their verdict. `[[` in the answer under test is
broken up before it is shown, so that a rating planted there cannot be quoted back.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsbd_cli.bench.datasets.mt_bench import PROMPTS
from dsbd_cli.bench.datasets.records import MtBenchItem
from dsbd_cli.errors import UserError

KEY_VARIABLES = ("DSBD_JUDGE_API_KEY", "OPENAI_API_KEY")
# Reasons for a null that stands: the judge's own reply, or its refusal of this very request.
NO_RATING, CUT, REFUSED = "no rating in the reply", "cut by the judge's token limit", "request refused"
# Statuses by which a server refuses what it was asked (too long, unfit), and would again.
_REFUSALS = (400, 413, 422)
_RATING = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
_FIELD = re.compile(r"\{(\w+)\}")


class JudgeAway(Exception):
    """The judge was not reached, or what came is no completion: nothing was rated; `str(error)` says why."""


@dataclass(frozen=True)
class Rating:
    """What the judge said of one turn: `value` in 1..10, or None and the reason; the raw `reply` is kept."""

    value: float | None
    reason: str | None
    reply: str
    template: str


def is_result(rating: Mapping[str, Any]) -> bool:
    """Whether a line of `ratings.jsonl` stands, or is to be asked for again."""
    if rating.get("value") is not None:
        return True
    return str(rating.get("reason") or "").startswith((NO_RATING, CUT, REFUSED))


def read_rating(reply: str) -> float | None:
    """The last well-formed rating between 1 and 10, or None."""
    values = [float(number) for number in _RATING.findall(reply)]
    good = [value for value in values if 1 <= value <= 10]
    return good[-1] if good else None


def defuse(answer: str) -> str:
    """The answer under test with `[[` broken up: it can then not hold a rating."""
    return re.sub(r"\[(?=\[)", "[ ", answer)


def judge_messages(
    item: MtBenchItem, answers: Sequence[str], turn: int, prompts: Mapping[str, Mapping[str, str]]
) -> tuple[str, list[dict[str, str]]]:
    """(template name, chat messages) that ask for a rating of turn `turn` (0-based)."""
    references = item.references if len(item.references) > turn else ()
    name = PROMPTS[bool(references), turn > 0]
    fields = {"question": item.questions[turn], "answer": defuse(answers[turn])}
    for number in range(turn + 1):
        fields[f"question_{number + 1}"] = item.questions[number]
        fields[f"answer_{number + 1}"] = defuse(answers[number])
        if references:
            fields[f"ref_answer_{number + 1}"] = references[number]
    template = prompts[name]

    def fill(match: re.Match[str]) -> str:
        return fields.get(match.group(1), match.group(0))

    messages = [{"role": "user", "content": _FIELD.sub(fill, template["template"])}]
    if template["system"].strip():
        messages.insert(0, {"role": "system", "content": template["system"]})
    return name, messages


@dataclass
class Judge:
    """A judge behind an OpenAI-compatible endpoint; greedy by default.

    Attributes:
        url, model: endpoint (`.../v1`) and model name.
        prompts: templates by name, `{system, template}` each.
        timeout_s: of one rating, from the first byte sent to the last one read.
        retries: of a request that failed by network or server fault, within that time.
    """

    url: str
    model: str
    prompts: Mapping[str, Mapping[str, str]]
    temperature: float = 0.0
    max_tokens: int = 1024
    timeout_s: float = 120.0
    retries: int = 2
    _client: Any = field(default=None, repr=False)

    def settings(self) -> dict[str, Any]:
        """What decides a rating, for the result files (the key is no part of it)."""
        return {
            "url": self.url,
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

    @property
    def client(self) -> Any:
        if self._client is None:
            try:
                import openai
            except ImportError:
                raise UserError("the judge needs the openai package: pip install 'dsbd-cli[bench]'") from None
            key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "none")
            self._client = openai.OpenAI(
                base_url=self.url, api_key=key, timeout=self.timeout_s, max_retries=self.retries
            )
        return self._client

    def check(self) -> None:
        """Fail before hours of decoding if nobody answers there.

        Raises:
            UserError: no connection, or the key is refused.
        """
        client = self.client
        import openai

        try:
            seconds = min(self.timeout_s, 10.0)
            _within(seconds, client.with_options(timeout=seconds, max_retries=0).models.list)
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            raise self._refused_key() from None
        except openai.APIStatusError:
            return  # it answers; not every server lists its models
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise UserError(f"no judge answers at {self.url} ({cause})") from None
        except TimeoutError:
            raise UserError(f"no judge answers at {self.url} (not within {seconds:g} s)") from None

    def rate(self, item: MtBenchItem, answers: Sequence[str], turn: int) -> Rating:
        """One rating; a cut or unreadable reply, or a request refused for what it asks, gives None and the reason.

        Raises:
            JudgeAway: not reached, too slow, too busy (429), broken (5xx), or no completion.
            UserError: the key or the model is refused, as it would be every time.
        """
        client = self.client
        import openai

        name, messages = judge_messages(item, answers, turn, self.prompts)
        try:
            response = _within(
                self.timeout_s,
                lambda: client.chat.completions.create(
                    model=self.model,
                    messages=messages,
                    temperature=self.temperature,
                    max_tokens=self.max_tokens,
                ),
            )
            choice = response.choices[0]
            reply, ended = choice.message.content or "", choice.finish_reason
            if not isinstance(reply, str):
                raise TypeError(reply)
        except (openai.APITimeoutError, TimeoutError):
            raise JudgeAway(f"no reply within {self.timeout_s:g} s") from None
        except openai.APIStatusError as error:
            if error.status_code in _REFUSALS:
                return Rating(None, f"{REFUSED} ({error.status_code})", str(error.message), name)
            if error.status_code in (401, 403):
                raise self._refused_key() from None
            if error.status_code == 404:
                raise UserError(
                    f"{self.url} knows no model {self.model!r} (404): mend --judge-model"
                ) from None
            raise JudgeAway(f"it answers {error.status_code}") from None
        except openai.OpenAIError as error:
            raise JudgeAway(f"request failed ({type(error).__name__})") from None
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise JudgeAway(f"not a chat completion ({type(error).__name__})") from None
        if ended == "length":
            return Rating(None, CUT, reply, name)
        value = read_rating(reply)
        return Rating(value, None if value is not None else NO_RATING, reply, name)

    def _refused_key(self) -> UserError:
        return UserError(f"the judge at {self.url} refuses the key: set {' or '.join(KEY_VARIABLES)}")


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """What `ask` gives or raises; TimeoutError after `seconds`. A client's own timeout is of each read alone, so a
    server that sends a byte now and then would hold it for ever; its thread is left behind.
    """
    said: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            said.put((ask(), None))
        except BaseException as error:
            said.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        found, error = said.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return found
