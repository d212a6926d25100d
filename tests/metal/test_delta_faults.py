"""Faults planted in the text of the DeltaNet kernels: each must be noticed."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels import gated_delta_prologue as prologue
from mlx_mtp.kernels import gated_delta_verify as verify
from mlx_mtp.kernels import gated_rms_norm as norm
from mlx_mtp.kernels.gated_delta_prologue import Columns

from . import BuildError, KernelFault, unwritten
from .delta_reference import Case, f64, normals, numpy_prologue, numpy_verify

CASE = Case(B=2, T=3, previous_rows=4, Hk=1, Hv=2, Dk=64, Dv=32)

VERIFY = {
    "replay one row too few": ("t < replayed", "t < replayed - 1"),
    "replay one row too many": ("t < replayed", "t <= replayed"),
    "wrong lane": ("lane % 8 * 4", "lane % 8 * 2"),
    "a row's sum over half its lanes": ("x += simd_shuffle_xor(x, 4);", ""),
    "unwritten tail": ("state_out[state_at + c * 32 + j]", "state_out[state_at + j]"),
    "unwritten rows": ("t < T;", "t < T - 1;"),
    "key head of another group": ("hv / (Hv / Hk)", "hv % Hk + (Hk - 1)"),
    "the state after the block": ("int replayed =", "T; int replayed = 1 +"),
    "stride of another block": ("(b * ROWS * Hk + hk)", "(b * T * Hk + hk)"),
    "write into an input": ("state_out[state_at", "state_in[state_at"),
}
PROLOGUE = {
    "window one row off": ("int s = n + t - ROWS;", "int s = n + t - ROWS + 1;"),
    "window of all rows": ("int s = n + r;", "int s = static_cast<int>(T_prev) + r;"),
    "norm over one lane": ("simd_sum(squares)", "squares"),
    "divergent sum": (
        "simd_sum(squares)",
        "(lane < 16 ? simd_sum(squares) : squares)",
    ),
    "unpadded record": ("if (t < ROWS) {", "if (t < T) {"),
    "no read-out scale": ("is_q ? scales[0]", "is_q ? scales[1]"),
    "past the projection": ("+ QKV_AT;", "+ QKV_AT + QKV_STRIDE;"),
}
NORM = {
    "gate of another head": ("h * Dv + d", "d"),
    "mean over the wrong size": ("/ Dv + eps", "/ 32 + eps"),
    "norm without a sum": ("simd_sum(squares)", "squares"),
}


def differs(ours, expected, tolerance=1e-4):
    return any(
        unwritten(x) or not np.allclose(f64(x), y, atol=tolerance, rtol=tolerance)
        for x, y in zip(ours, expected)
    )


def noticed(run):
    """Whether a run fails the checks that the kernel tests make."""
    try:
        return run()
    except (BuildError, KernelFault):
        return True


def run_verify():
    case = Case(B=2, T=3, previous_rows=4, Hk=2, Hv=4, Dk=64, Dv=32)
    arguments = case.verify(mx.float32, mx.array([2, 4], mx.int32))
    return differs(verify.gated_delta_verify(*arguments), numpy_verify(*arguments))


def run_prologue():
    arguments = CASE.prologue(mx.float32, mx.array([2, 0], mx.int32))
    window, q, rows = prologue.gated_delta_prologue(*arguments)
    expected_window, expected_q, expected = numpy_prologue(*arguments)
    parts = [x[:, : CASE.T] for x in rows]
    tails = [(x[:, CASE.T :], 0) for x in rows]
    return differs(
        [window, q, *parts, *(x for x, _ in tails)],
        [expected_window, expected_q, *expected, *(y for _, y in tails)],
    )


def run_norm():
    normal = normals(0)
    x, z, weight = normal(1, 2, 3, 64), normal(1, 2, 3 * 64), normal(64)
    columns = Columns(z, 0, 3 * 64)
    out = norm.gated_rms_norm(x, columns, weight, 1e-6)
    return differs([out], [f64(norm.gated_rms_norm_ops(x, columns, weight, 1e-6))])


RUNS = [(verify, run_verify), (prologue, run_prologue), (norm, run_norm)]
FAULTS = [
    pytest.param(module, run, text, id=f"{run.__name__}: {name}")
    for (module, run), faults in zip(RUNS, (VERIFY, PROLOGUE, NORM))
    for name, text in faults.items()
]


@pytest.mark.parametrize(("module", "run"), RUNS, ids=["verify", "prologue", "norm"])
def test_the_right_text_passes(on_harness, module, run):
    on_harness(module)
    assert not run()


@pytest.mark.parametrize(("module", "run", "text"), FAULTS)
def test_fault_is_noticed(on_harness, module, run, text):
    on_harness(module, text)
    assert noticed(run)
