"""What a round costs by its number of drafts, learned from rounds as they are timed.

It knows no clock and no file: the loop times rounds, and whoever loads a model keeps
the table from one program to the next.
"""

import math
from collections import deque
from statistics import median
from typing import NamedTuple

# A round is compared with a round of another K, without drafts if it can be, among the
# last NEAR ones, so that what slows the machine down slows both. Of each K the last
# SAMPLES comparisons count, by their median: a single timing may be off by any factor.
NEAR = 8
SAMPLES = 15
FEW = 3
CARRIED = 2  # comparisons that go over to other circumstances
PRIOR_SLOPE = 0.2  # of the cost ratio per draft, before anything was measured
PRIOR_WEIGHT = 1.0  # of the line through the other K, in comparisons


class RoundCosts:
    """What a round costs by K, in units of a round without drafts.

    Args:
        max_drafts: largest K.
    """

    def __init__(self, max_drafts: int):
        self.max_drafts = max_drafts
        self.samples: list[list[float]] = [[] for _ in range(max_drafts + 1)]
        self.plain_rounds = 0
        self._near: deque[tuple[int, float]] = deque(maxlen=NEAR)
        self._ratios = self._fit()

    def add(self, k: int, seconds: float) -> None:
        """Learn from one round with ``k`` drafts."""
        value = math.log(max(seconds, 1e-9))
        self.plain_rounds += k == 0
        if k:
            plain = [v for i, v in list(self._near)[-2:] if i == 0]
            if plain:
                self._sample(k, value - median(plain))
            elif len(self.samples[k]) < FEW:  # better than nothing: through the others
                others = [v - math.log(self.ratio(i)) for i, v in self._near if i != k]
                if len(others) > 1:
                    self._sample(k, value - median(others))
        else:  # the unit itself: this tells of the others
            for other in {i for i, _ in self._near if i}:
                values = [v for i, v in self._near if i == other]
                self._sample(other, median(values) - value)
        self._near.append((k, value))

    def _sample(self, k: int, log_ratio: float) -> None:
        self.samples[k] = [*self.samples[k], log_ratio][-SAMPLES:]
        self._ratios = self._fit()

    def ratio(self, k: int) -> float:
        """Cost of a round with ``k`` drafts in units of one without."""
        return self._ratios[k]

    def _fit(self) -> list[float]:
        """Medians, drawn to the line through the others and made to rise with K."""
        measured = {
            k: (math.exp(median(samples)), len(samples))
            for k, samples in enumerate(self.samples)
            if samples
        }
        blocks = [[1.0, 1e9, 1]]  # mean, weight and number of K, as they rise
        for k in range(1, self.max_drafts + 1):
            line = 1 + k * self._slope({i: m for i, m in measured.items() if i != k})
            value, weight = measured.get(k, (line, 0))
            total = weight + PRIOR_WEIGHT
            mean = (value * weight + line * PRIOR_WEIGHT) / total
            blocks.append([mean, total, 1])
            while blocks[-2:-1] and blocks[-2][0] > blocks[-1][0]:
                (m, w, n), (mean, weight, count) = blocks.pop(-2), blocks.pop()
                joint = (m * w + mean * weight) / (w + weight)
                blocks.append([joint, w + weight, n + count])
        return [mean for mean, _, count in blocks for _ in range(count)]

    @staticmethod
    def _slope(measured: dict[int, tuple[float, int]]) -> float:
        """Of the line through (0, 1) nearest to the measured ratios."""
        top = sum(n * k * (value - 1) for k, (value, n) in measured.items())
        bottom = sum(n * k * k for k, (_, n) in measured.items())
        return max(top / bottom, 0.0) if bottom else PRIOR_SLOPE

    @property
    def furthest(self) -> int:
        """The largest K worth a thought: ratios far from any timing mean nothing."""
        measured = max((k for k, s in enumerate(self.samples) if s), default=0)
        return min(max(2 * measured, 1), self.max_drafts)

    def comparisons(self, k: int) -> int:
        """How many timings the ratio of ``k`` rests on."""
        return len(self.samples[k])

    @property
    def ready(self) -> bool:
        """Whether a plain round can be compared with, or something was known before."""
        return self.plain_rounds > 1 or any(self.samples)

    def carried(self) -> "RoundCosts":
        """For other circumstances (a longer text): a guess that soon gives way."""
        new = RoundCosts(self.max_drafts)
        new.samples = [samples[-CARRIED:] for samples in self.samples]
        new._ratios = new._fit()
        return new

    def as_dict(self) -> dict:
        return {"log_ratios": self.samples}

    @classmethod
    def from_dict(cls, saved: dict) -> "RoundCosts":
        """Raises ValueError, KeyError or TypeError for anything but ``as_dict()``'s."""
        samples = [[float(x) for x in of_k] for of_k in saved["log_ratios"]]
        if not samples or any(abs(x) > 20 or x != x for of_k in samples for x in of_k):
            raise ValueError("not a cost table")
        new = cls(len(samples) - 1)
        new.samples = samples
        new._ratios = new._fit()
        return new


class Place(NamedTuple):
    """What costs depend on.

    Args:
        rows: of the batch.
        length: positions in the caches.
        whole: whether drafts come from the whole vocabulary.
    """

    rows: int
    length: int
    whole: bool = True

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.rows, max(0, self.length.bit_length() - 10) // 2, int(self.whole))


class CostTable:
    """``RoundCosts`` for batch sizes and lengths of the text, as they are met.

    Attention reads the whole text, so costs follow its length; lengths within a factor
    of 4 share what is learned.

    Args:
        max_drafts: largest K.
    """

    def __init__(self, max_drafts: int):
        self.max_drafts = max_drafts
        self.by_place: dict[tuple[int, int, int], RoundCosts] = {}

    def at(self, place: Place) -> RoundCosts:
        key = place.key
        if key not in self.by_place:
            known = sorted(self.by_place, key=lambda other: _distance(other, key))
            new = RoundCosts(self.max_drafts)
            self.by_place[key] = self.by_place[known[0]].carried() if known else new
        return self.by_place[key]

    @classmethod
    def assumed(cls, max_drafts: int) -> "CostTable":
        """Costs as they may be anywhere: each draft adds the same share."""
        costs, new = RoundCosts(max_drafts), cls(max_drafts)
        logs = [math.log(costs.ratio(k)) for k in range(max_drafts + 1)]
        costs.samples = [[]] + [[value] for value in logs[1:]]
        new.by_place[Place(1, 0).key] = costs.carried()
        return new

    def as_dict(self) -> dict:
        places = self.by_place.items()
        return {" ".join(map(str, key)): costs.as_dict() for key, costs in places}

    @classmethod
    def from_dict(cls, saved: dict, max_drafts: int) -> "CostTable":
        """Raises ValueError, KeyError, TypeError or AttributeError as RoundCosts."""
        new = cls(max_drafts)
        for place, costs in saved.items():
            rows, length, whole = map(int, place.split())
            costs = RoundCosts.from_dict(costs)
            if costs.max_drafts != max_drafts or rows < 1:
                raise ValueError("not a cost table")
            new.by_place[rows, length, whole] = costs
        return new


def _distance(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    return abs(math.log2(a[0] / b[0])) + abs(a[1] - b[1]) + abs(a[2] - b[2])
