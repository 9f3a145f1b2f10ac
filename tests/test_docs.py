"""The docs name only files that exist. Decision records and measurements may name files of their time."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
CODE_PAGES = [page for page in PAGES if not page.startswith(("docs/dev/decisions/", "docs/dev/measurements/"))]
TOP = ("kybernate", "services", "tests", "scripts", "bench", "e2e", "helm", "proto", "docs", "examples")
MOST_WORDS = {"users": 24_605, "contributors": 50_354}
"""Words of README and ``docs/``, and of ``docs/dev/``: 75,000 together. A word has a letter or a digit."""
MOST_WORDS_IN_A_SENTENCE = 25
"""In the mean of a page for users."""
FOREIGN = ("docs/api.md", "docs/source/features/sleep-wakeup.md")
"""Pages of other projects: Ollama, TensorRT-LLM."""
MADE = ("bench/results",)
"""Paths that commands write."""


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ +(.*?)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in found}


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"[a-z]+:", link) is None and (not target.exists() or (anchor and anchor not in headings(target))):
            yield link


def missing_paths(page: Path) -> Iterator[str]:
    text = page.read_text()
    for found in re.findall(rf"(?<![\w/.-])((?:{'|'.join(TOP)})/[\w./*-]+)", text):
        path = found.rstrip("./")
        if not (any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()) and not path.startswith(MADE):
            yield found
    for name in re.findall(r"`([\w/]+\.py)`", text):
        if not any(any((ROOT / top).glob(f"**/{name}")) for top in TOP) and not (ROOT / name).exists():
            yield name
    for name in re.findall(r"`((?:kybernate|services)(?:\.\w+)+)", text):
        if not is_importable(name):
            yield name


def is_importable(name: str) -> bool:
    """True for a module or package, or a name that one of them defines."""
    path, _, member = name.replace(".", "/").rpartition("/")
    for file in (ROOT / f"{path}.py", ROOT / path / "__init__.py"):
        if file.exists() and re.search(rf"\b{member}\b", file.read_text()):
            return True
    return (ROOT / path / f"{member}.py").exists() or (ROOT / path / member).is_dir()


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: str) -> None:
    assert list(broken_links(ROOT / page)) == []


@pytest.mark.parametrize("page", CODE_PAGES)
def test_every_path_of_code_exists(page: str) -> None:
    assert list(missing_paths(ROOT / page)) == []


def test_every_page_that_code_names_exists() -> None:
    """Messages, comments and the chart name pages of ``docs/``, with or without an anchor."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    named = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.md(?:#[\w-]+)?")
    wrong = []
    for name in listed.splitlines():
        if name.startswith("docs/") or not name.endswith((".py", ".sh", ".yaml", ".txt", ".tpl", ".toml", "Makefile")):
            continue
        for found in named.findall((ROOT / name).read_text()):
            path, _, anchor = found.partition("#")
            if path not in FOREIGN and (not (ROOT / path).exists() or (anchor and anchor not in headings(ROOT / path))):
                wrong.append(f"{name}: {found}")
    assert wrong == []


def test_no_file_names_a_page_that_only_its_authors_have() -> None:
    absent = re.compile(r"\b(?:resea[r]ch|shared/design)/[\w-]+\.md\b|\bresea[r]ch (?:§|notes\b)")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    texts = {name: (ROOT / name).read_bytes().decode(errors="ignore") for name in listed.splitlines()}
    assert {name: found for name, text in texts.items() if (found := absent.findall(text))} == {}


def house(name: str) -> list[str]:
    return [page for page in PAGES if page.startswith("docs/dev/") == (name == "contributors")]


def words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def sentences(text: str) -> list[int]:
    """Words of each sentence of the prose: no code, headings, tables or comments. A code span is one word."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?: {4}|#|\||!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|\*\*", "", re.sub(r"`[^`]*`", "code", text))
    found = [
        words(sentence)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text)
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph)
    ]
    return [count for count in found if count]


@pytest.mark.parametrize("name", MOST_WORDS)
def test_a_house_can_be_read(name: str) -> None:
    assert sum(words((ROOT / page).read_text()) for page in house(name)) <= MOST_WORDS[name]


@pytest.mark.parametrize("page", house("users"))
def test_sentences_of_a_page_for_users_are_short(page: str) -> None:
    counts = sentences((ROOT / page).read_text())
    assert sum(counts) <= MOST_WORDS_IN_A_SENTENCE * len(counts)


def test_sentences_are_counted_as_readers_read_them() -> None:
    prose = "One two `three four`. Five [six](seven.md)\neight!\n\n* nine ten\n* eleven"
    text = f"# A heading\n\n{prose}\n\n| a | table |\n\n    code here\n"
    assert sentences(text) == [3, 3, 2, 1]
    assert words("| a | b-c | d. |") == 3


def test_readme_is_a_page_of_ninety_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
