"""Caches that can be rewound to an accept count which no one has read on the host.

Protocol of every cache here, rows being the sequences of a batch:

* a forward appends one *block* of T tokens per row;
* between ``prepare(lengths)`` and ``finalize()`` only the first ``lengths[b]`` tokens
  of the block are real (prompts of different lengths);
* ``keep(n)``, ``n`` an int32 array [B], rewinds to the first ``n[b]`` tokens of the
  last block. It reads nothing and may stay pending until the next forward;
* ``commit()`` carries out a pending rewind. Whoever lets the arrays out of the engine
  calls it first: a stop, a copy, saving, a change of rows;
* ``filter(rows)`` and ``extend(other)`` remove and append rows;
* ``snapshot()`` and ``restore(s)`` keep and put back a state by reference.

``limit`` of a KV cache is the host's upper bound of its positions; the engine lowers it
to the exact value whenever it has read a round.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map, tree_reduce
from mlx_lm.models.cache import ArraysCache, _BaseCache

from .ranges import arange, repeated

MAX_BLOCK = 9  # rows of a verify block: the pending token and at most 8 drafts


class KVSnapshot(NamedTuple):
    offset: mx.array
    block_start: mx.array
    limit: int
    exact: bool


class RewindableKVCache(_BaseCache):
    """KV cache with a position per row. ``offset`` is an int32 array [B].

    Entries at or past ``offset`` are left over, masked, and overwritten later, so a
    rewind only moves ``offset``. The buffers have no second owner between two forwards:
    a reference to one would make the next write copy all of it.

    Shapes:
        keys, values: [B, heads, capacity, head_dim], or a tuple of such arrays
    """

    step = 256  # tokens by which the buffers grow

    def __init__(self, batch_size: int = 1):
        self.keys: Any = None
        self.values: Any = None
        self.offset = mx.zeros((batch_size,), mx.int32)
        mx.eval(self.offset)  # so that another thread can use the cache
        self.block_start = self.offset
        self.limit = 0
        self.exact = True  # every row stands at ``limit``
        self._lengths: mx.array | None = None

    def make_mask(
        self,
        num_new: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Boolean [B, 1, T, limit + T]: a row sees its own past and itself.

        Of a layer with a window, the newest ``window_size`` positions of it. Where all
        rows stand at ``limit`` and nothing leaves the window, what mlx-lm's own caches
        return.
        """
        end = self.limit + num_new
        slides = window_size is not None and end > window_size
        if self.exact and not return_array and not slides:
            return None if num_new == 1 else "causal"
        last = (self.offset[:, None] + arange(num_new))[..., None]  # [B, T, 1]
        positions = mx.arange(end)
        visible = positions <= last
        if slides:
            visible &= positions > last - window_size
        return visible[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write a block behind ``offset``; return what the mask covers."""
        num_new = keys.shape[2]
        end = self.limit + num_new
        at = (self.offset[:, None] + arange(num_new))[:, None, :, None]
        self.keys = self._written(self.keys, self.stored(keys), at, end)
        self.values = self._written(self.values, self.stored(values), at, end)
        self.block_start = self.offset
        self.offset = self.offset + num_new
        self.limit = end
        return self.written()

    def written(self) -> tuple[Any, Any]:
        """Keys and values up to ``limit``, some of them left over."""
        return tree_map(lambda x: x[..., : self.limit, :], (self.keys, self.values))

    def stored(self, x: mx.array) -> Any:
        """Keys or values in the form in which they are kept."""
        return x

    def _written(self, buffer: Any, new: Any, at: mx.array, end: int) -> Any:
        def write(x: mx.array, y: mx.array | None = None) -> mx.array:
            y = self._with_capacity(y, x, end)
            assert y.shape[2] >= end  # a write past it would corrupt memory silently
            return mx.put_along_axis(y, at, x, axis=2)

        return tree_map(write, new, *([] if buffer is None else [buffer]))

    def _with_capacity(
        self, buffer: mx.array | None, like: mx.array, size: int
    ) -> mx.array:
        have = 0 if buffer is None else buffer.shape[2]
        if have >= size:
            return buffer
        more = -(-size // self.step) * self.step - have
        room = mx.zeros((*like.shape[:2], more, like.shape[3]), like.dtype)
        return room if buffer is None else mx.concatenate([buffer, room], axis=2)

    def prepare(self, lengths: mx.array) -> None:
        self._lengths = lengths

    def finalize(self) -> None:
        self.keep(self._lengths)
        self._lengths = None

    def keep(self, n: mx.array) -> None:
        self.offset = self.block_start + n
        self.exact = False

    def commit(self) -> None:
        """Nothing is ever pending: ``keep`` has moved ``offset``."""

    def rewind(self, offset: mx.array, limit: int) -> None:
        """Go back to an earlier position."""
        self.offset, self.limit, self.exact = offset, limit, False

    def filter(self, rows: mx.array) -> None:
        self.offset, self.block_start = self.offset[rows], self.block_start[rows]
        if self.keys is not None:
            both = (self.keys, self.values)
            self.keys, self.values = tree_map(lambda x: x[rows], both)

    def extend(self, other: "RewindableKVCache") -> None:
        rows, more = self.offset.shape[0], other.offset.shape[0]
        self.limit, self.exact = max(self.limit, other.limit), False
        for name in ("keys", "values"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours is None and theirs is None:
                continue
            ours = no_tokens(theirs, rows) if ours is None else ours
            theirs = no_tokens(ours, more) if theirs is None else theirs
            setattr(self, name, tree_map(join_rows, ours, theirs))
        self.offset = mx.concatenate([self.offset, other.offset])
        self.block_start = mx.concatenate([self.block_start, other.block_start])

    def extract(
        self, snapshot: KVSnapshot, row: int, n: mx.array | None
    ) -> "RewindableKVCache":
        """Row ``row`` as ``snapshot`` knew it, cut to ``n`` [1] of its last block.

        With ``n`` None it is not cut.
        """
        one, new = slice(row, row + 1), copy.copy(self)
        new.keys, new.values = tree_map(lambda x: x[one], (self.keys, self.values))
        new.block_start = snapshot.block_start[one]
        new.offset = snapshot.offset[one] if n is None else new.block_start + n
        new.limit, new.exact = snapshot.limit, False
        return new

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> "RewindableKVCache":
        """The same positions quantised; mlx-lm's functions call it as well."""
        from .quantized_cache import quantized

        return quantized(self, group_size, bits)

    def snapshot(self) -> KVSnapshot:
        """Positions only: what lies below them is never overwritten."""
        return KVSnapshot(self.offset, self.block_start, self.limit, self.exact)

    def restore(self, snapshot: KVSnapshot) -> None:
        self.offset, self.block_start, self.limit, self.exact = snapshot

    @property
    def state(self) -> list[Any]:
        """The arrays to evaluate."""
        return [x for x in (self.keys, self.values, self.offset) if x is not None]

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return tree_reduce(lambda a, x: a + x.nbytes, self.state[:-1], 0)


def no_tokens(of: Any, rows: int) -> Any:
    """Buffers of the same kind for ``rows`` rows, without room for a token."""
    return tree_map(lambda x: mx.zeros((rows, x.shape[1], 0, x.shape[3]), x.dtype), of)


def join_rows(a: mx.array, b: mx.array) -> mx.array:
    """Rows of two buffers as one that holds the longer."""
    size = max(a.shape[2], b.shape[2])
    pad = [[(0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)] for x in (a, b)]
    return mx.concatenate([mx.pad(a, pad[0]), mx.pad(b.astype(a.dtype), pad[1])])


# (block, n) -> the layer's arrays after the first n[b] tokens of the block.
Replay = Callable[[Any, mx.array], tuple[mx.array, ...]]


class RecurrentSnapshot(NamedTuple):
    arrays: tuple[mx.array | None, ...]
    block: Any
    replay: Replay | None
    pending: mx.array | int | None
    recorded: int


class RecurrentCache(ArraysCache):
    """Fixed-size states of a recurrent layer, such as conv window and recurrent state.

    Arrays are values, so keeping the state before a block costs a reference. A layer
    that has run a short block records it: ``replay(block, n)`` must return the states
    after the block's first ``n`` tokens. Long blocks (prefill) are not recorded and
    cannot be rewound; ragged ones are cut with ``lengths`` instead.

    A layer may leave the states as they were before the block and call ``keep_all``:
    the whole block is then pending, and the layer's next block takes it up
    (``deferred``) in place of ``commit``.
    """

    def __init__(self, size: int = 2):
        super().__init__(size)
        self._forget()

    def _forget(self) -> None:
        self.block = self.replay = self.pending = None
        self._recorded = 0  # rows that the record holds, the first ones

    def record(self, block: Any, replay: Replay) -> None:
        """Called by the layer after a block of at most ``MAX_BLOCK`` tokens."""
        assert self.pending is None
        self.block, self.replay, self._recorded = block, replay, self.batch_size

    def keep_all(self, count: int) -> None:
        """All ``count`` tokens of the block are pending, unless ``keep`` says fewer."""
        self.pending = count

    def deferred(self, kind: type, batch_size: int) -> tuple[Any, mx.array]:
        """The pending block and the tokens [B] of it that stand, to be taken up.

        Where none of that kind is pending, (None, zeros): the states are current.
        """
        if self.pending is not None and isinstance(self.block, kind):
            block, n = self.block, self._counts(self.pending)
            self._forget()
            return block, n
        self.commit()
        return None, repeated(0, batch_size)

    def _counts(self, pending: mx.array | int) -> mx.array:
        if isinstance(pending, int):
            return repeated(pending, self._recorded)
        return pending

    def keep(self, n: mx.array) -> None:
        if self.block is None:
            raise ValueError(
                f"the last block cannot be rewound: it had more than {MAX_BLOCK} tokens"
            )
        self.pending = n

    def commit(self) -> None:
        if self.pending is not None:
            n = self._counts(self.pending)
            self.cache = list(self.replay(self.block, n))
        self._forget()

    def filter(self, rows: mx.array) -> None:
        """The last block stays on record, so that a row can still be cut inside it."""
        record = self._carry_out()
        super().filter(rows)
        if record is not None:
            kept = [None if x is None else x[rows] for x in record[0]]
            make = getattr(record[0], "_make", tuple)
            self.block, self.replay, self._recorded = make(kept), record[1], len(rows)

    def extend(self, other: "RecurrentCache") -> None:
        """The last block of the rows that were here before stays on record."""
        rows, record = self.batch_size, self._carry_out()
        other.commit()
        super().extend(other)
        if record is not None:
            self.block, self.replay, self._recorded = *record, rows

    def _carry_out(self) -> tuple[Any, Replay] | None:
        """Commit; return the record that this has made unnecessary for all rows."""
        record = None if self.block is None else (self.block, self.replay)
        self.commit()
        return record

    def __copy__(self) -> "RecurrentCache":
        """A cache of its own: arrays are values, so sharing them is a full copy."""
        self.commit()
        new = type(self)(len(self.cache))
        new.cache = list(self.cache)
        return new

    def __deepcopy__(self, memo: dict) -> "RecurrentCache":
        return self.__copy__()

    def extract(
        self, snapshot: RecurrentSnapshot, row: int, n: mx.array | None
    ) -> "RecurrentCache":
        """Row ``row`` as ``snapshot`` knew it, cut to ``n`` [1] of its last block.

        With ``n`` None it is not cut.
        """
        arrays, block, replay, pending, recorded = snapshot
        if row < recorded and n is not None:
            pending = mx.broadcast_to(n, (recorded,))
        if isinstance(pending, int):
            pending = repeated(pending, recorded)
        if pending is not None:
            arrays = replay(block, pending)
        new = type(self)(len(arrays))
        new.cache = [array[row : row + 1] for array in arrays]
        return new

    def snapshot(self) -> RecurrentSnapshot:
        return RecurrentSnapshot(
            tuple(self.cache), self.block, self.replay, self.pending, self._recorded
        )

    def restore(self, snapshot: RecurrentSnapshot) -> None:
        arrays, self.block, self.replay, self.pending, self._recorded = snapshot
        self.cache = list(arrays)
        self.lengths = None
