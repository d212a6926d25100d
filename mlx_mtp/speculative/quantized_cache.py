"""KV caches kept in few bits, and the position from which on they are, as in mlx-lm.

mlx-lm quantises the caches behind the first forward that has left ``start`` positions
or more in them. A round writes several positions at once, so rounds that end before
``start`` or begin there give the same states, and no round may cross it.
"""

import numbers
import sys
from typing import Any, NamedTuple

import mlx.core as mx

from .cache import RewindableKVCache

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)  # those that mlx has


class KVQuantization(NamedTuple):
    """When and how the target's KV caches are quantised.

    Args:
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: values that share a scale: 32, 64 or 128.
        start: positions in the caches from which on they are quantised.
    """

    bits: int
    group_size: int
    start: int

    def apply(self, caches: list[Any], size: int) -> list[Any]:
        """The caches behind a forward that has left ``size`` positions in them."""
        if size < self.start:
            return caches
        return [
            cache.to_quantized(self.group_size, self.bits) if is_plain(cache) else cache
            for cache in caches
        ]

    def drafts_within(
        self, caches: list[Any], limit: int, num_draft_tokens: int
    ) -> int:
        """Drafts of the next round such that the switch falls between two rounds.

        Args:
            limit: upper bound of the positions in the caches, exact if the last block
                was one of a single position.

        A round with drafts ends before ``start`` whatever is accepted. So whoever comes
        to ``start`` comes there with single positions, which need not be read.
        """
        if not any(map(is_plain, caches)):
            return num_draft_tokens
        return max(0, min(num_draft_tokens, self.start - 2 - limit))


NEVER = KVQuantization(8, 64, sys.maxsize)


def kv_quantization(
    bits: int | None, group_size: int, start: int, head_dim: int | None
) -> KVQuantization:
    """The arguments checked; ``bits`` None for no quantisation.

    Args:
        head_dim: width of what is cached; None for a cache without a quantised form.

    Raises:
        ValueError: for a value out of range.
    """
    if bits is None:
        return NEVER
    for name, value in (
        ("kv_bits", bits),
        ("kv_group_size", group_size),
        ("quantized_kv_start", start),
    ):
        if not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} must be a whole number, not {value!r}")
    if bits not in BITS:
        raise ValueError(f"kv_bits must be 2, 3, 4, 5, 6 or 8, not {bits}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"kv_group_size must be 32, 64 or 128, not {group_size}")
    if head_dim is None:
        raise ValueError(
            f"kv_bits {bits} is not possible for this model, whose attention reads a "
            "latent cache (MLA), or keys that layers share; leave it out"
        )
    if head_dim % group_size:
        raise ValueError(
            f"kv_group_size {group_size} does not divide the model's head size of "
            f"{head_dim}"
        )
    if start < 0:
        raise ValueError(f"quantized_kv_start must be 0 or more, not {start}")
    return KVQuantization(bits, group_size, start)


def is_plain(cache: Any) -> bool:
    """Whether it is a KV cache that is not quantised."""
    return type(cache) is RewindableKVCache


class QuantizedRewindableKVCache(RewindableKVCache):
    """The same with triples (packed, scales, biases) as keys and values.

    ``bits`` makes mlx-lm's attention take its path for quantised caches; the masks of
    plain caches are right for it.
    """

    def __init__(self, batch_size: int = 1, group_size: int = 64, bits: int = 8):
        super().__init__(batch_size)
        self.group_size, self.bits = group_size, bits

    def stored(self, x: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> RewindableKVCache:
        """Itself: what has been quantised stays as it is, as in mlx-lm."""
        return self


def quantized(
    cache: RewindableKVCache, group_size: int, bits: int
) -> QuantizedRewindableKVCache:
    """A cache with the same positions; the old one keeps what it had."""
    new = QuantizedRewindableKVCache(cache.offset.shape[0], group_size, bits)
    if cache.keys is not None:
        new.keys, new.values = new.stored(cache.keys), new.stored(cache.values)
    new.restore(cache.snapshot())
    return new
