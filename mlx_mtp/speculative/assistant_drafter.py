"""The drafter for a head that reads the target's caches and has none of its own.

Only the last position that stands matters: its state, the token behind it and what the
target has cached up to it. So nothing is prefilled, kept or rewound.
"""

from typing import Any

import mlx.core as mx

from .accept import pick
from .draft import Drafter, Made, TokenOf


class NoCache:
    """The protocol of ``cache`` with nothing in it."""

    def __init__(self, batch_size: int = 1):
        self.offset = mx.zeros((batch_size,), mx.int32)
        self.limit, self.nbytes = 0, 0
        self.cache: list[mx.array] = []
        self.state: list[mx.array] = []

    def nothing(self, *_: Any) -> None:
        pass

    prepare = finalize = keep = commit = rewind = nothing
    filter = extend = snapshot = restore = nothing

    def extract(self, *_: Any) -> "NoCache":
        return NoCache()


class AssistantDrafter(Drafter):
    """Drafts from ``reads``, the target's caches, which the engine sets."""

    def add(self, next_tokens: mx.array, hidden: mx.array) -> None:
        """There is nothing to add to."""

    def make(
        self,
        next_tokens: mx.array,
        hidden: mx.array,
        kept: mx.array,
        num_draft_tokens: int,
        token_of: TokenOf,
    ) -> list[Made]:
        head, caches = self.head, self.target.shared(self.reads)
        shared = {kind: c.written() for kind, c in caches.items()}
        position = next(iter(caches.values())).offset
        (size,) = {keys.shape[2] for keys, _ in shared.values()}
        masks = head.masks(self.target, position, size)
        hidden, token = pick(hidden, kept - 1), pick(next_tokens, kept - 1)
        made: list[Made] = []
        for step in range(num_draft_tokens):
            state = head(self.embed(token), hidden, shared, masks, position)
            made.append(token_of(head, state, step))
            token, hidden = made[-1][0], head.chain(state)
        return made
