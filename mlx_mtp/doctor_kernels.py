"""Each kernel against its operations on random inputs, for ``doctor``.

On a machine without Metal the kernels are not used, and there is nothing to compare.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .kernels.dispatch import on_metal
from .kernels.gated_delta_prologue import (
    Columns,
    Sizes,
    Weights,
    gated_delta_prologue,
    gated_delta_prologue_ops,
)
from .kernels.gated_delta_verify import (
    MAX_ROWS,
    Rows,
    gated_delta_verify,
    gated_delta_verify_ops,
)
from .kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_ops
from .kernels.greedy_head import CHUNK, greedy_head, greedy_head_ops

SIZES = Sizes(Hk=4, Hv=8, Dk=128, Dv=128, W=4, dtype=mx.float32)
BLOCK = 4  # rows of the block
# Relative to the largest value; float32 sums in another order.
TOLERANCE = 1e-4


class Case(NamedTuple):
    """A kernel, what it must equal, and their common arguments."""

    name: str
    kernel: Callable[..., Any]
    operations: Callable[..., Any]
    arguments: tuple[Any, ...]


def cases() -> Iterator[Case]:
    mx.random.seed(0)
    Hk, Hv, Dk, Dv, W, dtype = SIZES
    channels = 2 * Hk * Dk + Hv * Dv

    def random(*shape: int) -> mx.array:
        return mx.random.normal(shape, dtype)

    def columns(size: int) -> Columns:
        return Columns(random(1, BLOCK, size), 0, size)

    def rows() -> Rows:
        return Rows(
            random(1, MAX_ROWS, Hk, Dk) * Dk**-0.5,
            random(1, MAX_ROWS, Hv, Dv),
            mx.random.uniform(0.5, 1.0, (1, MAX_ROWS, Hv)),
            mx.random.uniform(0.0, 1.0, (1, MAX_ROWS, Hv)),
        )

    kept = mx.array([2], mx.int32)
    weights = Weights(random(channels, W, 1), random(Hv), random(Hv))
    yield Case(
        "gated_delta_prologue",
        gated_delta_prologue,
        gated_delta_prologue_ops,
        (
            *(random(1, W - 1, channels), columns(channels), kept),
            *(columns(channels), columns(Hv), columns(Hv), weights, SIZES),
        ),
    )
    yield Case(
        "gated_delta_verify",
        gated_delta_verify,
        gated_delta_verify_ops,
        (
            *(mx.random.normal((1, Hv, Dv, Dk)), rows(), kept),
            *(random(1, BLOCK, Hk, Dk) * Dk**-0.5, rows()),
        ),
    )
    yield Case(
        "gated_rms_norm",
        gated_rms_norm,
        gated_rms_norm_ops,
        (random(1, BLOCK, Hv, Dv), columns(Hv * Dv), random(Dv), 1e-6),
    )
    layer = nn.Linear(256, 8 * CHUNK, bias=False)
    for name, one in (
        ("greedy_head", layer),
        ("greedy_head, 4 bits", layer.to_quantized(64, 4)),
    ):
        yield Case(name, greedy_head, greedy_head_ops, (random(1, 1, 256), one))


def check(case: Case) -> dict[str, Any]:
    """The largest relative error of a kernel's results."""
    entry: dict[str, Any] = {"kernel": case.name}
    try:
        got = _arrays(case.kernel(*case.arguments))
        mx.eval(got)
    except Exception as error:  # MLX raises what the Metal compiler says
        return entry | {"ok": False, "error": " ".join(str(error).split())[:300]}
    want = _arrays(case.operations(*case.arguments))
    errors = [_error(a, b) for a, b in zip(got, want, strict=True)]
    return entry | {"ok": max(errors) <= TOLERANCE, "relative_error": max(errors)}


def check_kernels() -> list[dict[str, Any]]:
    """An entry per kernel; none where kernels are not used."""
    return [check(case) for case in cases()] if on_metal() else []


def _arrays(result: Any) -> list[mx.array]:
    if isinstance(result, mx.array):
        return [result]
    return [array for part in result for array in _arrays(part)]


def _error(got: mx.array, want: mx.array) -> float:
    if got.shape != want.shape:
        return float("inf")
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    error = mx.abs(got - want).max() / mx.maximum(mx.abs(want).max(), 1e-12)
    value = error.item()
    return value if value == value else float("inf")  # not a number is no agreement
