"""What layers with a recurrent state share that can be rewound inside a short block."""

import mlx.core as mx
import mlx.nn as nn

from ..speculative.cache import RecurrentCache


class Recorded(nn.Module):
    """Put before mlx-lm's layer: shares its weights, records short blocks."""

    @classmethod
    def from_base(cls, layer: nn.Module) -> "Recorded":
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.__dict__.update(layer.__dict__)
        dict.update(new, layer)
        return new


def ends_of(cache: RecurrentCache, width: int) -> int | mx.array:
    """Tokens of a block of ``width`` that are real: of all rows, or per row [B]."""
    lengths = cache.lengths
    return width if lengths is None else mx.clip(lengths, 0, width)


def conv_input(x: mx.array, window: mx.array | None, width: int) -> mx.array:
    """The inputs [B, T, C] behind the ``width`` before them, or behind zeros."""
    if window is None:
        window = mx.zeros((x.shape[0], width, x.shape[2]), x.dtype)
    return mx.concatenate([window, x], axis=1)


def conv_window(x: mx.array, ends: int | mx.array, width: int) -> mx.array:
    """Of such inputs, what the convolution needs after ``ends`` tokens of the block."""
    if isinstance(ends, int):
        return mx.contiguous(x[:, ends : ends + width])
    at = (ends[:, None] + mx.arange(width))[..., None]
    return mx.take_along_axis(x, at, axis=1)
