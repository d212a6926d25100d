"""The kernels of a Gated DeltaNet layer against float64 and MLX's operations."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels import gated_delta_prologue as prologue
from mlx_mtp.kernels import gated_delta_verify as verify
from mlx_mtp.kernels import gated_rms_norm as norm
from mlx_mtp.kernels.gated_delta_prologue import Columns
from mlx_mtp.kernels.gated_delta_verify import MAX_ROWS

from . import ORDERS, unwritten
from .delta_reference import Case, f64, normals, numpy_prologue, numpy_verify

CASES = [
    Case(B=3, T=3, previous_rows=5, Hk=2, Hv=4, Dk=64, Dv=32),
    Case(B=2, T=9, previous_rows=1, Hk=1, Hv=3, Dk=32, Dv=96, W=3),
    Case(B=1, T=1, previous_rows=9, Hk=2, Hv=2, Dk=256, Dv=64),
    Case(B=1, T=2, previous_rows=2, Hk=1, Hv=1, Dk=128, Dv=256),
]
PAIRS = [(case, mx.float32) for case in CASES] + [
    (case, dtype) for case in CASES[:1] for dtype in (mx.bfloat16, mx.float16)
]
# Of the largest value; what is left of a sum in float32, or one rounding to the dtype.
TOLERANCE = {mx.float32: 2e-6, mx.bfloat16: 2**-7, mx.float16: 2**-10}


def close(ours, expected, tolerance):
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape
    scale = max(1.0, np.abs(expected).max())
    assert np.abs(ours - expected).max() <= tolerance * scale


def kept(case):
    """Every accept count, rows of a batch differing."""
    counts = [case.previous_rows, 0, case.previous_rows // 2]
    return mx.array(counts[: case.B], mx.int32)


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_verify(on_harness, case, dtype, order):
    on_harness(verify, order=order)
    arguments = case.verify(dtype, kept(case))
    y, state = verify.gated_delta_verify(*arguments)
    assert unwritten(y) == unwritten(state) == 0
    expected_y, expected_state = numpy_verify(*arguments)
    close(f64(state), expected_state, 2e-6)
    close(f64(y), expected_y, TOLERANCE[dtype])
    ops_y, ops_state = verify.gated_delta_verify_ops(*arguments)
    close(f64(state), f64(ops_state), 2e-6)
    close(f64(y), f64(ops_y), TOLERANCE[dtype])


def test_every_accept_count(on_harness):
    """All of 0..9 at once, each in a row of its own."""
    case = Case(B=10, T=2, previous_rows=9, Hk=1, Hv=2, Dk=32, Dv=32)
    on_harness(verify)
    arguments = case.verify(mx.float32, mx.arange(10))
    y, state = verify.gated_delta_verify(*arguments)
    expected_y, expected_state = numpy_verify(*arguments)
    close(f64(y), expected_y, 2e-6)
    close(f64(state), expected_state, 2e-6)


def test_a_row_does_not_depend_on_how_many_follow(on_harness):
    case = Case(B=2, T=9, previous_rows=9, Hk=2, Hv=4, Dk=64, Dv=32)
    on_harness(verify)
    state, previous, n, q, rows = case.verify(mx.bfloat16, mx.array([4, 9]))
    whole, before = verify.gated_delta_verify(state, previous, n, q, rows)
    for T in (1, 2, 5):
        part, same = verify.gated_delta_verify(state, previous, n, q[:, :T], rows)
        assert mx.array_equal(part, whole[:, :T])
        assert mx.array_equal(same, before)


@pytest.mark.parametrize("num_rows", [1, 2, 9])
@pytest.mark.parametrize("n", [0, 1, 9])
def test_the_state_is_read_once_and_written_once(on_harness, num_rows, n):
    case = Case(B=1, T=num_rows, previous_rows=9, Hk=1, Hv=2, Dk=64, Dv=32)
    traffic = {}
    on_harness(verify, counters=traffic)
    arguments = case.verify(mx.float32, mx.array([n], mx.int32))
    verify.gated_delta_verify(*arguments)
    size = arguments[0].nbytes
    read, written = traffic["state_in"], traffic["state_out"]
    assert (read.read, read.written) == (size, 0)
    assert (written.written, written.read) == (size, 0)


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_prologue(on_harness, case, dtype, order):
    on_harness(prologue, order=order)
    arguments = case.prologue(dtype, kept(case))
    window, q, rows = prologue.gated_delta_prologue(*arguments)
    assert not any(unwritten(x) for x in (window, q, *rows))
    ops_window, ops_q, ops_rows = prologue.gated_delta_prologue_ops(*arguments)
    assert mx.array_equal(window, ops_window)
    T = case.T
    assert not any(x[:, T:].any() for x in rows)  # the record is padded with zeros
    expected_window, expected_q, expected_rows = numpy_prologue(*arguments)
    close(f64(window), expected_window, 0)
    # Between input and result lie up to four roundings to the dtype.
    tolerance = 4 * TOLERANCE[dtype]
    close(f64(q), expected_q, tolerance)
    close(f64(q), f64(ops_q), tolerance)
    for ours, ops, expected in zip(rows, ops_rows, expected_rows):
        close(f64(ours[:, :T]), expected, tolerance)
        close(f64(ours), f64(ops), tolerance)


def test_gates_are_rounded_where_mlx_lm_rounds(on_harness):
    """Decay stays float32 behind a sum and a softplus in the inputs' dtype."""
    case = Case(B=4, T=9, previous_rows=1, Hk=1, Hv=33, Dk=32, Dv=32)
    on_harness(prologue)
    arguments = case.prologue(mx.bfloat16, mx.zeros(4, mx.int32))
    _, _, rows = prologue.gated_delta_prologue(*arguments)
    *_, a, _, weights, _ = arguments
    assert rows.g.dtype == mx.float32

    def rounded(x):
        return f64(mx.array(x.astype(np.float32)).astype(mx.bfloat16))

    step = rounded(np.logaddexp(rounded(f64(a.sliced()) + f64(weights.dt_bias)), 0))
    expected = np.exp(-np.exp(f64(weights.A_log)) * step)
    assert np.mean(np.isclose(f64(rows.g), expected, rtol=1e-5, atol=1e-7)) > 0.99


def test_gates_with_a_float32_bias(on_harness):
    case = Case(B=1, T=2, previous_rows=1, Hk=1, Hv=2, Dk=32, Dv=32)
    on_harness(prologue)
    *rest, weights, sizes = case.prologue(mx.bfloat16, mx.zeros(1, mx.int32))
    weights = weights._replace(dt_bias=weights.dt_bias.astype(mx.float32))
    _, _, rows = prologue.gated_delta_prologue(*rest, weights, sizes)
    _, _, (_, _, g, _) = numpy_prologue(*rest, weights, sizes)
    close(f64(rows.g[:, :2]), g, 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_gated_norm(on_harness, dtype, order):
    on_harness(norm, order=order)
    normal, (B, T, Hv, Dv) = normals(3), (2, 3, 3, 96)
    x, weight = normal(B, T, Hv, Dv).astype(dtype), normal(Dv).astype(dtype)
    z = Columns(normal(B, T, Hv * Dv + 7).astype(dtype), 5, Hv * Dv)
    out = norm.gated_rms_norm(x, z, weight, 1e-6)
    assert unwritten(out) == 0
    y, gate = f64(x), f64(z.sliced()).reshape(x.shape)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * f64(weight)
    y = y * gate / (1 + np.exp(-gate))
    close(f64(out), y.reshape(B, T, -1), 2 * TOLERANCE[dtype])
    expected = norm.gated_rms_norm_ops(x, z, weight, 1e-6)
    close(f64(out), f64(expected), 2 * TOLERANCE[dtype])


def test_the_record_is_as_long_as_a_block_may_be():
    from mlx_mtp.speculative.cache import MAX_BLOCK

    assert MAX_ROWS == MAX_BLOCK
