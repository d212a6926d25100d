"""The text of the project's kernels before a clang with address spaces, and as CUDA."""

from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.kernels import (
    gated_delta_prologue,
    gated_delta_verify,
    gated_rms_norm,
    greedy_head,
)

from . import NO_CLANG, clang, generated_source, lint
from .cuda import NO_NVCC, compile_cuda, nvcc
from .delta_reference import Case, normals


class Recorded(Exception):
    """Instead of a launch."""


def text_of(module, run):
    """MLX's text for the launch that a call makes."""
    make = module.kernel
    calls = []

    def record(*arguments):
        def launch(**call):
            calls.append(generated_source(make(*arguments), **call))
            raise Recorded

        return launch

    with mock.patch.object(module, "kernel", record), pytest.raises(Recorded):
        run()
    return calls[0]


# One row keeps some inputs under 8 elements, which MLX puts into constant memory.
SMALL = Case(B=1, T=1, previous_rows=1, Hk=1, Hv=2, Dk=32, Dv=32)
LARGE = Case(B=9, T=3, previous_rows=4, Hk=2, Hv=4, Dk=64, Dv=32)


def sources():
    for case in (SMALL, LARGE):
        for dtype in (mx.float32, mx.bfloat16):
            n = mx.zeros(case.B, mx.int32)
            arguments = case.verify(dtype, n)
            yield text_of(
                gated_delta_verify,
                lambda a=arguments: gated_delta_verify.gated_delta_verify(*a),
            )
            arguments = case.prologue(dtype, n)
            yield text_of(
                gated_delta_prologue,
                lambda a=arguments: gated_delta_prologue.gated_delta_prologue(*a),
            )
            x = normals(0)(case.B, case.T, case.Hv, case.Dv).astype(dtype)
            z = case.columns(dtype, case.T, normals(1))[1]
            weight = mx.ones(case.Dv, dtype)
            yield text_of(
                gated_rms_norm,
                lambda x=x, z=z, w=weight: gated_rms_norm.gated_rms_norm(x, z, w, 1e-6),
            )
    for layer in (nn.Linear(64, 96, bias=False), nn.QuantizedLinear(64, 96, False)):
        x = mx.zeros((1, 1, 64))
        yield text_of(
            greedy_head,
            lambda layer=layer, x=x: greedy_head.greedy_head(x, layer),
        )


@pytest.mark.skipif(not clang(), reason=NO_CLANG)
def test_lint():
    texts = list(sources())
    assert len(texts) == 14
    for text in texts:
        lint(text)


@pytest.mark.skipif(not nvcc(), reason=NO_NVCC)
@pytest.mark.parametrize("index", [0, 1, 2, 12, 13])
def test_compiles_as_cuda(index):
    compile_cuda(list(sources())[index], host=False)
