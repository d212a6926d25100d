"""Several rewindable caches of one layer as one, such as latents and indexer keys."""

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from .cache import KVSnapshot, RewindableKVCache


class RewindableCacheList(CacheList):
    """KV caches that hold the same positions; every operation goes to all of them.

    ``cache[i]`` is the i-th, as in mlx-lm. The protocol is that of ``cache``.
    """

    def __init__(self, *caches: RewindableKVCache):
        super().__init__(*caches)

    @property
    def offset(self) -> mx.array:
        return self.caches[0].offset

    @property
    def limit(self) -> int:
        return self.caches[0].limit

    @limit.setter
    def limit(self, value: int) -> None:
        for cache in self.caches:
            cache.limit = value

    def make_mask(self, num_new: int, **options: Any) -> mx.array | str | None:
        return self.caches[0].make_mask(num_new, **options)

    def prepare(self, lengths: mx.array) -> None:
        super().prepare(lengths=lengths)

    def keep(self, n: mx.array) -> None:
        for cache in self.caches:
            cache.keep(n)

    def commit(self) -> None:
        for cache in self.caches:
            cache.commit()

    def rewind(self, offset: mx.array, limit: int) -> None:
        for cache in self.caches:
            cache.rewind(offset, limit)

    def extract(
        self, snapshot: list[KVSnapshot], row: int, n: mx.array | None
    ) -> "RewindableCacheList":
        pairs = zip(self.caches, snapshot, strict=True)
        return RewindableCacheList(*(c.extract(s, row, n) for c, s in pairs))

    def snapshot(self) -> list[KVSnapshot]:
        return [cache.snapshot() for cache in self.caches]

    def restore(self, snapshot: list[KVSnapshot]) -> None:
        for cache, state in zip(self.caches, snapshot, strict=True):
            cache.restore(state)

    def __copy__(self) -> "RewindableCacheList":
        return RewindableCacheList(*map(copy.copy, self.caches))

    @property
    def state(self) -> list[Any]:
        """The arrays to evaluate."""
        return [cache.state for cache in self.caches]

    def size(self) -> int:
        return self.limit
