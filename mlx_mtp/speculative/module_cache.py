"""The caches of a head of several modules, all of the same length.

Module m pairs the state of position p with a token m further on than module 0 does, so
what it can know for good ends m positions earlier. Its cache begins m positions earlier
instead: entry s belongs to position s - m, the first m entries to none, and no row sees
them. Thus one ``offset`` holds for all, and a rewind is one for all.

Each block needs one state from before it, per module but the first: ``tails``.
"""

import copy
from typing import Any, NamedTuple

import mlx.core as mx

from .accept import pick
from .cache import KVSnapshot, RewindableKVCache
from .cache_list import RewindableCacheList
from .ranges import arange


class LateKVCache(RewindableKVCache):
    """A cache whose first ``late`` entries are seen by themselves only."""

    def __init__(self, batch_size: int = 1, late: int = 0):
        super().__init__(batch_size)
        self.late = late

    def make_mask(
        self,
        num_new: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        if not self.late:
            return super().make_mask(num_new, return_array, window_size)
        mask = super().make_mask(num_new, True, window_size)
        positions = mx.arange(self.limit + num_new)
        rows = (self.offset[:, None] + arange(num_new))[..., None]
        # A row that saw nothing at all would not be a number.
        return mask & ((positions >= self.late) | (positions == rows))[:, None]


class ModuleSnapshot(NamedTuple):
    caches: list[KVSnapshot]
    tails: tuple[mx.array, ...] | None
    inputs: tuple[mx.array, ...] | None


class ModuleCaches(RewindableCacheList):
    """``caches[m]`` is module m's; the protocol is that of ``cache``.

    Attributes:
        tails: of every module but the first, the state [B, 1, H] that its next block
            begins with; None before the first block.
        inputs: of the same modules, what their last block read, [B, 1 + T, H]. Rewound
            to n tokens of it, the next block begins with entry n.
    """

    def __init__(self, *caches: RewindableKVCache):
        super().__init__(*caches)
        self.tails: tuple[mx.array, ...] | None = None
        self.inputs: tuple[mx.array, ...] | None = None

    @classmethod
    def empty_of(cls, count: int, batch_size: int = 1) -> "ModuleCaches":
        return cls(*(LateKVCache(batch_size, late=m) for m in range(count)))

    def late(self, module: int, states: mx.array) -> mx.array:
        """States [B, T, H] for module m >= 1, the tail before them: [B, 1 + T, H]."""
        if self.tails is None:
            tail = mx.zeros_like(states[:, :1])
        else:
            tail = self.tails[module - 1]
        return mx.concatenate([tail, states], axis=1)

    def begin_with(self, inputs: list[mx.array], n: mx.array | int) -> None:
        """Behind a block: what modules 1 and up read; ``n`` tokens [B] of it stand."""
        self.inputs = tuple(inputs)
        self._cut(n)

    def _cut(self, n: mx.array | int) -> None:
        if self.inputs is not None:
            whole = isinstance(n, int)
            self.tails = tuple(
                x[:, n : n + 1] if whole else pick(x, n) for x in self.inputs
            )

    def keep(self, n: mx.array) -> None:
        super().keep(n)
        self._cut(n)

    def rewind(self, offset: mx.array, limit: int) -> None:
        """Only within the last block."""
        n = offset - self.caches[0].block_start
        super().rewind(offset, limit)
        self._cut(n)

    def filter(self, rows: mx.array) -> None:
        super().filter(rows)
        self.tails, self.inputs = (
            None if xs is None else tuple(x[rows] for x in xs)
            for xs in (self.tails, self.inputs)
        )

    def extend(self, other: "ModuleCaches") -> None:
        """The last block can no longer be cut."""
        rows, more = self.offset.shape[0], other.offset.shape[0]
        super().extend(other)
        self.inputs = None
        if self.tails is None and other.tails is None:
            return
        ours, theirs = self.tails, other.tails
        ours = ours or [mx.zeros((rows, *x.shape[1:]), x.dtype) for x in theirs]
        theirs = theirs or [mx.zeros((more, *x.shape[1:]), x.dtype) for x in ours]
        self.tails = tuple(
            mx.concatenate(pair) for pair in zip(ours, theirs, strict=True)
        )

    def extract(
        self, snapshot: ModuleSnapshot, row: int, n: mx.array | None
    ) -> "ModuleCaches":
        one = slice(row, row + 1)
        pairs = zip(self.caches, snapshot.caches, strict=True)
        new = ModuleCaches(*(c.extract(s, row, n) for c, s in pairs))
        new.tails, new.inputs = (
            None if xs is None else tuple(x[one] for x in xs)
            for xs in (snapshot.tails, snapshot.inputs)
        )
        if n is not None:
            new._cut(n)
        return new

    def snapshot(self) -> ModuleSnapshot:
        return ModuleSnapshot(super().snapshot(), self.tails, self.inputs)

    def restore(self, snapshot: ModuleSnapshot) -> None:
        super().restore(snapshot.caches)
        self.tails, self.inputs = snapshot.tails, snapshot.inputs

    def __copy__(self) -> "ModuleCaches":
        new = ModuleCaches(*map(copy.copy, self.caches))
        new.tails, new.inputs = self.tails, self.inputs
        return new

    @property
    def state(self) -> list[Any]:
        """The arrays to evaluate."""
        return [*super().state, *(self.tails or ())]
