"""Small constant arrays, made once: as part of a graph each would be a launch."""

from functools import lru_cache

import mlx.core as mx


@lru_cache
def arange(count: int) -> mx.array:
    """``mx.arange(count)``, evaluated, so that any thread can use it."""
    numbers = mx.arange(count)
    mx.eval(numbers)
    return numbers


@lru_cache
def repeated(value: int, count: int) -> mx.array:
    """``count`` times the same number, int32, evaluated."""
    numbers = mx.array([value] * count, mx.int32)
    mx.eval(numbers)
    return numbers
