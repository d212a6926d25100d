"""The drafter: an MTP head, run K times from the target's hidden states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from ..kernels import dispatch
from ..kernels.greedy_head import greedy_head
from .accept import pick
from .vocabulary import DraftVocabulary

# Positions of plain rounds that may wait for the head, which then sees them together.
MOST_WAITING = 16

# (head logits [B, 1, V], index of the draft) -> token [B, 1], its probabilities or None
Made = tuple[mx.array, mx.array | None]
Choose = Callable[[mx.array, int], Made]
# (module of the head, state [B, 1, H], index of the draft) -> the same
TokenOf = Callable[[Any, mx.array, int], Made]


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


class DrafterSnapshot(NamedTuple):
    cache: Any
    waiting: tuple[tuple[mx.array, mx.array], ...]


class Drafter:
    """Head and head cache.

    The cache holds only rows made from the target's hidden states, one for every
    position the target has kept, except the last block, which the next ``draft`` adds,
    and ``waiting``: positions of plain rounds, (next token [B, 1], hidden [B, 1, H]).
    Rows made from the head's own output lie past ``offset`` and are overwritten.
    """

    def __init__(self, head: Any, target: Any, batch_size: int, cache: Any = None):
        self.head, self.target = head, target
        self.cache = head.make_cache(batch_size) if cache is None else cache
        self.waiting: tuple[tuple[mx.array, mx.array], ...] = ()
        self.reads: list[Any] = []  # the target's caches, for those who read them
        self.due = False  # rows were added that no draft will evaluate
        self.vocabulary: DraftVocabulary | None = None  # None drafts from all of it

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
        self.flush()
        if lengths is not None:
            self.cache.prepare(lengths)
        self.add(next_tokens, hidden)
        if lengths is not None:
            self.cache.finalize()

    def draft(
        self,
        next_tokens: mx.array,
        hidden: mx.array,
        kept: mx.array,
        num_draft_tokens: int,
        choose: Choose,
        *,
        greedy: bool = False,
    ) -> Drafts:
        """Add the last block, then draft behind its last kept position.

        Without drafts, a block of one position may wait. With ``greedy``, ``choose``
        takes the most likely token, which a kernel may find without the logits.

        Shapes:
            next_tokens: [B, T]; hidden: [B, T, H]; kept: [B], how many of the T stand
        """
        if num_draft_tokens == 0:
            self._pass_by(next_tokens, hidden, kept)
            return no_drafts(next_tokens.shape[0])
        next_tokens, hidden = self._with_waiting(next_tokens, hidden)
        kept = kept + len(self.waiting)
        self.waiting = ()

        def token_of(head: Any, state: mx.array, index: int) -> Made:
            part = self._part_for(head)
            if part is not None:
                logits = part.logits(head.normed(self.target, state))
                if greedy:
                    return part.tokens(mx.argmax(logits, axis=-1)), None
                return choose(part.spread(logits), index)
            token = self.best(head, state) if greedy else None
            if token is None:
                return choose(head.logits(self.target, state), index)
            return token, None

        made = self.make(next_tokens, hidden, kept, num_draft_tokens, token_of)
        drafts, probs = zip(*made, strict=True)
        return Drafts(
            mx.concatenate(drafts, axis=1),
            None if probs[0] is None else mx.concatenate(probs, axis=1),
        )

    def add(self, next_tokens: mx.array, hidden: mx.array) -> mx.array:
        """Run the head over positions: [B, T, H], its states."""
        return self.head(self.embed(next_tokens), hidden, self.cache)

    def make(
        self,
        next_tokens: mx.array,
        hidden: mx.array,
        kept: mx.array,
        num_draft_tokens: int,
        token_of: TokenOf,
    ) -> list[Made]:
        """What ``draft`` says, for one draft or more."""
        states = self.add(next_tokens, hidden)
        self.cache.keep(kept)
        offset, limit = self.cache.offset, self.cache.limit
        state, made = pick(states, kept - 1), []
        for step in range(num_draft_tokens):
            if step:
                state = self.head(self.embed(made[-1][0]), state, self.cache)
            made.append(token_of(self.head, state, step))
        self.cache.rewind(offset, limit)
        return made

    def _part_for(self, head: Any) -> DraftVocabulary | None:
        """The part to draft from, if it is one of this module's output layer."""
        part = self.vocabulary
        if part is None or not part.active:
            return None
        return part if head.output_layer(self.target) is part.layer else None

    def best(self, head: Any, state: mx.array) -> mx.array | None:
        """A head's most likely token [B, 1], where a kernel finds it."""
        layer = head.output_layer(self.target)
        if not dispatch.greedy_usable(layer, state.dtype):
            return None
        return greedy_head(head.normed(self.target, state), layer)

    def _pass_by(self, next_tokens: mx.array, hidden: mx.array, kept: mx.array) -> None:
        if next_tokens.shape[1] > 1:
            self.prime(next_tokens, hidden, None)
            self.cache.keep(kept)
            self.due = True
            return
        self.waiting += ((next_tokens, hidden),)
        if len(self.waiting) == MOST_WAITING:
            self.flush()

    def _with_waiting(self, *last: mx.array) -> tuple[mx.array, mx.array]:
        pairs = (*self.waiting, *([last] if last else []))
        next_tokens, hidden = zip(*pairs, strict=True)
        return mx.concatenate(next_tokens, axis=1), mx.concatenate(hidden, axis=1)

    def flush(self) -> None:
        """Show the head what waits."""
        if self.waiting:
            next_tokens, hidden = self._with_waiting()
            self.waiting = ()
            self.add(next_tokens, hidden)
            self.due = True

    def snapshot(self) -> DrafterSnapshot:
        return DrafterSnapshot(self.cache.snapshot(), self.waiting)

    def restore(self, snapshot: DrafterSnapshot) -> None:
        self.cache.restore(snapshot.cache)
        self.waiting = snapshot.waiting

    def filter(self, rows: mx.array) -> None:
        self.cache.filter(rows)
        self.waiting = tuple((t[rows], h[rows]) for t, h in self.waiting)

    def extend(self, other: "Drafter") -> None:
        self.flush()
        other.flush()
        self.cache.extend(other.cache)

    def extract(self, snapshot: DrafterSnapshot, row: int) -> "Drafter":
        """Row ``row`` as ``snapshot`` knew it."""
        cache, one = self.cache.extract(snapshot.cache, row, None), slice(row, row + 1)
        new = type(self)(self.head, self.target, 1, cache)
        new.vocabulary = self.vocabulary
        new.waiting = tuple((t[one], h[one]) for t, h in snapshot.waiting)
        return new

    def commit(self) -> None:
        self.flush()
        self.cache.commit()
