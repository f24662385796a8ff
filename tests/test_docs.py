"""The pages hold together: links, anchors, citations of docs/design.md, names of files, and the printed tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.tree_in_docs import BEGIN, END, tree

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = [
    path
    for folder in ("dsbd_cli", "benchmarks", "scripts", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c") and path != Path(__file__)
]  # fmt: skip
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
CITED = re.compile(r"(?:(\S*/)?design\.md)(?: sections? (\d+(?:(?:, | and | to )\d+)*))?")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """What the headings of a page can be linked by, as GitHub makes it."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def broken_links(page: Path) -> list[str]:
    broken = []
    for pair in LINK.findall(prose(page)):
        link = pair[0] or pair[1]
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(prose(target))):
            broken.append(link)
    return broken


def sections() -> set[int]:
    return {
        int(number)
        for number in re.findall(r"^## (\d+)\. ", prose(ROOT / "docs" / "design.md"), re.MULTILINE)
    }


def citations(text: str) -> list[tuple[str, str]]:
    """Folder and numbers of every mention of the page, also where a comment goes on in the next line."""
    return CITED.findall(re.sub(r"\s*\n\s*(?:#|\*)?\s*", " ", text))


def numbers(words: str) -> set[int]:
    """`1, 2 and 4 to 6` -> 1, 2, 4, 5, 6."""
    found = set()
    for part in re.split(", | and ", words):
        first, _, last = part.partition(" to ")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text(
        "## `A` word, two\n\n## A word two\n\n```\n# Not one\n```\n", encoding="utf-8"
    )
    page.write_text(
        "# Top\n[1](#top) [2](other.md#a-word-two) [3](other.md#a-word-two-1) [4](https://example.org/x)\n"
        "[5](other.md#not-one) [6](gone.md) ![7](gone.svg) [8](#bottom)\n```\n[9](gone.md)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["other.md#not-one", "gone.md", "gone.svg", "#bottom"]


def test_the_design_keeps_its_numbers() -> None:
    assert sections() == set(range(1, 11))


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=name)
def test_citations_of_the_design_name_a_section_that_is_there(path: Path) -> None:
    for folder, cited in citations(path.read_text(encoding="utf-8")):
        if path.suffix != ".md":
            assert folder.lstrip("(`\"'").endswith("docs/"), "cite it as docs/design.md section N"
            assert cited, "cite a section, not the page"
        if cited:
            assert numbers(cited) <= sections()


def test_citations_are_read_across_lines_and_in_lists() -> None:
    text = "# see docs/design.md\n    # sections 1, 2 and 4 to 6. And design.md section 77; (docs/design.md)"
    assert [(folder, cited and numbers(cited)) for folder, cited in citations(text)] == [
        ("docs/", {1, 2, 4, 5, 6}),
        ("", {77}),
        ("(docs/", ""),
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_of_the_project_that_a_page_names_are_there(page: Path) -> None:
    """Sources in backticks, from the root or from inside dsbd_cli."""
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|c|md))`", prose(page))
    roots = (ROOT, ROOT / "dsbd_cli", page.parent)
    assert [file for file in named if not any((root / file).exists() for root in roots)] == []


def test_the_tree_for_contributors_is_that_of_the_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert BEGIN + tree() + END in page, "another tree by now (python scripts/tree_in_docs.py)"
