"""``kyb plan`` and the search behind it."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kybernate.cli import main
from kybernate.lab import forecast as forecasts
from kybernate.lab import plan as planner
from kybernate.lab.cli.plan import _forecast
from kybernate.lab.cli.plan_report import PlanReport, conclusions, curves
from kybernate.lab.cli.simulate_input import Inputs, read_scenario
from kybernate.lab.forecast import Backtest, Forecast
from kybernate.lab.plan import (
    JUDGED,
    Goal,
    PlannedLayout,
    fewest,
    headroom,
    most_runs,
    plan,
    regrouped,
    saved,
    smallest,
    sped_up,
    verified,
)
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.measures import needed
from kybernate.lab.traces import load
from tests.simulate.cases import scenario, seat

LAYOUT = PlannedLayout("seats", 1, 1, 1, False, 0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("least", range(1, 14))
@pytest.mark.parametrize("most", [1, 2, 5, 12])
def test_the_search_finds_the_fewest_and_tries_few(least: int, most: int):
    tried: list[int] = []

    def layout(groups: int) -> PlannedLayout:
        tried.append(groups)
        return replace(LAYOUT, groups=groups, enough=groups >= least)

    found = fewest(layout, most)
    assert found.groups == min(least, most)
    assert found.enough == (least <= most)
    assert len(tried) == len(set(tried)) <= 9


def busy(seats: int = 4):
    """Every seat is asked every 10 s, for 4 s; a switch takes 6 s."""
    requests = [(10.0 * turn + index, index, 4.0) for turn in range(12) for index in range(seats)]
    return scenario(requests, [seat(f"s{index}", park=3.0, activate=3.0, slo_seconds=8.0) for index in range(seats)])


def test_what_is_planned_is_enough_one_less_is_not_and_dedicated_needs_one_group_per_model():
    goal = Goal(share=0.9, price=2.0, gpus_per_group=2, move_seconds=1.0)
    seats, _, alone = plan(busy(), goal)
    assert (seats.name, seats.enough) == ("seats", True)
    assert 1 < seats.groups <= 4
    fewer = plan(busy(), replace(goal, groups_max=seats.groups - 1))[0]
    assert (fewer.enough, fewer.groups) == (False, seats.groups - 1)
    assert (alone.groups, alone.gpus, alone.slo_attainment) == (4, 8, 1.0)
    assert alone.cost == pytest.approx(8 * 100 / 3600 * 2.0)
    assert saved([seats, alone]) == pytest.approx(1 - seats.groups / 4)
    assert alone.switches_per_hour * 119 / 3600 == pytest.approx(4, rel=0.2)


def test_another_policy_is_recommended_where_it_needs_fewer_groups_and_a_worse_one_gets_no_row():
    goal = Goal(share=0.9, move_seconds=1.0, policies=("idle-timeout", "quantum", "exhaustive-ttl", "exhaustive"))
    tried: list[PlannedLayout] = []
    found = plan(busy(8), goal, played=tried.append)
    rows = [(one.policy, one.groups) for one in found if one.name == "seats"]
    best = smallest(found)
    assert best is not None
    assert rows == [("idle-timeout", 8), ("exhaustive-ttl", 7), ("exhaustive", 6)]
    assert (best.policy, best.groups) == ("exhaustive", 6)
    assert "quantum" in {one.policy for one in tried if not one.enough}
    lines = conclusions(
        PlanReport(busy(8), needed(busy(8)), goal, "20 s", tuple(found), tuple(tried), None, None, None)
    )
    assert f"recommended: seats under exhaustive, {best.gpus} GPU" in lines[0]
    assert verified(best, busy(8), busy(8), goal) == best, "the policy of the layout is the one that is checked"


def test_a_search_ends_a_layout_at_the_miss_that_is_one_too_many():
    goal = Goal(share=0.9, move_seconds=1.0, policies=("kyb-balanced",))
    tried: list[PlannedLayout] = []
    plan(busy(), goal, played=tried.append)
    given_up = [one for one in tried if not one.whole]
    assert given_up
    to_the_end: list[PlannedLayout] = []
    plan(busy(), goal, played=to_the_end.append, whole=True)
    known = {(one.name, one.groups): one for one in to_the_end}
    for one in given_up:
        assert one.slo_attainment < goal.share
        assert not known[one.name, one.groups].enough
        assert known[one.name, one.groups].slo_attainment <= one.slo_attainment
    assert [one for one in tried if one.whole] == [known[one.name, one.groups] for one in tried if one.whole]


@pytest.mark.parametrize("name", planner.TRIED)
@pytest.mark.parametrize("host_bytes", [0, 3 * 10**9])
def test_parked_seats_shown_as_one_change_no_decision(name: str, host_bytes: int):
    chance = Random(name)
    requests = [(chance.uniform(0, 4000), int(12 * chance.random() ** 2), chance.uniform(0.5, 9)) for _ in range(500)]
    seats = [seat(f"s{index}", activate=2.0 + index / 2, host_bytes=10**9) for index in range(12)]
    played = regrouped(scenario(requests, seats, host_bytes=host_bytes), 3, 1, 1.5)
    each, one = (
        run(played, planner.POLICIES[name](), RunOptions(jitter=0.3, refresh_seconds=0, merged=merged))
        for merged in (False, True)
    )
    assert one.wait == pytest.approx(each.wait)
    assert one.counters == each.counters


def test_every_model_of_a_trace_gets_a_seat(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "many.csv"
    rows = [f"{at * 9},m{at % 70},80,15" for at in range(140)]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")
    assert kyb(path, "--cost", "1s/1s", "-o", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["needed"]["seats"], report["layouts"][-1]["groups"]) == (140, 70, 70)


def test_llama_swaps_rule_keeps_its_seats_at_home_and_is_not_what_kybernate_saves():
    goal = Goal(share=0.9, move_seconds=1.0)
    seats, other, alone = plan(busy(), goal)
    assert (other.name, other.moves_per_hour) == ("llama-swap", 0.0)
    cheap = replace(other, gpus=1, enough=True)
    assert saved([seats, cheap, alone]) == saved([seats, alone])


def test_every_model_and_every_tier_must_reach_the_goal():
    gold = busy()
    gold = replace(gold, seats=(replace(gold.seats[0], tier="gold", slo_seconds=0.5), *gold.seats[1:]))
    goal = Goal(share=0.7, move_seconds=1.0)
    easy, strict = plan(busy(), goal)[0], plan(gold, goal)[0]
    assert strict.groups > easy.groups, "the tier of one model of four would be hidden in 70 % of all requests"
    assert strict.worst_tier_attainment >= 0.7
    every = plan(busy(), replace(goal, model_share=0.95))[0]
    assert every.worst_attainment >= 0.95


def test_spare_groups_are_counted_and_not_used():
    goal = Goal(share=0.9, price=2.0)
    without, with_one = plan(busy(), goal)[0], plan(busy(), replace(goal, spare=1))[0]
    assert with_one.groups == without.groups + 1
    assert with_one.wait_mean_s == without.wait_mean_s
    assert with_one.cost_of_month > without.cost_of_month


def test_host_memory_of_parked_models_has_a_price():
    sized = replace(busy(), seats=tuple(replace(one, vram_bytes=40 * 10**9) for one in busy().seats))
    seats, _, alone = plan(sized, Goal(share=0.9, memory_price=0.5))
    assert (seats.host_gb, seats.cost_of_month) == (160, 80)
    assert (alone.host_gb, alone.cost_of_month) == (0, 0)


def test_mig_and_time_slicing_keep_models_in_memory_and_slow_them_down():
    sized = replace(busy(), seats=tuple(replace(one, vram_bytes=18 * 10**9) for one in busy().seats))
    layouts = {one.name: one for one in plan(sized, Goal(share=0.9, gpu="H100"))}
    sliced, mig = layouts["time-slicing"], layouts["mig"]
    assert (sliced.gpus, mig.gpus, layouts["dedicated"].gpus) == (2, 1, 4)
    assert sliced.stretch > 1
    assert mig.stretch == pytest.approx(4), "a slice of a quarter has a quarter of the bandwidth"
    without = {one.name for one in plan(sized, Goal(share=0.9, gpu="L4"))}
    assert without == {"seats", "llama-swap", "time-slicing", "dedicated"}, "it has no MIG"
    large = replace(busy(), seats=tuple(replace(one, vram_bytes=75 * 10**9) for one in busy().seats))
    assert {one.name for one in plan(large, Goal(gpu="H100"))} == {"seats", "llama-swap", "dedicated"}


def test_each_layout_is_reported_as_it_is_played():
    reported: list[PlannedLayout] = []
    found = plan(busy(), Goal(share=0.9), played=reported.append)
    assert len(found) <= len(reported) <= most_runs(4, Goal(share=0.9))
    assert all(one in reported for one in found)


def test_a_plan_is_verified_on_requests_that_it_has_not_seen():
    goal = Goal(share=0.9, move_seconds=1.0)
    best = smallest(plan(busy(), goal))
    assert best is not None
    assert verified(best, busy(), busy(), goal) == best
    resized = replace(busy(), seats=tuple(replace(one, activate_seconds=9.0) for one in busy().seats))
    assert verified(best, busy(), resized, goal) == best, "a model's size does not depend on its rank in these hours"
    assert verified(best, busy(), busy(6), goal).slo_attainment < best.slo_attainment


def test_pinned_seats_keep_their_groups_and_the_search_begins_where_others_have_room():
    pinned = busy()
    pinned = replace(pinned, seats=tuple(replace(one, pinned=one.name in ("s0", "s3")) for one in pinned.seats))
    tried: list[PlannedLayout] = []
    layouts = {one.name: one for one in plan(pinned, Goal(share=0.5), played=tried.append)}
    assert min(one.groups for one in tried if one.name in ("seats", "llama-swap")) == 3
    assert [one.group for one in regrouped(pinned, 3, 1, None).seats] == ["G0", "G2", "G2", "G1"]
    assert layouts["seats"].enough


def test_attainment_has_an_interval_and_switches_may_vary():
    sure, _, alone = plan(busy(), Goal(share=0.9))
    assert (sure.slo_low, sure.slo_high) == (0.0, 1.0), "one block of time tells nothing of others"
    hours = replace(busy(), at=tuple(at * 200 for at in busy().at), duration=busy().duration * 200)
    one = plan(hours, Goal(share=0.5, groups_max=1), RunOptions(jitter=0.5))[0]
    assert one.slo_low <= one.slo_attainment <= one.slo_high
    assert one != plan(hours, Goal(share=0.5, groups_max=1))[0]
    assert alone.slo_attainment == 1


def test_each_model_with_enough_requests_gets_a_promise_that_unseen_hours_are_held_to():
    chance = Random(3)
    requests = sorted((chance.uniform(0, 86_400), int(chance.random() < 0.5), 4.0) for _ in range(200))
    requests += [(float(at), 2, 4.0) for at in range(100)]
    day = scenario(requests, [seat(f"s{index}", activate=2.0) for index in range(3)])
    day = replace(day, duration=86_400.0)
    goal = Goal(share=0.5, move_seconds=1.0)
    best = smallest(plan(day, goal))
    assert best is not None
    assert {name: one.requests for name, one in best.models.items()} == Counter(f"s{who}" for _, who, _ in requests)
    assert set(best.promises) == {"s0", "s1"}, "a hundred requests in one burst are one trial"
    assert all(0.6 < best.promises[name] < best.models[name].attained for name in best.promises)
    assert best.broken(verified(best, day, day, goal)) == {}
    slower = replace(best, models={name: replace(one, attained=0.3) for name, one in best.models.items()})
    assert best.broken(slower) == {name: (best.promises[name], 0.3) for name in ("s0", "s1")}
    few = replace(slower, models={name: replace(one, requests=JUDGED - 1) for name, one in slower.models.items()})
    assert best.broken(few) == {}

    def shown(check: PlannedLayout, answer: PlannedLayout = best) -> list[str]:
        report = PlanReport(day, needed(day), goal, "20 s", (answer,), (), check, None, None)
        return [line for line in conclusions(report) if "promise" in line or "unseen" in line]

    lowest = min(best.promises, key=lambda name: best.promises[name])
    assert best.promised is not None
    assert best.promised <= best.slo_attainment
    assert shown(best)[0] == (
        f"promised for another day of at most 300 requests: {100 * best.promised:.1f} % in SLO, at least "
        f"{100 * best.promises[lowest]:.1f} % of each model's ({lowest}); too few requests for a promise: 1 model of 3"
    )
    assert shown(best)[1].endswith("; as promised")
    assert "not as promised: s0 30.0 % instead of " in shown(slower)[1]
    assert "not as promised: all requests 20.0 % instead of " in shown(replace(slower, slo_attainment=0.2))[1]
    assert shown(replace(slower, busiest=301))[1].endswith("no promise covers them: a day has 301 requests")
    hour = smallest(plan(replace(day, at=tuple(at / 24 for at in day.at), duration=3600.0), replace(goal, share=0.01)))
    assert hour is not None
    assert (hour.promised, hour.promises) == (None, {}), "other hours of the day are not like this one"
    assert shown(hour, hour)[0].startswith("promised: nothing")
    assert shown(hour, hour)[1].endswith("nothing was promised")


def test_a_promise_of_several_days_is_that_of_the_worst_one():
    rows = [(3600.0 * hour + 900 * turn, 0, 30.0) for hour in range(48) for turn in range(4)]
    rows += [(at + 20, 1, 30.0) for at, *_ in rows if at >= 86_400]  # the first one serves then: these miss
    days = replace(scenario(rows, [seat("s0", slo_seconds=8.0), seat("s1", slo_seconds=8.0)]), duration=2 * 86_400.0)
    assert smallest(plan(days, Goal(share=0.6, groups_max=1))) is None, "enough for the trace, not for another day"
    found = smallest(plan(days, Goal(share=0.5, groups_max=1)))
    assert found is not None
    assert (found.slo_attainment, found.busiest) == (pytest.approx(2 / 3), 192)
    assert found.promised == pytest.approx(1 / 2)


def test_headroom_is_how_much_more_traffic_the_layout_serves():
    goal, one_by_one = Goal(share=0.9, move_seconds=1.0), replace(busy(), cap=1)
    best = smallest(plan(one_by_one, goal))
    assert best is not None
    room = headroom(best, one_by_one, goal)
    assert 1 <= room < 8
    assert verified(best, one_by_one, sped_up(one_by_one, room), goal).enough
    assert not verified(best, one_by_one, sped_up(one_by_one, room * 1.05), goal).enough
    assert headroom(best, one_by_one, replace(goal, share=0.01)) == pytest.approx(8, rel=0.05)


def test_heavy_seats_are_spread_first():
    requests = [(float(turn), 0, 9.0) for turn in range(5)] + [
        (float(turn), index, 1.0) for turn in range(5) for index in (1, 2)
    ]
    spread = regrouped(scenario(requests, [seat("heavy"), seat("light"), seat("also")]), 2, 1, 3.0)
    assert [one.group for one in spread.seats] == ["G0", "G1", "G1"]
    assert regrouped(spread, 1, 2, 3.0).move_seconds is None


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    rows = [f"{at},{'abcd'[at // 5 % 4]},800,150" for at in range(0, 600, 5)]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


def kyb(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, words)])
    return int(end.value.code or 0)


def test_as_people_call_it(trace: Path, capsys: pytest.CaptureFixture[str]):
    words = (trace, "--slo", "15:0.9", "--cost", "2s/2s", "--slots", "1,2", "--memory", 80, "--price", 3)
    assert kyb(*words) == 0
    captured = capsys.readouterr().out
    assert captured.startswith("E[active] = ")
    assert kyb(*words, "-o", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in report["layouts"]] == ["seats", "seats", "packed", "llama-swap", "dedicated"]
    assert all(one["enough"] for one in report["layouts"])
    assert report["goal"]["slo_seconds"] == 15
    assert report["complete"] is True


def test_room_for_kv_caches_costs_groups(trace: Path, capsys: pytest.CaptureFixture[str]):
    needed = {}
    for cap in (2, 40):
        words = ("--slo", "15:0.9", "--memory", 80, "--vram", 20, "--kv", 1, "--cap", cap, "-o", "json")
        assert kyb(trace, *words) == 0
        rows = json.loads(capsys.readouterr().out)["layouts"]
        needed[cap] = next(one for one in rows if one["name"] == "packed")
    assert needed[2]["groups"] < needed[40]["groups"]
    assert needed[2]["host_gb"] == 4 * 22


def test_the_answer_is_checked_on_unseen_hours(trace: Path, capsys: pytest.CaptureFixture[str]):
    words = (trace, "--slo", "15:0.9", "--cost", "2s/2s", "--duration", 300, "--verify", 300)
    assert kyb(*words) == 0
    captured = capsys.readouterr()
    assert "on the unseen hours:" in captured.out
    assert "of at most" in captured.err
    assert kyb(*words, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["verified"]["slo_attainment"] >= 0.9


def test_a_forecast_says_how_good_it_is_and_until_when_the_plan_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, page = tmp_path / "days.csv", tmp_path / "plan.html"
    rows = [
        f"{hour * 3600 + at * 600},a,80,15" for hour in range(100) for at in range(1 + 4 * (hour % 24 in range(8, 18)))
    ]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")
    words = (path, "--cost", "2s/2s", "--duration", 86_400, "--forecast", "1d")
    assert kyb(*words) == 0
    text = capsys.readouterr().out
    assert "forecast of 1 day (" in text
    assert "1 days" not in text
    assert "backtest, " in text
    assert "the smallest layout of seats is enough for " in text
    assert kyb(*words, "--page", page, "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)["forecast"]
    assert [one["method"] for one in found["backtest"]] == ["naive day", "level", "trend"]
    assert found["days"][0][1] == pytest.approx(64, rel=0.2)
    assert found["headroom"] >= 1
    assert found["growth"] is None
    assert found["busiest_day"] == 64
    drawn = page.read_text()
    assert drawn.count("<svg") == 1
    assert "<td>dedicated</td>" in drawn
    assert kyb(path, "--cost", "2s/2s", "--start", 36_000, "--duration", 3600, "--forecast", "1d") == 0
    assert "give --duration 86400" in capsys.readouterr().out
    assert kyb(path, "--duration", 7200, "--start", 0, "--forecast", "week") == 2
    short = tmp_path / "short.csv"
    short.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows[:60]]) + "\n")
    assert kyb(short, "--forecast", "7d") == 2
    assert "give a trace of at least 4 days" in capsys.readouterr().err


def test_models_without_a_seat_in_the_plan_are_not_forecast(trace: Path):
    rows = list(load(trace))
    given = Inputs(traces=(trace,), seats=1)
    with pytest.MonkeyPatch.context() as patch:
        seen: list[list[float]] = []
        patch.setattr(forecasts, "forecast", lambda hours, days: seen.append(hours))
        patch.setattr(forecasts, "whole_hours", lambda moments: 1)
        _, _, left_out = _forecast(given, read_scenario(given), 1)
    assert left_out == sum(one.model != "a" for one in rows) == 90
    assert seen == [[30]]


def test_the_outlook_compares_days_with_the_busiest_one():
    tested = (Backtest("naive day", 0.1, 0.1, 0.1, 0.6, 1.0), Backtest("level", 0.2, 0.2, 0.2, 0.7, 1.0))
    paths = ((100.0,) * 5 + (900.0,) * 85,) * 3
    expected = Forecast("level", tested, 1, 7, ((90.0, 100.0, 110.0),) * 7, (0.9, 1.0, 1.1), paths)
    report = PlanReport(busy(), needed(busy()), Goal(), "20 s", (), (), None, expected, 8.15, busiest_day=100.0)
    printed = "\n".join(conclusions(report))
    assert "enough for at least 8 times this trace" in printed
    assert "exceeds that in 6 days" in printed
    assert "the band that asks for 80 % held 70% of them, 68 to 85 % of unseen days of other fleets" in printed
    assert "in 1 day " in conclusions(replace(report, headroom=0.5))[-1]


def test_curves_are_labelled_by_name_and_slots():
    played = [replace(LAYOUT, slots=slots, gpus=gpus) for slots in (1, 2) for gpus in (4, 2)]
    assert curves([*played, replace(LAYOUT, name="dedicated")]) == {
        "seats, 1 slot": [(2, 0), (4, 0)], "seats, 2 slots": [(2, 0), (4, 0)], "dedicated": [(1, 0)],
    }  # fmt: skip


def test_a_page_without_matplotlib_is_refused_before_anything_is_played(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert kyb(trace, "--page", tmp_path / "plan.html") == 1
    printed = capsys.readouterr().err
    assert "make setup" in printed
    assert "layouts" not in printed


def test_ctrl_c_shows_what_was_played(trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*given: object, **more: object) -> PlannedLayout:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "regrouped", _after(planner.regrouped, 1, interrupted))
    assert kyb(trace, "--slo", "0.5:0.99", "--cost", "2s/2s") == 130
    captured = capsys.readouterr()
    assert [line.split()[:2] for line in captured.out.splitlines() if line.startswith("seats")] == [
        ["seats", "kyb-balanced"]
    ]
    assert "at most " in captured.out, "one group was given up as soon as it could not be enough"
    assert "interrupted" in captured.err


def _after(first: Callable[..., Any], count: int, then: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([first] * count)
    return lambda *given, **more: next(calls, then)(*given, **more)


def test_too_few_groups_is_exit_code_1(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert kyb(trace, "--slo", "0.5:0.99", "--groups-max", 1) == 1
    captured = capsys.readouterr()
    assert "1 group cannot serve" in captured.err
    assert "too few" in captured.out


@pytest.mark.parametrize(
    "words",
    [
        ("--slo", "fast"),
        ("--slo", "20:95"),
        ("--slo", "1e300"),
        ("--slots", "0"),
        ("--policy", "a,b"),
        ("--gpu", "B900"),
        ("--verify", "9"),
    ],
)
def test_a_mistake_exits_with_2_and_a_remedy(words: tuple[str, str], trace: Path, capsys: pytest.CaptureFixture[str]):
    assert kyb(trace, *words) == 2
    assert words[1].split(",")[0] in capsys.readouterr().err
