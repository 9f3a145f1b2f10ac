"""The docs name only files that exist. Decision records and measurements may name files of their time."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
CODE_PAGES = [page for page in PAGES if not page.startswith(("docs/dev/decisions/", "docs/dev/measurements/"))]
TOP = ("kybernate", "services", "tests", "scripts", "bench", "e2e", "helm", "proto", "docs", "examples")
MOST_WORDS = 86_000
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


def test_the_pages_together_can_be_read() -> None:
    assert sum(len((ROOT / page).read_text().split()) for page in PAGES) <= MOST_WORDS
