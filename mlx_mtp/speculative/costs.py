"""What a round costs by its number of drafts, learned from rounds as they are timed.

It knows no clock and no file: the loop times rounds, and whoever loads a model keeps
the table from one program to the next.
"""

import math

# Cost of a round, all of it in logarithms: noise of one timing, drift per round of the
# machine's speed and of the ratio of two K, what is thought of an unknown ratio.
NOISE = 0.1
FIRST_NOISE = 0.5  # the first round of a K may compile kernels
SPEED_DRIFT = 0.02
RATIO_DRIFT = 0.002
UNKNOWN_RATIO = 0.4
OUTLIER = 3.0  # standard deviations at which a timing is cut
PRIOR_SLOPE = 0.2  # of the cost ratio per draft, before anything was measured
REACH = 2  # drafts by which K may pass the largest K measured


class RoundCosts:
    """What a round costs by K: the machine's speed now, times a ratio for each K.

    The speed drifts (other programs, heat); ratios hardly do. A scalar Kalman filter
    shares what a timing tells between the two.

    Args:
        max_drafts: largest K.
    """

    def __init__(self, max_drafts: int):
        self.level: float | None = None  # logarithm of the seconds at K = 0
        self.level_variance = 0.0
        self.log_ratio = [0.0] * (max_drafts + 1)
        self.variance = [0.0] + [UNKNOWN_RATIO**2] * max_drafts
        self.seen = [0] * (max_drafts + 1)
        self._last, self._jump = -1, 0  # K before, and the sign of a leap in its time

    def add(self, k: int, seconds: float) -> None:
        """Learn from one round with ``k`` drafts."""
        value = math.log(max(seconds, 1e-9))
        noise = (FIRST_NOISE if self.seen[k] == 0 else NOISE) ** 2
        if self.level is None:
            self.level, self.level_variance = value - math.log(self.ratio(k)), noise
            if k == 0:
                self.seen[0] = 1
            return
        if self.seen[k] == 0:
            self.log_ratio[k] = math.log(self.ratio(k))
        self.level_variance += SPEED_DRIFT**2
        for i, seen in enumerate(self.seen[1:], 1):
            if seen:
                self.variance[i] += RATIO_DRIFT**2
        error = value - self.level - self.log_ratio[k]
        total = self.level_variance + self.variance[k] + noise
        bound = OUTLIER * math.sqrt(total)
        jump = (error > bound) - (error < -bound)
        again, self._jump = jump and jump == self._jump, jump
        if again:  # not a single pause: the machine has another speed now
            self.level, self.level_variance = self.level + error, noise
            return
        error = min(max(error, -bound), bound)
        for_ratio, for_level = self.variance[k] / total, self.level_variance / total
        if jump and k == self._last:
            for_ratio = 0.0  # a ratio does not change all at once
        self._last = k
        self.log_ratio[k] += for_ratio * error
        self.variance[k] *= 1 - for_ratio
        self.level += for_level * error
        self.level_variance *= 1 - for_level
        self.seen[k] += 1

    def ratio(self, k: int) -> float:
        """Cost of a round with ``k`` drafts in units of one without."""
        if k == 0 or self.seen[k]:
            return math.exp(self.log_ratio[k])
        known = [i for i, seen in enumerate(self.seen) if seen and i]
        points = [(0, 1.0)] + [(i, math.exp(self.log_ratio[i])) for i in known]
        if len(points) == 1:
            return 1 + PRIOR_SLOPE * k
        above = [p for p in points if p[0] > k]
        first, second = (
            ([p for p in points if p[0] < k][-1], above[0]) if above else points[-2:]
        )
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return first[1] + max(slope, 0) * (k - first[0])

    @property
    def furthest(self) -> int:
        """The largest K worth a thought: ratios far from any timing mean nothing."""
        measured = max((k for k, seen in enumerate(self.seen) if seen), default=0)
        return min(measured + REACH, len(self.seen) - 1)

    @property
    def ready(self) -> bool:
        """Whether the cost of a plain round is known, or all ratios from before."""
        return self.seen[0] > 1 or any(self.seen[1:])

    def carried(self) -> "RoundCosts":
        """For other circumstances (a longer text): ratios as a guess, speed unknown."""
        new = RoundCosts(len(self.seen) - 1)
        new.log_ratio, new.seen = list(self.log_ratio), list(self.seen)
        new.variance = [v + (k > 0) * NOISE**2 for k, v in enumerate(self.variance)]
        return new

    def as_dict(self) -> dict:
        return {
            "seconds": None if self.level is None else math.exp(self.level),
            "ratio": [math.exp(r) for r in self.log_ratio],
            "variance": self.variance,
            "seen": self.seen,
        }

    @classmethod
    def from_dict(cls, saved: dict) -> "RoundCosts":
        """Raises ValueError, KeyError or TypeError for anything but ``as_dict()``'s."""
        ratios = [float(r) for r in saved["ratio"]]
        new = cls(len(ratios) - 1)
        new.log_ratio = [math.log(r) for r in ratios]
        new.variance = [float(v) for v in saved["variance"]]
        new.seen = [int(n) for n in saved["seen"]]
        lengths = {len(ratios), len(new.variance), len(new.seen)}
        finite = all(map(math.isfinite, [*new.log_ratio, *new.variance]))
        if len(lengths) > 1 or not finite or min(*new.variance, *new.seen) < 0:
            raise ValueError("not a cost table")
        return new.carried()


class CostTable:
    """``RoundCosts`` for batch sizes and lengths of the text, as they are met.

    Attention reads the whole text, so costs follow its length; lengths within a factor
    of 4 share what is learned.

    Args:
        max_drafts: largest K.
    """

    def __init__(self, max_drafts: int):
        self.max_drafts = max_drafts
        self.by_place: dict[tuple[int, int], RoundCosts] = {}

    def at(self, rows: int, length: int) -> RoundCosts:
        place = (rows, max(0, length.bit_length() - 10) // 2)
        if place not in self.by_place:
            nearest = min(
                self.by_place, key=lambda p: _distance(p, place), default=None
            )
            self.by_place[place] = (
                RoundCosts(self.max_drafts)
                if nearest is None
                else self.by_place[nearest].carried()
            )
        return self.by_place[place]

    @classmethod
    def assumed(cls, max_drafts: int) -> "CostTable":
        """Costs as they may be anywhere: each draft adds the same share."""
        costs = RoundCosts(max_drafts)
        costs.log_ratio = [math.log(costs.ratio(k)) for k in range(max_drafts + 1)]
        costs.seen = [1] * (max_drafts + 1)
        new = cls(max_drafts)
        new.by_place[1, 0] = costs
        return new

    def as_dict(self) -> dict:
        return {f"{b} {n}": costs.as_dict() for (b, n), costs in self.by_place.items()}

    @classmethod
    def from_dict(cls, saved: dict, max_drafts: int) -> "CostTable":
        """Raises ValueError, KeyError, TypeError or AttributeError as RoundCosts."""
        new = cls(max_drafts)
        for place, costs in saved.items():
            rows, length = map(int, place.split())
            costs = RoundCosts.from_dict(costs)
            if len(costs.seen) != max_drafts + 1:
                raise ValueError("not a cost table")
            new.by_place[rows, length] = costs
        return new


def _distance(a: tuple[int, int], b: tuple[int, int]) -> float:
    return abs(math.log2(a[0] / b[0])) + abs(a[1] - b[1])
