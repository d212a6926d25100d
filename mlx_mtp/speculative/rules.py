"""Decoding rules: how a draft is chosen and how the target judges the drafts.

A rule offers ``draft`` and ``accept``. ``start`` [B] is the position of the round's
pending token, so draft j and the token that row j of the target gives both have
position ``start + 1 + j``. Everything is lazy, float32 and batch-first.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from . import accept, noise
from .accept import Accepted
from .noise import Purpose, Seeds
from .ranges import arange

# (log-probabilities [B, T, V], positions [B, T]) -> log-weights [B, T, V] in float32:
# filters and temperature, the same for target and drafter.
Shape = Callable[[mx.array, mx.array], mx.array]


class Rule(Protocol):
    greedy_drafts: bool  # drafts are the head's most likely tokens, with no probs

    def draft(
        self, logits: mx.array, start: mx.array, index: int
    ) -> tuple[mx.array, mx.array | None]:
        """Choose draft ``index`` from the head's logits [B, 1, V].

        Returns:
            tokens [B, 1], and the probabilities [B, 1, V] they were drawn from, for
            rules that judge by them.
        """

    def accept(
        self,
        drafts: mx.array,
        draft_probs: mx.array | None,
        logprobs: mx.array,
        start: mx.array,
        first: int = 0,
    ) -> Accepted:
        """Judge drafts [B, K] by the target's log-probabilities [B, K + 1, V].

        ``first`` is the index of the first of them in the round.
        """

    def one(
        self,
        draft: mx.array,
        draft_probs: mx.array | None,
        logprobs: mx.array,
        start: mx.array,
        index: int,
    ) -> tuple[mx.array, mx.array]:
        """Judge draft ``index`` alone, or give the token there if there is none.

        Shapes:
            draft: [B, 1], or [B, 0] behind the last; logprobs: [B, 1, V];
            result: token [B], whether the draft was accepted [B]
        """


def positions(start: mx.array, first: int, count: int) -> mx.array:
    """[B, count], of the tokens that rows ``first`` and on of a round give."""
    return start[:, None] + 1 + first + arange(count)


class Matching:
    """The rules under which the target's token does not depend on the draft."""

    def one(
        self,
        draft: mx.array,
        draft_probs: None,
        logprobs: mx.array,
        start: mx.array,
        index: int,
    ) -> tuple[mx.array, mx.array]:
        token = self.accept(draft[:, :0], None, logprobs, start, index).tokens[:, 0]
        return token, (draft == token[:, None]).any(axis=1)


class Greedy(Matching):
    """The most likely token."""

    greedy_drafts = True

    def draft(
        self, logits: mx.array, start: mx.array, index: int
    ) -> tuple[mx.array, None]:
        return accept.greedy_tokens(accept.log_probs(logits)), None

    def accept(
        self,
        drafts: mx.array,
        draft_probs: None,
        logprobs: mx.array,
        start: mx.array,
        first: int = 0,
    ) -> Accepted:
        return accept.greedy(drafts, logprobs)


class Called(Greedy):
    """The caller's sampler on the target, greedy drafts.

    With ``Processors`` (empty ones will do) it is called once per token, in order, so
    that one with a state of its own, or ``mx.random``'s, gives what it gives plainly.

    Args:
        sampler: log-probabilities [B, V] -> tokens [B], as mlx-lm's samplers.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array]):
        self.sampler = sampler

    def accept(
        self,
        drafts: mx.array,
        draft_probs: None,
        logprobs: mx.array,
        start: mx.array,
        first: int = 0,
    ) -> Accepted:
        rows = [self.sampler(logprobs[:, i]) for i in range(logprobs.shape[1])]
        tokens = mx.stack([row.reshape(-1) for row in rows], axis=1)
        return accept.match(drafts, tokens.astype(mx.int32))


class Coupled(Matching):
    """Gumbel noise keyed by (seed, position), the same for drafter and target.

    The token at a position is a function of seed and text alone, so the output for a
    seed is the same with and without drafts (Daliri, Musco and Suresh, 2025,
    https://arxiv.org/abs/2408.07978).
    """

    greedy_drafts = False

    def __init__(self, shape: Shape, seed: Seeds):
        self.shape, self.stream = shape, noise.stream(seed)

    def sample(self, logprobs: mx.array, at: mx.array) -> mx.array:
        weights = self.shape(logprobs, at)
        drawn = noise.gumbel(noise.keys(self.stream, at), logprobs.shape[-1])
        return mx.argmax(weights + drawn, axis=-1).astype(mx.int32)

    def draft(
        self, logits: mx.array, start: mx.array, index: int
    ) -> tuple[mx.array, None]:
        at = positions(start, index, 1)
        return self.sample(accept.log_probs(logits), at), None

    def accept(
        self,
        drafts: mx.array,
        draft_probs: None,
        logprobs: mx.array,
        start: mx.array,
        first: int = 0,
    ) -> Accepted:
        at = positions(start, first, logprobs.shape[1])
        return accept.match(drafts, self.sample(logprobs, at))


class Rejection:
    """Draft from the head's distribution, then judge by probability ratios.

    Args:
        shape: filters and temperature.
        seed: of all random numbers; one, or one for each row.
        by_block: judge all drafts together (``accept.block``) instead of one by one.
    """

    greedy_drafts = False

    def __init__(self, shape: Shape, seed: Seeds, *, by_block: bool = False):
        self.shape, self.by_block = shape, by_block
        self.streams = {p: noise.stream(seed, p) for p in Purpose}

    def keys(
        self, purpose: Purpose, start: mx.array, index: int | mx.array
    ) -> mx.array:
        place = noise.place_in_round(start, index)
        return noise.keys(self.streams[purpose], place)

    def draft(
        self, logits: mx.array, start: mx.array, index: int
    ) -> tuple[mx.array, mx.array]:
        weights = self.shape(accept.log_probs(logits), positions(start, index, 1))
        keys = self.keys(Purpose.DRAFT, start, index)
        drawn = weights[:, 0] + noise.gumbel(keys, logits.shape[-1])
        tokens = mx.argmax(drawn, axis=-1, keepdims=True).astype(mx.int32)
        return tokens, mx.softmax(weights, axis=-1)

    def accept(
        self,
        drafts: mx.array,
        draft_probs: mx.array | None,
        logprobs: mx.array,
        start: mx.array,
        first: int = 0,
    ) -> Accepted:
        count = drafts.shape[1]
        at = positions(start, first, count + 1)
        target_probs = mx.softmax(self.shape(logprobs, at), axis=-1)
        if draft_probs is None:  # no drafts
            draft_probs = mx.zeros((*drafts.shape, logprobs.shape[-1]))
        judge = accept.block if self.by_block else accept.rejection
        thresholds, scales = judge(drafts, draft_probs, target_probs)
        index = mx.arange(first, first + count)
        keys = self.keys(Purpose.ACCEPT, start[:, None], index)
        passed = accept.count_last if self.by_block else accept.count_prefix
        accepted = passed(thresholds, noise.uniform(keys))
        weights = accept.recovered_weights(accepted, scales, draft_probs, target_probs)
        keys = self.keys(Purpose.RECOVER, start, first + accepted)
        drawn = mx.log(weights) + noise.gumbel(keys, weights.shape[-1])
        return accept.join(drafts, accepted, mx.argmax(drawn, axis=-1))

    def one(
        self,
        draft: mx.array,
        draft_probs: mx.array | None,
        logprobs: mx.array,
        start: mx.array,
        index: int,
    ) -> tuple[mx.array, mx.array]:
        # A bonus row is asked for and not used: its own round draws it anew.
        rows = mx.repeat(logprobs, draft.shape[1] + 1, axis=1)
        tokens, kept = self.accept(draft, draft_probs, rows, start, index)
        return tokens[:, 0], kept > 1


class PerRow:
    """A rule of its own for every row of a batch."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = list(rules)
        self.greedy_drafts = all(rule.greedy_drafts for rule in self.rules)

    def draft(
        self, logits: mx.array, start: mx.array, index: int
    ) -> tuple[mx.array, mx.array | None]:
        parts = [
            rule.draft(logits[b : b + 1], start[b : b + 1], index)
            for b, rule in enumerate(self.rules)
        ]
        tokens = mx.concatenate([token for token, _ in parts])
        if all(probs is None for _, probs in parts):
            return tokens, None
        # Rows whose rule needs no probabilities get some that are not looked at.
        unused = mx.zeros((1, 1, logits.shape[-1]))
        rows = [unused if probs is None else probs for _, probs in parts]
        return tokens, mx.concatenate(rows)

    def accept(
        self,
        drafts: mx.array,
        draft_probs: mx.array | None,
        logprobs: mx.array,
        start: mx.array,
        first: int = 0,
    ) -> Accepted:
        parts = []
        for b, rule in enumerate(self.rules):
            one = slice(b, b + 1)
            probs = None if draft_probs is None else draft_probs[one]
            parts.append(
                rule.accept(drafts[one], probs, logprobs[one], start[one], first)
            )
        return Accepted(
            *(mx.concatenate(arrays) for arrays in zip(*parts, strict=True))
        )


def rule_of_row(rule: Rule, row: int) -> Rule:
    return rule.rules[row] if isinstance(rule, PerRow) else rule
