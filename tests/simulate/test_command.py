"""``kyb simulate`` as people call it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.cli import main
from kybernate.seat import SeatState
from services.gpu_manager.ledger import Costs, Durable, Ledger, LedgerEntry, LedgerFile


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "many.csv"
    rows = [f"{at},{model},800,{tokens}" for at, model, tokens in _rows()]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


def _rows() -> Iterator[tuple[float, str, int]]:
    for second in range(0, 600, 5):
        yield float(second), ("chat", "code", "chat", "mail")[second // 5 % 4], 40 + second % 100


def kyb(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *map(str, words)])
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_a_trace_against_policies_begins_with_what_is_needed_at_all(trace: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = kyb(capsys, trace, "--policy", "kyb-balanced,exhaustive", "--cost", "2s/3s")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("E[active] = ")
    assert "slots needed at all" in lines[0]
    assert "many (many-model): 120 requests" in lines[1]
    assert any(line.startswith("kyb-balanced") for line in lines)
    assert any(line.startswith("exhaustive") for line in lines)


def test_the_report_as_data_and_as_a_picture(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.svg"
    words = (
        capsys, trace, "-o", "json", "--plot", picture, "--groups", 2, "--move-seconds", 3, "--tier", "chat=gold",
        "--vram", "chat=10", "--vram", 20, "--slo", 15, "--jitter", 0.2, "--slowdown", "1:1,8:1.5", "--duration", 300,
    )  # fmt: skip
    code, out, _ = kyb(*words)
    report = json.loads(out)
    assert code == 0
    assert (report["requests"], report["groups"], report["seats"]) == (60, 2, 3)
    keys = {"scenario", "policy", "wait_mean_s", "wait_p99_s", "wait_max_s", "slo_attainment", "switches_per_hour"}
    assert all(keys <= row.keys() for row in report["policies"])
    assert set(report["policies"][0]["slo_by_tier"]) == {"gold", "standard"}
    first = picture.read_bytes()
    assert b"<svg" in first
    kyb(*words)
    assert picture.read_bytes() == first


def test_a_ready_scenario_needs_no_file(capsys: pytest.CaptureFixture[str]):
    code, out, _ = kyb(capsys, "--scenario", "poisson", "--policy", "exhaustive", "--cost", "fast")
    assert code == 0
    assert "poisson, window 0" in out


def test_costs_from_a_ledger(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "ledger"
    costs = Costs(park_seconds=2.0, activate_seconds=1.0)
    entry = LedgerEntry(
        seat="g0-0", state=SeatState.PARKED, epoch=1, lease=False, pod="default/a", pod_uid="a",
        annotations={"kyb.ai/model": "chat"}, durable=Durable(vram_bytes=10**10, costs=costs),
    )  # fmt: skip
    file = LedgerFile(path)
    for epoch in (1, 2):
        file.write(Ledger(boot_id="b", epoch=epoch, seats=(entry,)), durable=False)
    with path.open("a") as ledger:
        ledger.write('{"torn')
    code, out, _ = kyb(capsys, trace, "--measured", path, "-o", "json", "--policy", "exhaustive")
    assert code == 0
    assert json.loads(out)["policies"][0]["switches_per_hour"] > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "give either traces or --scenario"),
        (("--scenario", "poisson", "TRACE"), "give either traces or --scenario"),
        (("--scenario", "s9"), "no reference scenario 's9'"),
        (("--scenario", "gentd26"), "lora_request_trace.csv"),
        (("TRACE", "--policy", "kyb-balance"), "did you mean"),
        (("TRACE", "--policy", ","), "--policy names none"),
        (("TRACE", "TRACE"), "is named twice; name it once: --speed-up 2 doubles its load"),
        *((("TRACE", option, "inf"), option) for option in ("--speed-up", "--sharing", "--cold-start", "--slo")),
        *((("TRACE", option, "1e30"), option) for option in ("--kv", "--memory", "--host-memory", "--move-seconds")),
        (("TRACE", "--cost", "quick"), "neither a name"),
        (("TRACE", "--tier", "chat=golden"), "no tier 'golden'"),
        (("TRACE", "--tier", "chta=gold"), "no seat serves model 'chta'"),
        (("TRACE", "--vram", "chat=big"), "--vram: 'big' is not a size"),
        (("TRACE", "--vram", "none=2"), "no seat serves model 'none'"),
        (("TRACE", "--slowdown", "1"), "--slowdown"),
        (("TRACE", "--start", "9999"), "no request in this part"),
        (("HEADER",), "there is no request in it"),
        (("TRACE", "--pin", "chat"), "leave no slot"),
        (("TRACE", "--measured", "TRACE"), "no ledger of a GPU manager"),
        (("missing.csv",), "no such file"),
        (("--scenario", "poisson", "--duration", "60"), "--duration cut a trace"),
        (("--scenario", "servegen", "TRACE", "TRACE"), "made from one trace"),
    ],
)
def test_a_mistake_exits_with_2_and_a_remedy(
    options: tuple[str, ...], text: str, trace: Path, capsys: pytest.CaptureFixture[str]
):
    header = trace.with_name("header.csv")
    header.write_text("arrival_s,model,prompt_tokens,output_tokens\n")
    code, _, err = kyb(capsys, *({"TRACE": str(trace), "HEADER": str(header)}.get(each, each) for each in options))
    assert code == 2
    assert text in err


@pytest.mark.parametrize(("place", "text"), [("p.bmp", ".png, .svg, .pdf"), ("none/p.SVG", "make it first")])
def test_a_picture_that_cannot_be_made_is_reported_before_anything_is_played(
    place: str, text: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, out, err = kyb(capsys, trace, "--plot", tmp_path / place, "--policy", "exhaustive")
    assert (code, out, text in err) == (1, "", True)


def test_an_unknown_policy_is_answered_with_the_names_once(trace: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = kyb(capsys, trace, "--policy", "best")
    assert code == 2
    assert err.count("kyb-slo") == 1


def test_one_request_needs_one_slot(trace: Path, capsys: pytest.CaptureFixture[str]):
    trace.write_text("arrival_s,model,prompt_tokens,output_tokens\n5,a,10,100\n")
    code, out, _ = kyb(capsys, trace, "--policy", "exhaustive")
    assert code == 0
    assert "1 at most" in out
