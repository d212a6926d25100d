"""Finds out which rows of which source tensors make up an output tensor.

Stacking experts, splitting fused projections and renaming move whole rows. So the code
that does it (mlx-lm's ``sanitize`` among it) is run once over numbers of rows instead
of weights; the weights can then be read, changed and written a few rows at a time.
Knows no model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np

Weights = dict[str, mx.array]
Transform = Callable[[Weights], Weights]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a source's tensor, over all its axes but the last."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class Traced:
    """An output whose rows are whole rows of the source.

    Args:
        shape: all axes but the last.
        pieces: its rows, in order.
    """

    shape: Shape
    pieces: tuple[Rows, ...]


def trace(
    transform: Transform, shapes: Mapping[str, Shape]
) -> tuple[set[str], dict[str, Traced]]:
    """Run ``transform`` over numbers of rows.

    Args:
        transform: names, stacks and splits tensors. It must not look at the last axis
            of a matrix or at the values of any.
        shapes: the source's tensors.

    Returns:
        The names of all outputs, and those of which every row is one of the source's.
    """
    numbers, starts, keys = {}, [], []
    total = 0
    for key, shape in shapes.items():
        if len(shape) < 2:
            numbers[key] = mx.zeros(shape)
            continue
        count = int(np.prod(shape[:-1]))
        rows = mx.arange(total, total + count, dtype=mx.int32)
        numbers[key] = rows.reshape(*shape[:-1], 1)
        keys.append(key)
        starts.append(total)
        total += count
    outputs = transform(numbers)
    found = {}
    for name, value in outputs.items():
        if value.dtype == mx.int32 and value.ndim > 1 and value.shape[-1] == 1:
            flat = np.array(value).reshape(-1)
            pieces = tuple(_pieces(flat, np.array(starts), keys))
            found[name] = Traced(value.shape[:-1], pieces)
    return set(outputs), found


def _pieces(flat: np.ndarray, starts: np.ndarray, keys: list[str]) -> Iterator[Rows]:
    owner = np.searchsorted(starts, flat, side="right") - 1
    breaks = (np.diff(flat) != 1) | (np.diff(owner) != 0)
    edges = [0, *(np.flatnonzero(breaks) + 1), len(flat)]
    for first, last in pairwise(edges):
        if first == last:
            continue
        start = int(flat[first] - starts[owner[first]])
        yield Rows(keys[owner[first]], start, start + int(last - first))
