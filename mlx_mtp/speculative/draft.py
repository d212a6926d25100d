"""The drafter: an MTP head, run K times from the target's hidden states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from .accept import pick

# (head logits [B, 1, V], index of the draft) -> token [B, 1], its probabilities or None
Choose = Callable[[mx.array, int], tuple[mx.array, mx.array | None]]


class Drafts(NamedTuple):
    """K drafts per row.

    Shapes:
        tokens: [B, K] int32
        probs: [B, K, V] float32, what they were drawn from; None where no rule needs it
    """

    tokens: mx.array
    probs: mx.array | None = None


def no_drafts(batch_size: int) -> Drafts:
    return Drafts(mx.zeros((batch_size, 0), mx.int32))


class Drafter:
    """Head and head cache.

    The cache holds only rows made from the target's hidden states, one for every
    position the target has kept, except the last block, which the next ``draft`` adds.
    Rows made from the head's own output lie past ``offset`` and are overwritten.
    """

    def __init__(self, head: Any, target: Any, batch_size: int, cache: Any = None):
        self.head, self.target = head, target
        self.cache = head.make_cache(batch_size) if cache is None else cache

    def embed(self, tokens: mx.array) -> mx.array:
        """[B, T] -> [B, T, H], of the head's own embedding if it has one."""
        return self.head.embed(self.target, tokens)

    def prime(
        self, next_tokens: mx.array, hidden: mx.array, lengths: mx.array | None
    ) -> None:
        """Add prompt positions. Costs no output layer.

        Shapes:
            next_tokens: [B, T], the token after each position; hidden: [B, T, H];
            lengths: [B], how many of the T are real; None for all
        """
        if lengths is not None:
            self.cache.prepare(lengths)
        self.head(self.embed(next_tokens), hidden, self.cache)
        if lengths is not None:
            self.cache.finalize()

    def draft(
        self,
        next_tokens: mx.array,
        hidden: mx.array,
        kept: mx.array,
        num_draft_tokens: int,
        choose: Choose,
    ) -> Drafts:
        """Add the last block, then draft behind its last kept position.

        Shapes:
            next_tokens: [B, T]; hidden: [B, T, H]; kept: [B], how many of the T stand
        """
        states = self.head(self.embed(next_tokens), hidden, self.cache)
        self.cache.keep(kept)
        offset, limit = self.cache.offset, self.cache.limit
        state, drafts, probs = pick(states, kept - 1), [], []
        for step in range(num_draft_tokens):
            if step:
                state = self.head(self.embed(drafts[-1]), state, self.cache)
            token, token_probs = choose(self.head.logits(self.target, state), step)
            drafts.append(token)
            probs.append(token_probs)
        self.cache.rewind(offset, limit)
        if not drafts:
            return no_drafts(next_tokens.shape[0])
        return Drafts(
            mx.concatenate(drafts, axis=1),
            None if probs[0] is None else mx.concatenate(probs, axis=1),
        )
