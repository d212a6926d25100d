"""The rewindable caches against plain Python lists."""

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_mtp
from mlx_mtp.speculative.cache import (
    MAX_BLOCK,
    RecurrentCache,
    RewindableKVCache,
)

HEADS, DIM = 2, 4


class SmallStepCache(RewindableKVCache):
    step = 4  # grows often


class ListCache:
    """The same protocol: a list of numbers per row."""

    def __init__(self, rows):
        self.rows = [[] for _ in range(rows)]
        self.start = [0] * rows

    def append(self, block):
        self.start = [len(row) for row in self.rows]
        for row, values in zip(self.rows, block):
            row += values

    def keep(self, n):
        for row, start, count in zip(self.rows, self.start, n):
            del row[start + count :]

    def filter(self, rows):
        self.rows = [list(self.rows[b]) for b in rows]
        self.start = [self.start[b] for b in rows]

    def extend(self, other):
        self.rows += other.rows
        self.start += other.start


def kv(values: np.ndarray) -> mx.array:
    """[B, T] numbers -> [B, heads, T, dim] with the number everywhere."""
    return mx.array(np.tile(values[:, None, :, None], (1, HEADS, 1, DIM)))


class Pair:
    """Both caches, driven by the same calls."""

    def __init__(self, rows):
        self.ours, self.plain, self.next = SmallStepCache(rows), ListCache(rows), 1.0

    @property
    def size(self):
        return len(self.plain.rows)

    def append(self, count):
        block = self.next + np.arange(self.size * count, dtype=np.float32)
        self.next += self.size * count
        block = block.reshape(self.size, count)
        before = [len(row) for row in self.plain.rows]
        mask = self.ours.make_mask(count)
        keys, values = self.ours.update_and_fetch(kv(block), -kv(block))
        self.plain.append(block.tolist())
        self.check_view(mask, keys, values, before)

    def check_view(self, mask, keys, values, before):
        """Every new position sees its own row's past and itself, and nothing else."""
        count = self.ours.offset[0].item() - self.ours.block_start[0].item()
        visible = keys.shape[2]
        if isinstance(mask, mx.array):
            mask = np.broadcast_to(np.array(mask), (self.size, 1, count, visible))
        else:  # the fast paths: all rows end at the last visible position
            mask = np.tril(np.ones((count, visible), bool), visible - count)
            mask = np.broadcast_to(mask, (self.size, 1, count, visible))
        for b, row in enumerate(self.plain.rows):
            for t in range(count):
                seen = mask[b, 0, t]
                want = row[: before[b] + t + 1]
                assert np.array(keys)[b, 1, seen, 2].tolist() == want
                assert (-np.array(values))[b, 0, seen, 1].tolist() == want

    def keep(self, n):
        self.ours.keep(mx.array(n, mx.int32))
        self.plain.keep(n)

    def settle(self):
        """What the loop does when it has read a round."""
        self.ours.limit = max(len(row) for row in self.plain.rows)

    def check(self):
        for b, row in enumerate(self.plain.rows):
            size = self.ours.offset[b].item()
            assert size == len(row) <= self.ours.limit
            if size:
                assert self.ours.keys[b, 0, :size, 0].tolist() == row


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_kv_cache(data):
    pair = Pair(data.draw(st.integers(1, 3), "rows"))
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        count = data.draw(st.integers(1, MAX_BLOCK), "block")
        pair.append(count)
        action = data.draw(st.sampled_from(["none", "keep", "settle", "rows"]))
        if action in ("keep", "settle"):
            kept = st.integers(1, count)
            pair.keep([data.draw(kept, "kept") for _ in range(pair.size)])
        if action == "settle":
            pair.settle()
        if action == "rows":
            rows = st.lists(st.integers(0, pair.size - 1), min_size=1, unique=True)
            rows = data.draw(rows, "filter")
            pair.ours.filter(mx.array(rows))
            pair.plain.filter(rows)
            other = Pair(data.draw(st.integers(1, 2), "new rows"))
            other.next = 1000.0 + pair.next
            if data.draw(st.booleans(), "new rows have a past"):
                other.append(3)
            pair.ours.extend(other.ours)
            pair.plain.extend(other.plain)
        pair.check()


def test_a_write_past_the_end_is_refused():
    """mlx does not check; the cache asserts that its buffers cover the limit."""
    cache = SmallStepCache(1)
    cache.update_and_fetch(kv(np.ones((1, 4), np.float32)), kv(np.ones((1, 4))))
    cache._with_capacity = lambda buffer, like, size: buffer
    with pytest.raises(AssertionError):
        cache.update_and_fetch(kv(np.ones((1, 2), np.float32)), kv(np.ones((1, 2))))


def test_ragged_block():
    cache = SmallStepCache(2)
    block = np.arange(6, dtype=np.float32).reshape(2, 3)
    cache.prepare(mx.array([3, 1]))
    cache.update_and_fetch(kv(block), kv(block))
    cache.finalize()
    assert cache.offset.tolist() == [3, 1]
    assert not cache.exact


def running_sum(block, n):
    """A recurrence that is easy to check: the sum of the first n numbers."""
    start, values = block
    mask = mx.arange(values.shape[1]) < n[:, None]
    return (start + mx.where(mask, values, 0).sum(axis=1, keepdims=True),)


def step(cache: RecurrentCache, values: list[list[float]]) -> None:
    """What a layer does with a block."""
    cache.commit()
    values = mx.array(values)
    start = mx.zeros((values.shape[0], 1)) if cache[0] is None else cache[0]
    cache[0] = start + values.sum(axis=1, keepdims=True)
    cache.record((start, values), running_sum)


def test_recurrent_cache_keeps_a_part_of_the_last_block():
    cache = RecurrentCache(1)
    step(cache, [[1, 2, 4], [8, 16, 32]])
    cache.keep(mx.array([1, 3]))
    step(cache, [[100, 200], [300, 400]])
    cache.keep(mx.array([2, 1]))
    cache.commit()
    assert cache[0].tolist() == [[301], [356]]
    cache.commit()  # idempotent
    assert cache[0].tolist() == [[301], [356]]


def test_recurrent_cache_rows():
    cache, other = RecurrentCache(1), RecurrentCache(1)
    step(cache, [[1, 2], [3, 4], [5, 6]])
    cache.keep(mx.array([1, 2, 1]))
    step(other, [[10, 20]])
    other.keep(mx.array([1]))
    cache.filter(mx.array([2, 0]))
    assert cache[0].tolist() == [[5], [1]]
    cache.extend(other)
    assert cache[0].tolist() == [[5], [1], [10]]


def test_long_blocks_cannot_be_rewound():
    cache = RecurrentCache(1)
    cache[0] = mx.zeros((1, 1))
    with pytest.raises(ValueError, match="cannot be rewound"):
        cache.keep(mx.array([1]))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_independent(copied):
    cache = RecurrentCache(1)
    step(cache, [[1, 2]])
    cache.keep(mx.array([1]))
    other = copied(cache)
    step(cache, [[100]])
    assert other.pending is None
    assert other[0].tolist() == [[1]]
    kv_cache = SmallStepCache(1)
    kv_cache.update_and_fetch(kv(np.ones((1, 2), np.float32)), kv(np.ones((1, 2))))
    other = copied(kv_cache)
    kv_cache.keep(mx.array([1]))
    kv_cache.update_and_fetch(kv(np.full((1, 2), 9.0, np.float32)), kv(np.ones((1, 2))))
    assert other.offset.tolist() == [2]
    assert other.keys[0, 0, :2, 0].tolist() == [1, 1]


def test_snapshots_are_values(random_dir):
    """A forward after a snapshot changes neither it nor an earlier one."""
    from checks import engine_of, loop_of

    model, _ = mlx_mtp.load(random_dir)
    engine = engine_of(model)
    rounds = iter(loop_of(engine, [[1, 2, 3, 4]], 3, 50))
    next(rounds)
    first = engine.snapshot()
    frozen = [
        [np.array(a) for a in state.arrays if a is not None]
        for state in first
        if hasattr(state, "arrays")
    ]
    for _ in range(3):
        next(rounds)
    second = engine.snapshot()
    assert second[0].arrays[1] is not first[0].arrays[1]
    again = [
        [np.array(a) for a in state.arrays if a is not None]
        for state in first
        if hasattr(state, "arrays")
    ]
    for a, b in zip(frozen, again):
        assert all(np.array_equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("window", [1, 3, 8, 100])
@pytest.mark.parametrize("num_new", [1, 4])
def test_window_of_ragged_rows(window, num_new):
    """A row sees itself and its newest ``window - 1`` positions before."""
    cache = RewindableKVCache(3)
    rows = mx.zeros((3, 1, 6, 2))
    cache.update_and_fetch(rows, rows)
    kept = [2, 6, 5]
    cache.keep(mx.array(kept))
    mask = cache.make_mask(num_new, window_size=window)
    assert mask.shape == (3, 1, num_new, 6 + num_new)
    for b, t in itertools.product(range(3), range(num_new)):
        at = kept[b] + t
        want = [at - window < p <= at for p in range(6 + num_new)]
        assert mask[b, 0, t].tolist() == want


def test_window_that_nothing_has_left():
    cache = RewindableKVCache()
    assert cache.make_mask(1, window_size=4) is None
    assert cache.make_mask(4, window_size=4) == "causal"
    assert cache.make_mask(5, window_size=4).shape == (1, 1, 5, 5)
