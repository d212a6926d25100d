"""One round as one lazy graph: draft, verify, accept, rollback. It reads nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from .accept import Accepted, greedy, log_probs, pick
from .draft import Drafter

Acceptance = Callable[[mx.array, mx.array], Accepted]


class Block(NamedTuple):
    """A verified block, all of it lazy: what the next round starts from.

    Shapes:
        tokens: [B, T] int32, the token that follows each position
        kept: [B] int32, how many positions stand; ``tokens[b, kept[b] - 1]`` is
            pending: emitted, and not yet in any cache
        logprobs: [B, T, V], the target's, in its dtype
        hidden: [B, T, H], the target's, at the stage the head reads
    """

    tokens: mx.array
    kept: mx.array
    logprobs: mx.array
    hidden: mx.array

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_draft_tokens(self) -> int:
        return self.width - 1


class Engine:
    """A target, a drafter or none, and their caches for B rows.

    Args:
        target: ``embed``, ``hidden``, ``logits``, ``make_cache`` and ``vocab_size``
            (see ``models.qwen3_5.Target``).
        head: an MTP head, or None to decode plainly.
        batch_size: rows.
        accept: the acceptance rule.
    """

    def __init__(
        self,
        target: Any,
        head: Any | None = None,
        batch_size: int = 1,
        accept: Acceptance = greedy,
    ):
        self.target, self.accept = target, accept
        self.batch_size = batch_size
        self.cache = target.make_cache(batch_size)
        self.drafter = None if head is None else Drafter(head, target, batch_size)

    @property
    def caches(self) -> list[Any]:
        """The target's caches, then the head's."""
        return self.cache + ([self.drafter.cache] if self.drafter else [])

    def first(self, tokens: mx.array) -> Block:
        """Run the prompts' last tokens [B, 1]: the block before the first round."""
        hidden = self.target.hidden(tokens, self.cache)
        logprobs = log_probs(self.target.logits(hidden))
        nothing = mx.zeros((tokens.shape[0], 0), mx.int32)
        return Block(*self.accept(nothing, logprobs), logprobs, hidden)

    def round(self, last: Block, num_draft_tokens: int) -> Block:
        """The round behind ``last``: K drafts, one target pass over K + 1 rows."""
        drafts = self.draft(last, num_draft_tokens)
        block = self.verify(pick(last.tokens, last.kept - 1), drafts)
        self.rollback(block)
        return block

    def draft(self, last: Block, num_draft_tokens: int) -> mx.array:
        """[B, K] drafts behind the pending token."""
        if self.drafter is None:
            return mx.zeros((last.tokens.shape[0], 0), mx.int32)
        return self.drafter.draft(last.tokens, last.hidden, last.kept, num_draft_tokens)

    def verify(self, pending: mx.array, drafts: mx.array) -> Block:
        """One pass of the target over pending [B, 1] and drafts [B, K], then accept."""
        tokens = mx.concatenate([pending, drafts], axis=1)
        hidden = self.target.hidden(tokens, self.cache)
        logprobs = log_probs(self.target.logits(hidden))
        return Block(*self.accept(drafts, logprobs), logprobs, hidden)

    def rollback(self, block: Block) -> None:
        """Rewind the target's caches to the kept positions of the block just run."""
        if block.width > 1:  # of a single position nothing can be rejected
            for cache in self.cache:
                cache.keep(block.kept)

    def bound(self, limit: int, last_width: int) -> None:
        """Tell the KV caches the host's upper bound of their positions.

        Args:
            limit: of the target's caches, blocks in flight counted whole.
            last_width: positions of the last block, which the head has yet to see.
        """
        for cache in self.cache:
            if hasattr(cache, "limit"):
                cache.limit = limit
        if self.drafter:
            self.drafter.cache.limit = limit - last_width

    def snapshot(self) -> list[Any]:
        """The state behind the last round, by reference."""
        return [cache.snapshot() for cache in self.caches]

    def restore(self, snapshot: list[Any]) -> None:
        for cache, state in zip(self.caches, snapshot, strict=True):
            cache.restore(state)

    def commit(self) -> None:
        for cache in self.caches:
            cache.commit()

    @property
    def kv_nbytes(self) -> int:
        """Bytes that a round in flight keeps from being written in place."""
        return sum(c.nbytes for c in self.caches if hasattr(c, "limit"))
