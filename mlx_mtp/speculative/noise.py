"""Random numbers as functions of (seed, place), so that they need no state.

A key is a pair of 32-bit words as ``mx.random`` takes it: which stream, and where in
it. Nothing here touches ``mx.random.state``.
"""

import zlib
from collections.abc import Sequence
from enum import Enum

import mlx.core as mx

WORD = 0xFFFFFFFF
# Places within a round: its drafts and the token behind them.
PLACES_PER_ROUND = 16

Seeds = int | Sequence[int]


class Purpose(Enum):
    """Streams of one seed that must not share numbers."""

    DRAFT = "draft"
    ACCEPT = "accept"
    RECOVER = "recover"
    XTC = "xtc"


def fold(seed: int) -> int:
    """A seed of any size as one word; small seeds stay as they are."""
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, not {seed}")
    word = 0
    while seed:
        word, seed = word ^ (seed & WORD), seed >> 32
    return word


def stream(seed: Seeds, purpose: Purpose | None = None) -> mx.array:
    """First words of the keys, [1] or [B] uint32.

    Args:
        seed: one for all rows or one for each.
        purpose: a stream of its own of each seed; None for the seed itself.
    """
    words = [fold(one) for one in ([seed] if isinstance(seed, int) else seed)]
    if purpose is not None:
        words = [zlib.crc32(f"{word} {purpose.value}".encode()) for word in words]
    return mx.array(words, mx.uint32)


def keys(stream: mx.array, places: mx.array) -> mx.array:
    """Keys [B, ..., 2] for a stream [1] or [B] and places in it [B, ...]."""
    stream = stream.reshape(-1, *[1] * (places.ndim - 1))
    words = (mx.broadcast_to(stream, places.shape), places.astype(mx.uint32))
    return mx.stack(words, axis=-1)


def place_in_round(start: mx.array, index: int | mx.array) -> mx.array:
    """A place that no other round has: rounds start at different positions.

    A position may be drafted in several rounds. Where a rule's outcome depends on later
    drafts, numbers used again would be biased by what they have decided before.
    """
    return start * PLACES_PER_ROUND + index


def gumbel(keys: mx.array, size: int) -> mx.array:
    """Standard Gumbel noise [..., size] float32; each row as ``mx.random`` draws it."""
    flat = keys.reshape(-1, 2)
    rows = mx.vmap(lambda key: mx.random.gumbel(shape=(size,), key=key))(flat)
    return rows.reshape(*keys.shape[:-1], size)


def uniform(keys: mx.array) -> mx.array:
    """Uniform numbers [...] float32 in [0, 1)."""
    if keys.size == 0:  # mlx divides by zero on no keys
        return mx.zeros(keys.shape[:-1])
    flat = keys.reshape(-1, 2)
    rows = mx.vmap(lambda key: mx.random.uniform(key=key))(flat)
    return rows.reshape(keys.shape[:-1])
