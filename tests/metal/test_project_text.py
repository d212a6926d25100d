"""The text of the project's kernels before a clang with address spaces, and as CUDA."""

import mlx.core as mx
import pytest

from . import NO_CLANG, clang, generated_source, lint
from .cuda import NO_NVCC, compile_cuda, nvcc
from .project_cases import (
    LARGE,
    SMALL,
    delta_prologue,
    delta_verify,
    gated_norm,
    greedy,
    greedy_quantized,
)

DELTA = (delta_verify, delta_prologue, gated_norm)


def source_of(call):
    return generated_source(call.pop("kernel"), **call)


@pytest.mark.skipif(not clang(), reason=NO_CLANG)
@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", DELTA)
def test_lint(kernel, dtype, case):
    lint(source_of(kernel(case, dtype)))


@pytest.mark.skipif(not clang(), reason=NO_CLANG)
@pytest.mark.parametrize("bits", [None, 4])
def test_lint_greedy(bits):
    lint(source_of(greedy(bits)))


@pytest.mark.skipif(not nvcc(), reason=NO_NVCC)
@pytest.mark.parametrize("kernel", [*DELTA, greedy, greedy_quantized])
def test_compiles_as_cuda(kernel):
    compile_cuda(source_of(kernel()), host=False)
