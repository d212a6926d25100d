"""Calls of the project's kernels, as ``cases`` has those of others."""

from collections.abc import Callable
from types import ModuleType
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.kernels import (
    gated_delta_prologue,
    gated_delta_verify,
    gated_rms_norm,
    greedy_head,
)

from .delta_reference import Case, normals

# One row keeps some inputs under 8 elements, which MLX puts into constant memory.
SMALL = Case(B=1, T=1, previous_rows=1, Hk=1, Hv=2, Dk=32, Dv=32)
LARGE = Case(B=9, T=3, previous_rows=4, Hk=2, Hv=4, Dk=64, Dv=32)


class Recorded(Exception):
    """Instead of a launch."""


def recorded(module: ModuleType, run: Callable[[], object]) -> dict:
    """The keywords of the launch that ``run`` makes, the kernel included."""
    make, calls = module.kernel, []

    def record(*arguments):
        def launch(**call):
            calls.append({"kernel": make(*arguments), **call})
            raise Recorded

        return launch

    with mock.patch.object(module, "kernel", record):
        try:
            run()
        except Recorded:
            return calls[0]
    raise AssertionError("nothing was launched")


def delta_verify(case: Case = LARGE, dtype: mx.Dtype = mx.float32) -> dict:
    n_prev = mx.arange(case.B) % (case.previous_rows + 1)
    arguments = case.verify(dtype, n_prev)
    return recorded(
        gated_delta_verify, lambda: gated_delta_verify.gated_delta_verify(*arguments)
    )


def delta_prologue(case: Case = LARGE, dtype: mx.Dtype = mx.float32) -> dict:
    n_prev = mx.arange(case.B) % (case.previous_rows + 1)
    arguments = case.prologue(dtype, n_prev)
    return recorded(
        gated_delta_prologue,
        lambda: gated_delta_prologue.gated_delta_prologue(*arguments),
    )


def gated_norm(case: Case = LARGE, dtype: mx.Dtype = mx.float32) -> dict:
    x = normals(0)(case.B, case.T, case.Hv, case.Dv).astype(dtype)
    z, weight = case.columns(dtype, case.T, normals(1))[1], mx.ones(case.Dv, dtype)
    return recorded(
        gated_rms_norm, lambda: gated_rms_norm.gated_rms_norm(x, z, weight, 1e-6)
    )


def greedy(bits: int | None = None) -> dict:
    layer = nn.Linear(64, 96, bias=False)
    layer.weight = normals(2)(96, 64)
    layer = layer.to_quantized(32, bits) if bits else layer
    x = normals(3)(1, 2, 64)
    return recorded(greedy_head, lambda: greedy_head.greedy_head(x, layer))


def greedy_quantized() -> dict:
    return greedy(4)
