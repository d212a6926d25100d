"""The quantised KV cache alone, against a plain one driven by the same calls."""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlx_mtp.speculative.cache import RewindableKVCache
from mlx_mtp.speculative.quantized_cache import QuantizedRewindableKVCache


def test_rows_and_rewinds():
    """Whatever is done to a plain cache and its quantised twin, they stay twins."""
    rng = np.random.default_rng(0)

    def block(rows, count):
        return mx.array(rng.normal(size=(rows, 2, count, 32)).astype(np.float32))

    def append(rows, count, *caches):
        keys, values = block(rows, count), block(rows, count)
        for cache in caches:
            cache.update_and_fetch(keys, values)

    def both(name, *arguments):
        for cache, args in zip((plain, twin), zip(*arguments)):
            getattr(cache, name)(*args)

    plain = RewindableKVCache(3)
    append(3, 5, plain)
    plain.keep(mx.array([2, 5, 1]))
    twin = plain.to_quantized(32, 4)
    append(3, 4, plain, twin)
    both("keep", [mx.array([1, 4, 2])] * 2)
    both("filter", [mx.array([2, 1])] * 2)
    more = RewindableKVCache(2), QuantizedRewindableKVCache(2, 32, 4)
    both("extend", more)  # rows without a past
    append(4, 300, plain, twin)
    both("keep", [mx.array([1, 200, 3, 300])] * 2)
    solo = [c.extract(c.snapshot(), 1, mx.array([7])) for c in (plain, twin)]
    assert_twins(*solo)
    assert_twins(plain, twin)
    assert twin.nbytes < plain.nbytes / 3
    empty = QuantizedRewindableKVCache(1, 32, 4)
    empty.extend(twin)
    assert empty.offset.tolist() == [0, *plain.offset.tolist()]


def assert_twins(plain, twin):
    assert plain.offset.tolist() == twin.offset.tolist()
    assert plain.block_start.tolist() == twin.block_start.tolist()
    want = plain.to_quantized(32, 4)
    for row, size in enumerate(plain.offset.tolist()):
        cut = [
            tree_map(lambda x: x[row, :, :size], (c.keys, c.values))  # noqa: B023
            for c in (want, twin)
        ]
        for (_, a), (_, b) in zip(*map(tree_flatten, cut)):
            assert mx.array_equal(a, b)
