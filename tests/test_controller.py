"""The controller against scripted acceptance and costs: no model, no clock.

As in the loop, a round is decided on before the round before it has been observed.
"""

import json
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import pytest

from mlx_mtp.speculative import controller
from mlx_mtp.speculative.controller import Acceptance, Controller
from mlx_mtp.speculative.costs import CostTable, Place, RoundCosts

MOST = 8
VERIFY = [1, 1.03, 1.08, 1.12, 1.16, 1.25, 1.3, 1.35, 1.4]
COSTS = {  # of a round with K drafts, in units of a plain one
    "cheap verify, cheap draft": [c + 0.12 * k for k, c in enumerate(VERIFY)],
    "cheap verify, dear draft": [c + 0.40 * k for k, c in enumerate(VERIFY)],
    "dear verify, cheap draft": [1 + 0.52 * k for k in range(9)],
    "dear verify, dear draft": [1 + 0.80 * k for k in range(9)],
}
HIGH, LOW, NONE = [0.89, 0.80, 0.72], [0.52, 0.45, 0.40], [0.0]


def chain(profile: Sequence[float], k: int) -> list[float]:
    return [profile[min(i, len(profile) - 1)] for i in range(k)]


def speed(costs: Sequence[float], profile: Sequence[float], k: int) -> float:
    return (1 + sum(accumulate(chain(profile, k), mul))) / costs[k]


def best(costs: Sequence[float], profile: Sequence[float]) -> float:
    return max(speed(costs, profile, k) for k in range(MOST + 1))


class Run(NamedTuple):
    controller: Controller
    ks: list[int]
    tokens: list[float]
    seconds: list[float]

    def speed(self, start: int = 0, end: int | None = None) -> float:
        return sum(self.tokens[start:end]) / sum(self.seconds[start:end])


def drive(
    costs: Sequence[float] | Callable[[int], Sequence[float]],
    profile: Sequence[float] | Callable[[int], Sequence[float]],
    rounds: int,
    seed: int = 0,
    *,
    unit: float | Callable[[int], float] = 0.05,
    noise: float = 0.08,
    rows: int = 1,
    length: int = 100,
    table: CostTable | None = None,
    before: Controller | None = None,
) -> Run:
    """Rounds with random outcomes; costs and acceptance may be functions."""
    rng = random.Random(seed)
    chooser = Controller(table or CostTable(MOST), before)
    run = Run(chooser, [], [], [])
    following = chooser.choose(Place(rows, length), MOST)
    for r in range(rounds):
        k, following = following, chooser.choose(Place(rows, length), MOST)
        rates = chain(profile(r) if callable(profile) else profile, k)
        accepted = [
            next((i for i, p in enumerate(rates) if rng.random() >= p), k)
            for _ in range(rows)
        ]
        seconds = (costs(length) if callable(costs) else costs)[k]
        seconds *= unit(r) if callable(unit) else unit
        seconds_read = seconds * rng.lognormvariate(0, noise)
        chooser.observe(k, accepted, Place(rows, length), seconds_read)
        run.ks.append(k)
        run.tokens.append(1 + sum(accepted) / rows)
        run.seconds.append(seconds)
        length += int(run.tokens[-1])
    return run


def reached(costs, profile, ks: Sequence[int]) -> float:
    """The expected speed of some rounds as a share of the best K's."""
    tokens = sum(speed(costs, profile, k) * costs[k] for k in ks)
    return tokens / sum(costs[k] for k in ks) / best(costs, profile)


def check_convergence(costs, profile):
    shares = [
        reached(costs, profile, drive(costs, profile, 80, s).ks[40:]) for s in range(12)
    ]
    assert sum(shares) / len(shares) > 0.93
    assert min(shares) > 0.8


def check_fallback(costs):
    """Drafting stops within 16 rounds of a collapse, and plain decoding goes on."""
    for s in range(12):
        run = drive(costs, lambda r: HIGH if r < 100 else NONE, 300, s)
        assert max(run.ks[90:100]) > 0
        assert 0 in run.ks[100:116]
        assert sum(run.ks[116:]) < 0.25 * len(run.ks[116:])


def check_recovery(costs):
    late = [
        drive(costs, lambda r: NONE if 100 <= r < 150 else HIGH, 300, s).ks[240:]
        for s in range(12)
    ]
    assert sum(reached(costs, HIGH, ks) for ks in late) / len(late) > 0.9


@pytest.mark.parametrize("profile", [HIGH, LOW, NONE], ids=["high", "low", "none"])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_convergence_within_40_rounds(costs, profile):
    check_convergence(costs, profile)


@pytest.mark.parametrize("costs", list(COSTS.values())[:3], ids=list(COSTS)[:3])
def test_fallback_within_16_rounds_and_recovery(costs):
    check_fallback(costs)
    check_recovery(costs)


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_no_worse_than_plain_where_nothing_is_accepted(costs):
    for s in range(4):
        run = drive(costs, NONE, 256, s, unit=1.0)
        assert run.speed() > 0.97
        later = drive(costs, NONE, 256, s, unit=1.0, before=run.controller)
        assert later.speed() > 0.97


@pytest.mark.parametrize("profile", [HIGH, LOW], ids=["high", "low"])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_share_of_the_attainable_speed(costs, profile):
    """Over 600 rounds with costs known, start, trials and exploration included."""
    table = CostTable(MOST)
    first = drive(costs, profile, 200, 99, table=table)
    runs = [
        drive(costs, profile, 600, s, table=table, before=first.controller)
        for s in range(6)
    ]
    shares = [reached(costs, profile, run.ks) for run in runs]
    assert sum(shares) / len(shares) > 0.95


def no_change_is_seen(monkeypatch):
    monkeypatch.setattr(controller, "SURPRISE", float("inf"))
    monkeypatch.setattr(controller, "MEMORY", 1e9)


def drafting_is_never_tried_again(monkeypatch):
    monkeypatch.setattr(controller, "FIRST_PAUSE", 10**9)


def costs_are_not_learned(monkeypatch):
    monkeypatch.setattr(RoundCosts, "add", lambda self, k, seconds: None)
    monkeypatch.setattr(RoundCosts, "ready", True)
    monkeypatch.setattr(RoundCosts, "furthest", MOST)


def acceptance_is_not_conditional(monkeypatch):
    """A rejected draft counts against all positions behind it."""
    right = Acceptance.add

    def wrong(self, accepted, trials):
        right(self, accepted, max(trials, 1))

    monkeypatch.setattr(Acceptance, "add", wrong)


CHEAP = COSTS["cheap verify, cheap draft"]
DEAR = COSTS["dear verify, dear draft"]


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (no_change_is_seen, lambda: check_fallback(CHEAP)),
        (drafting_is_never_tried_again, lambda: check_recovery(CHEAP)),
        (costs_are_not_learned, lambda: check_convergence(DEAR, LOW)),
    ],
)
def test_planted_faults(monkeypatch, plant, check):
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def check_what_is_counted(monkeypatch):
    """With K at random: right drafts count as right, and each position by itself."""
    rng = random.Random(5)
    monkeypatch.setattr(Controller, "_pick", lambda self, costs: rng.randint(0, MOST))
    got = estimates(drive(CHEAP, [1.0], 300).controller)
    assert got == pytest.approx([1.0] * MOST)
    got = estimates(drive(CHEAP, [0.5, 0.95], 600, 1).controller)
    assert got[1] == pytest.approx(0.95, abs=0.1)


def test_positions_are_counted_each_by_itself(monkeypatch):
    check_what_is_counted(monkeypatch)
    acceptance_is_not_conditional(monkeypatch)
    with pytest.raises(AssertionError):
        check_what_is_counted(monkeypatch)


def estimates(chooser: Controller) -> list[float]:
    return [rate.mean for rate in chooser.acceptance]


def test_one_k_for_a_batch():
    """All rows count; a batch knows more after a round than a single row does."""
    runs = [drive(CHEAP, [0.8, 0.3], 60, s, rows=8) for s in range(6)]
    for run in runs:
        assert estimates(run.controller)[:2] == pytest.approx([0.8, 0.3], abs=0.15)
    shares = [reached(CHEAP, [0.8, 0.3], run.ks[20:]) for run in runs]
    assert sum(shares) / len(shares) > 0.93


def test_costs_follow_the_length_of_the_text():
    """Where long text makes verification dear, K falls, at once in a new run too."""

    def costs(length):
        slope = 0.05 + 0.65 * min(length / 6000, 1)
        return [1 + slope * k for k in range(9)]

    table = CostTable(MOST)
    profile = [0.8]
    run = drive(costs, profile, 2500, table=table)
    assert reached(costs(0), profile, run.ks[10:40]) > 0.9
    assert reached(costs(9999), profile, run.ks[-200:]) > 0.93
    known = CostTable.from_dict(json.loads(json.dumps(table.as_dict())), MOST)
    long = drive(costs, profile, 60, length=8000, table=known)
    assert reached(costs(8000), profile, long.ks[5:]) > 0.93


def test_another_program_slows_everything_down():
    for s in range(6):
        run = drive(CHEAP, HIGH, 400, s, unit=lambda r: 3.0 if 150 <= r < 250 else 1.0)
        assert reached(CHEAP, HIGH, run.ks[150:250]) > 0.85
        assert reached(CHEAP, HIGH, run.ks[250:]) > 0.85


def test_single_pauses_do_not_count():
    """A round that takes 50 times as long is a cut outlier."""
    run = drive(CHEAP, HIGH, 400, unit=lambda r: 50.0 if r % 40 == 39 else 1.0)
    assert reached(CHEAP, HIGH, run.ks[60:]) > 0.9


def test_rounds_without_a_time_still_count_drafts():
    chooser = Controller(CostTable(MOST))
    chooser.choose(Place(1, 10), MOST)
    for _ in range(50):
        chooser.choose(Place(1, 10), MOST)
        chooser.observe(0, [0], Place(1, 10), None)
    assert not chooser.costs.at(Place(1, 10)).ready
    assert chooser.choose(Place(1, 10), MOST) == 0


def test_no_more_drafts_than_can_be_of_use():
    run = drive(CHEAP, [1.0], 60)
    assert run.controller.choose(Place(1, 200), MOST) > 2
    assert run.controller.choose(Place(1, 200), 2) == 2
    assert run.controller.choose(Place(1, 200), -1) == 0


def test_costs_survive_a_file():
    table = CostTable(MOST)
    drive(CHEAP, HIGH, 300, table=table)
    copy = CostTable.from_dict(json.loads(json.dumps(table.as_dict())), MOST)
    for k in (1, 2, 3):
        want = table.at(Place(1, 100)).ratio(k)
        assert want == pytest.approx(CHEAP[k], rel=0.15)
        assert copy.at(Place(1, 100)).ratio(k) == pytest.approx(want)
    assert drive(CHEAP, HIGH, 5, table=copy).ks[0] > 0  # nothing to measure first


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(log_ratios=[[], ["x"]]),
        lambda d: d.update(log_ratios=[[]] * 8),
        lambda d: d.update(log_ratios=[]),
        lambda d: d.update(log_ratios=[[], *[[float("nan")]] * 8]),
        lambda d: d.update(log_ratios=[[], *[[1e9]] * 8]),
        lambda d: d.update(log_ratios=3),
        lambda d: d.clear(),
    ],
)
def test_damaged_costs_are_refused(damage):
    table = CostTable(MOST)
    drive(CHEAP, HIGH, 30, table=table)
    saved = table.as_dict()
    damage(next(iter(saved.values())))
    with pytest.raises((ValueError, KeyError, TypeError)):
        CostTable.from_dict(saved, MOST)


def test_repeatable_without_times():
    """Times change nothing, and drafting goes by acceptance."""

    def run(unit):
        chooser = Controller(CostTable.assumed(MOST), timed=False)
        rng, ks = random.Random(3), []
        for r in range(120):
            ks.append(chooser.choose(Place(1, 50 + 2 * r), MOST))
            profile = chain(HIGH if r < 60 else NONE, ks[-1])
            n = next((i for i, p in enumerate(profile) if rng.random() >= p), ks[-1])
            chooser.observe(ks[-1], [n], Place(1, 50 + 2 * r), unit * (1 + ks[-1]))
        return ks

    assert run(1.0) == run(7.0)
    assert min(run(1.0)[10:60]) > 1
    assert sum(run(1.0)[80:]) < 40
