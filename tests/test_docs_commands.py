"""Commands of the users' pages: ``kyb`` knows each one and its options, ``make`` its target, the chart its values;
those that need no stack are run."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from kybernate.cli.app import app
from kybernate.dev.demo.command import demo

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md")))
WITHOUT_STACK = (
    "advise",
    "config check",
    "config explain",
    "config init",
    "onboard",
    "simulate --scenario",
    "topology --preset",
)


def code_lines(text: str) -> Iterator[str]:
    """Lines of shell in blocks of code, without comments; lines that end with a backslash are joined."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(
        r"(?:^|\n)((?: {4,}\S.*\n?)+)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"\s+#.*$", "", line).strip()


def written(page: str) -> Iterator[str]:
    """Each command line of a page, also within sentences."""
    text = (ROOT / page).read_text()
    yield from code_lines(text)
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        yield code.strip()


def kyb_calls(line: str) -> Iterator[list[str]]:
    """The words after ``kyb`` of each call in a line: the first of alternatives, without brackets."""
    line = re.sub(r"\\\|\S*", "", line.replace("[", "").replace("]", ""))
    for match in re.finditer(r"(?:^|&& |-- |-it |console |\s)(?:\.venv/bin/)?kyb(?= |$)([^|;>&]*)", line):
        if re.match(r"^(?:[A-Z_]+=\S* )*(?:\.venv/bin/)?kyb\b", line) or re.search(
            r"(?:&& |-- |console |:\S+ )kyb\b", line
        ):
            yield [word for word in shlex.split(match[1].replace("…", " ").replace("'", "")) if word]


def check(words: list[str]) -> None:
    """Raises a usage error where ``kyb`` would refuse these options, or has no such command."""
    command, above = typer.main.get_command(app), None
    if words[:1] == ["demo"]:
        inner = typer.Typer()
        inner.command()(demo)
        command, words = typer.main.get_command(inner), words[1:]
    while True:
        context = typer.Context(command, parent=above, info_name="kyb")
        commands = getattr(command, "commands", None)
        if commands is None or not words or words[0].startswith("-"):
            break
        assert words[0] in commands, f"no command {words[0]}"
        command, above, words = commands[words[0]], context, words[1:]
    _, left, _ = command.make_parser(context).parse_args(list(words))
    assert not left, f"too many words: {left}"


@pytest.mark.parametrize("page", PAGES)
def test_kyb_knows_every_command_and_option_of_the_page(page: str) -> None:
    for line in written(page):
        for words in kyb_calls(line):
            try:
                check(words)
            except Exception as error:
                if "requires an argument" not in str(error):  # a sentence names the option alone
                    pytest.fail(f"{page}: {line}: {error}")


def test_the_checks_see_what_is_wrong() -> None:
    assert len([words for page in PAGES for line in written(page) for words in kyb_calls(line)]) > 100
    for wrong in ("kyb statsu", "kyb status --no-such", "kyb unpin A B", "docker compose exec console kyb nonsense"):
        (words,) = kyb_calls(wrong)
        with pytest.raises(Exception, match=r"no command|o such option|too many|No such"):
            check(words)


@pytest.mark.parametrize("page", PAGES)
def test_make_has_every_target_of_the_page(page: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {match for line in written(page) for match in re.findall(r"^make ([a-z][\w-]*)", line)}
    assert asked <= targets


@pytest.mark.parametrize("page", PAGES)
def test_the_chart_has_every_value_that_the_page_sets(page: str) -> None:
    values = yaml.safe_load((ROOT / "helm/kybernate/values.yaml").read_text())
    text = (ROOT / page).read_text()
    for name in re.findall(r"--set(?:-string)? ([\w.]+)=", text):
        found = values
        for part in name.split("."):
            assert part in found, f"{page}: the chart has no value {name}"
            found = found[part]


def without_stack() -> list[str]:
    """Calls that need neither a stack, a cluster nor a file of the reader's."""
    found = dict[str, None]()
    for page in PAGES:
        for line in code_lines((ROOT / page).read_text()):
            for call in kyb_calls(line):
                files = [one for one in call if re.search(r"/|\.(ya?ml|csv|jsonl|svg|gz)$", one) and "=" not in one]
                if " ".join(call).startswith(WITHOUT_STACK) and all((ROOT / file).exists() for file in files):
                    found[" ".join(call)] = None
    return list(found)


@pytest.mark.parametrize("call", without_stack())
def test_what_needs_no_stack_runs(call: str) -> None:
    argv = [sys.executable, "-m", "kybernate", *call.split()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
