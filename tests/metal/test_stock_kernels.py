"""mlx-lm's own kernels under the harness, against its ops reference."""

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta

from . import ORDERS, run_kernel, unwritten
from .cases import gated_delta_call, random_inputs, stock

TOLERANCE = {mx.float32: 1e-6, mx.bfloat16: 1e-2, mx.float16: 1e-3}


def call(*args, **kwargs):
    return run_kernel(**gated_delta_call(*args), **kwargs)


def close(a, b, tolerance):
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return mx.abs(a - b).max().item() <= tolerance * max(1, mx.abs(b).max().item())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_gated_delta_step(dtype, order):
    shape = B, _T, _Hk, Hv, _Dk, Dv = (
        2,
        5,
        2,
        4,
        64,
        33,
    )  # rows that fill no threadgroup
    inputs = random_inputs(shape, dtype)
    kernel = stock(gated_delta._make_gated_delta_kernel)
    y, state = call(kernel, inputs, shape, (32, Dv, B * Hv), (32, 4, 1), order=order)
    expected_y, expected_state = gated_delta.gated_delta_ops(*inputs)
    assert unwritten(y) == unwritten(state) == 0
    assert close(y, expected_y, TOLERANCE[dtype])
    assert close(state, expected_state, 1e-6)


def test_masked():
    shape = B, _T, _Hk, Hv, _Dk, Dv = 2, 3, 1, 3, 32, 8
    inputs = random_inputs(shape, mx.float32)
    mask = mx.array([[True, True, False], [False, True, True]])
    kernel = stock(gated_delta._make_gated_delta_kernel, has_mask=True)
    y, state = call(kernel, [*inputs, mask], shape, (32, Dv, B * Hv), (32, 4, 1))
    expected_y, expected_state = gated_delta.gated_delta_ops(*inputs, mask)
    shown = mask[..., None, None]
    assert close(mx.where(shown, y, 0), mx.where(shown, expected_y, 0), 1e-6)
    assert close(state, expected_state, 1e-6)


def test_packed_equals_explicit_tree():
    """Bit for bit, as mlx-lm promises of the two."""
    shape = B, _T, _Hk, Hv, _Dk, Dv = 1, 4, 2, 2, 128, 16
    inputs = random_inputs(shape, mx.bfloat16)
    packed = call(
        stock(gated_delta._make_gated_delta_packed_kernel),
        inputs, shape, (32, Dv // 8, B * Hv), (32, 2, 1), order="shuffled",
    )  # fmt: skip
    tree = call(
        stock(gated_delta._make_gated_delta_kernel_xtree),
        inputs, shape, (32, Dv, B * Hv), (32, 4, 1), order="descending",
    )  # fmt: skip
    assert all(mx.array_equal(a, b).item() for a, b in zip(packed, tree))
    assert close(tree[1], gated_delta.gated_delta_ops(*inputs)[1], 1e-6)


def test_counts_state_traffic():
    shape = B, T, _Hk, Hv, _Dk, Dv = 1, 3, 1, 2, 32, 8
    inputs = random_inputs(shape, mx.float32)
    traffic = {}
    kernel = stock(gated_delta._make_gated_delta_kernel)
    call(kernel, inputs, shape, (32, Dv, B * Hv), (32, 4, 1), counters=traffic)
    size = inputs[5].nbytes
    read, written = traffic["state_in"], traffic["state_out"]
    assert (read.read, read.read_once, read.written) == (size, size, 0)
    assert (written.written, written.written_once, written.read) == (size, size, 0)
    assert read.written_once == written.read_once == 0
    assert (
        traffic["v"].read == 32 * traffic["v"].size
    )  # every lane reads its row's value
    assert traffic["y"].written == B * T * Hv * Dv * 4
