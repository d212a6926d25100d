"""How many tokens to draft next: the K with the most expected tokens per second.

Two things are estimated from rounds that have been read anyway: how often a draft is
accepted if all before it were (``Acceptance``), and what a round with K drafts costs
(``costs.py``). Expected tokens per second of K are then
``(1 + a1 + a1 a2 + ...) / cost(K)``.

It knows no model, no array and no clock: the loop tells it what happened. A round is
decided on before the round before it has been read, so decisions lag by one round.
"""

import math
from collections.abc import Sequence

from .costs import CostTable, Place, RoundCosts

# Acceptance of a draft position. The evidence is a mean over about MEMORY rounds; a
# shorter one over about 1 / RECENT rounds replaces it where the two differ by more than
# SURPRISE standard deviations, so that a collapse shows at once and chance does not.
PRIOR = 0.7
PRIOR_WEIGHT = 1.0
MEMORY = 48.0
RECENT = 0.2
SURPRISE = 3.0
RESET_WEIGHT = 1.0
FADE = 0.995  # per round, of what is known of positions that are not drafted

# At K = 0 nothing is learned about the drafts. So drafting is tried again after some
# rounds, after twice as many the next time, and so on.
FIRST_PAUSE = 16
LONGEST_PAUSE = 128
DELAY = 3  # rounds after which a round decided on has been read or was discarded
LEAST_GAIN = 1.03  # what is estimated to gain less may well lose
SUCCESS = 8  # rounds of drafting after which the pauses start anew
CARRIED_WEIGHT = 6.0  # of what an earlier text says about a new one
CHECK_EVERY, SURE = 6, 6  # rounds between looks at K = 0, and how many there are
EXPLORE_EVERY = 48  # rounds; then another K, so that its cost stays known


class Acceptance:
    """How often the draft at one position is accepted, given that it was judged."""

    def __init__(self) -> None:
        self.mean = self.recent = PRIOR
        self.weight = 0.0

    def add(self, accepted: int, trials: int) -> None:
        """Count one round's ``trials`` rows of a batch."""
        if trials == 0:
            return
        share = accepted / trials
        if self.weight == 0:
            self.mean = self.recent = share
        self.weight = min(self.weight + trials, MEMORY * trials)
        self.mean += (share - self.mean) * min(trials / self.weight, 1)
        self.recent += (share - self.recent) * RECENT
        spread = self.mean * (1 - self.mean) + 0.02  # 0 and 1 are never certain
        deviation = math.sqrt(spread * RECENT / (2 - RECENT) / trials)
        if abs(self.recent - self.mean) > SURPRISE * deviation:
            self.mean, self.weight = self.recent, RESET_WEIGHT * trials

    def estimate(self, prior: float) -> float:
        known = self.weight + PRIOR_WEIGHT
        return (self.mean * self.weight + prior * PRIOR_WEIGHT) / known

    def fade(self) -> None:
        self.weight *= FADE


class FixedLength:
    """The caller's K, round after round."""

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens

    def choose(self, place: Place, most: int) -> int:
        return self.num_draft_tokens

    def observe(
        self, k: int, accepted: Sequence[int], place: Place, seconds: float | None
    ) -> None:
        """Nothing is learned."""


class Controller:
    """Chooses K round by round. One for a text; costs and acceptance outlive it.

    Args:
        costs: of this model on this machine, updated in place.
        before: the controller of an earlier text, whose acceptance is a first guess.
        timed: learn costs. Without, K is a function of the text alone.
    """

    def __init__(
        self,
        costs: CostTable,
        before: "Controller | None" = None,
        *,
        timed: bool = True,
    ):
        self.costs, self.timed = costs, timed
        self.acceptance = [Acceptance() for _ in range(costs.max_drafts)]
        # Rounds without a draft in a row, rounds to wait for, rounds since drafting was
        # tried again; rounds within which the outcome of a try must come, K meanwhile.
        self._idle, self._pause, self._tried = 0, FIRST_PAUSE, 0
        self._awaited, self._meanwhile = 0, 0
        self._rounds = 0
        if before is not None:
            for new, old in zip(self.acceptance, before.acceptance, strict=True):
                new.mean = new.recent = old.mean
                new.weight = min(old.weight, CARRIED_WEIGHT)
            self._idle = self._pause  # a new text is worth a trial

    def choose(self, place: Place, most: int) -> int:
        """K of the next round.

        Args:
            place: what the costs depend on.
            most: drafts that can still be of use.
        """
        return max(0, min(self._pick(self.costs.at(place)), most))

    def observe(
        self, k: int, accepted: Sequence[int], place: Place, seconds: float | None
    ) -> None:
        """What came of a round.

        Args:
            k: drafts per row.
            accepted: drafts that stood, per row.
            place: what its costs depended on.
            seconds: the round took; None where that is not known.
        """
        if seconds is not None and self.timed:
            self.costs.at(place).add(k, seconds)
        for position, rate in enumerate(self.acceptance):
            if position < k:
                judged = sum(n >= position for n in accepted)
                rate.add(sum(n > position for n in accepted), judged)
            elif k:
                rate.fade()
        self._idle = 0 if k else self._idle + 1
        self._awaited = max(self._awaited - 1, 0)
        if k:
            self._awaited = 0
            self._tried += 1
            if self._tried == SUCCESS:
                self._pause = FIRST_PAUSE

    def expected(self, k: int) -> float:
        """Tokens that a row gets from a round with ``k`` drafts."""
        total = chance = 1.0
        estimate = PRIOR
        for rate in self.acceptance[:k]:
            estimate = rate.estimate(estimate)
            chance *= estimate
            total += chance
        return total

    def _best(self, costs: RoundCosts) -> int:
        gain = [self.expected(k) / costs.ratio(k) for k in range(costs.furthest + 1)]
        best = max(range(len(gain)), key=gain.__getitem__)
        return best if gain[best] > LEAST_GAIN else 0

    def _pick(self, costs: RoundCosts) -> int:
        self._rounds += 1
        if not costs.ready:
            return 0
        if self._awaited:
            return self._meanwhile
        best = self._best(costs)
        if best == 0:
            return self._try_again()
        known = costs.comparisons(best)
        if self.timed and 0 < known < SURE and self._rounds % CHECK_EVERY == 0:
            return 0
        if not known:
            self._awaited, self._meanwhile = DELAY, costs.furthest // 2
            return best
        turn, due = divmod(self._rounds, EXPLORE_EVERY)
        if due == 0 and self.timed:
            others = (0, best + 1, 0, best - 1)
            return min(others[turn % 4], self.costs.max_drafts)
        return best

    def _try_again(self) -> int:
        """One draft now and then where none pays, with a new mind about the first."""
        if self._idle < self._pause:
            return 0
        self._awaited, self._meanwhile = DELAY, 0
        self._idle, self._tried = 0, 0
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.acceptance = [Acceptance() for _ in self.acceptance]
        return 1
