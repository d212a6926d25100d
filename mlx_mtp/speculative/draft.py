"""The drafter: an MTP head, run K times from the target's hidden states."""

from typing import Any

import mlx.core as mx

from .accept import greedy_tokens, log_probs, pick


class Drafter:
    """Head and head cache.

    The cache holds only rows made from the target's hidden states, one for every
    position the target has kept, except the last block, which the next ``draft`` adds.
    Rows made from the head's own output lie past ``offset`` and are overwritten.
    """

    def __init__(self, head: Any, target: Any, batch_size: int):
        self.head, self.target = head, target
        self.cache = head.make_cache(batch_size)

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
        self.head(self.target.embed(next_tokens), hidden, self.cache)
        if lengths is not None:
            self.cache.finalize()

    def draft(
        self,
        next_tokens: mx.array,
        hidden: mx.array,
        kept: mx.array,
        num_draft_tokens: int,
    ) -> mx.array:
        """Add the last block, then draft greedily behind its last kept position.

        Shapes:
            next_tokens: [B, T]; hidden: [B, T, H]; kept: [B], how many of the T stand;
            result: [B, K] int32
        """
        states = self.head(self.target.embed(next_tokens), hidden, self.cache)
        self.cache.keep(kept)
        offset, limit = self.cache.offset, self.cache.limit
        state, drafts = pick(states, kept - 1), []
        for step in range(num_draft_tokens):
            if step:
                state = self.head(self.target.embed(drafts[-1]), state, self.cache)
            drafts.append(greedy_tokens(log_probs(self.target.logits(state))))
        self.cache.rewind(offset, limit)
        if not drafts:
            return mx.zeros((next_tokens.shape[0], 0), mx.int32)
        return mx.concatenate(drafts, axis=1)
