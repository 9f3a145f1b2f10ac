"""The checks of ``make check`` that are our own: each finds what is planted."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from scripts import check_imports, check_language

ROOT = Path(__file__).resolve().parent.parent


def words(text: str) -> list[tuple[int, str]]:
    return list(check_language.findings(text.splitlines()))


@pytest.mark.parametrize("word", check_language.UNUSED)
def test_each_listed_word_is_found_in_prose(word: str) -> None:
    assert words(f"The seat is ready.\nIt was {word} here.") == [(2, word)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def processes_" + "told() -> None:", [(1, "told")]),
        ("class Jobs" + "Told:", [(1, "told")]),
        ("NO" + "BODY = 1", [(1, "nobody")]),
        ("it is put up\n    # with until now", [(1, "put up with")]),
        ("an untold story, a comet, wholesome", []),
        ("the incoming seat has demand", []),
    ],
)
def test_identifiers_are_split_and_phrases_run_over_lines(text: str, found: list[tuple[int, str]]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("as (resea" + "rch/checkpoint.md §3) has it", [(1, "resea" + "rch/checkpoint.md")]),
        ("see ../../sha" + "red/design/house.md", [(1, "sha" + "red/design/house.md")]),
        ("see https://example.org/resea" + "rch/paper; our resea" + "rch/design", []),
        ("inferred (resea" + "rch §1.4)", [(1, "resea" + "rch §")]),
        ("Of the\n# resea" + "rch, section 4.3; the resea" + "rchers", [(1, "the resea" + "rch")]),
    ],
)
def test_pages_that_are_not_in_the_repository_are_found(text: str, found: list[tuple[int, str]]) -> None:
    assert words(text) == found


def test_a_planted_word_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_language, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "page.md").write_text("A seat that some" + "body has.\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "page.md"], check=True)
    assert check_language.main([]) == 1
    (tmp_path / "page.md").write_text("An allocated seat.\n")
    assert check_language.main([]) == 0


def test_riddles_of_grammar_in_pages_are_counted_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_language, "ROOT", tmp_path)
    monkeypatch.setattr(check_language, "MOST_RIDDLES", 2)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "page.md").write_text("A pool of which one seat moves. What is parked is those that wait.\n")
    (tmp_path / "code.py").write_text("# What is counted are pages.\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)

    assert check_language.main([]) == 1
    assert "3 times, limit 2: name it (page.md 3)" in capsys.readouterr().out
    monkeypatch.setattr(check_language, "MOST_RIDDLES", 3)
    assert check_language.main([]) == 0


def graph(*imports: tuple[str, str]) -> grimp.ImportGraph:
    made = grimp.ImportGraph()
    for importer, imported in imports:
        made.add_import(importer=importer, imported=imported)
    return made


def test_a_circle_is_found() -> None:
    straight = [("services.a", "services.b"), ("services.b", "kybernate.c"), ("services.a", "kybernate.c")]
    assert check_imports.circles(graph(*straight)) == []
    [circle] = check_imports.circles(graph(*straight, ("kybernate.c", "services.a")))
    assert set(circle) == {"services.a", "services.b", "kybernate.c"} or set(circle) == {"services.a", "kybernate.c"}


def test_a_pure_module_imports_nothing_impure() -> None:
    assert check_imports.claims_purity('"""What decides. Pure: values in, values out."""')
    assert check_imports.claims_purity('"""What decides.\n\nPure.\n"""')
    assert not check_imports.claims_purity('"""Reads files; the purest of readers."""')
    imports = graph(("services.a", "asyncio"), ("services.a", "kybernate.bus.nats"), ("services.a", "kybernate.seat"))
    assert check_imports.impurities(imports, "services.a") == ["asyncio", "kybernate.bus.nats"]


def test_the_project_passes_and_its_cores_are_among_the_pure_modules() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/check_imports.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split(";")[1].split()[0]) >= 70
    for module in (
        *("kybernate.seat", "kybernate.policy.kyb", "kybernate.topology.planner", "services.plugin.core.devices"),
        *(f"services.gpu_manager.core.{name}" for name in ("board", "arbiter", "switch", "view", "state", "recovery")),
        *("services.checkpointer.core.procedure", "services.checkpointer.core.failures"),
        *("services.router.core.traffic", "services.router.core.upstreams", "services.webhook.core.mutation"),
    ):
        assert check_imports.is_pure(module), module
