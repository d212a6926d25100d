"""Kernel calls that several tests and ``benchmarks/cuda_check.py`` share.

A case is the keywords of ``run_kernel``, the kernel included.
"""

from collections.abc import Callable
from unittest import mock

import mlx.core as mx
from mlx_lm.models import gated_delta

# The sum of each row of 256, by 8 SIMD groups, through threadgroup memory.
ROW_SUM = """
    threadgroup float part[8];
    uint row = threadgroup_position_in_grid.x;
    uint i = thread_index_in_threadgroup;
    const device float* start = a + row * 256;
    float value = start[i];
    float sum = simd_sum(value);
    if (thread_index_in_simdgroup == 0) {
        part[simdgroup_index_in_threadgroup] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 0) {
        float total = 0;
        for (int j = 0; j < 8; ++j) {
            total += part[j] * scale[0];
        }
        o[row] = total;
    }
"""


def stock(factory: Callable, **kwargs) -> Callable:
    """One of mlx-lm's kernels, which it makes only where there is Metal."""
    with mock.patch.object(mx.metal, "is_available", return_value=True):
        return factory(**kwargs)


def random_inputs(shape, dtype, seed=0):
    B, T, Hk, Hv, Dk, Dv = shape
    keys = iter(mx.random.split(mx.random.key(seed), 6))

    def normal(*dims):
        return mx.random.normal(dims, key=next(keys))

    q, k = normal(B, T, Hk, Dk), normal(B, T, Hk, Dk)
    q, k = gated_delta.normalize_qk(q, k, inv_scale=Dk**-0.5, eps=1e-6)
    v = normal(B, T, Hv, Dv)
    g = mx.sigmoid(normal(B, T, Hv) + 2)
    beta = mx.sigmoid(normal(B, T, Hv))
    state = normal(B, Hv, Dv, Dk) * 0.1
    return [
        q.astype(dtype),
        k.astype(dtype),
        v.astype(dtype),
        g,
        beta.astype(dtype),
        state,
    ]


def gated_delta_call(kernel, inputs, shape, grid, threadgroup):
    """The call that mlx-lm makes; a mask may follow the inputs."""
    _, T, Hk, Hv, Dk, Dv = shape
    q, _, v, _, _, state, *mask = inputs
    return {
        "kernel": kernel,
        "inputs": [*inputs[:6], T, *mask],
        "template": [
            ("InT", q.dtype),
            ("StT", state.dtype),
            ("Dk", Dk),
            ("Dv", Dv),
            ("Hk", Hk),
            ("Hv", Hv),
        ],
        "grid": grid,
        "threadgroup": threadgroup,
        "output_shapes": [v.shape, state.shape],
        "output_dtypes": [q.dtype, state.dtype],
    }


def row_sum() -> dict:
    kernel = mx.fast.metal_kernel(
        name="row_sum", input_names=["a", "scale"], output_names=["o"], source=ROW_SUM
    )
    rows = 4
    return {
        "kernel": kernel,
        # scale is so small that MLX makes it `constant`
        "inputs": [mx.random.normal((rows, 256), key=mx.random.key(1)), mx.ones((2,))],
        "grid": (rows * 256, 1, 1),
        "threadgroup": (256, 1, 1),
        "output_shapes": [(rows,)],
        "output_dtypes": [mx.float32],
    }


def gated_delta_step() -> dict:
    shape = B, _T, _Hk, Hv, _Dk, Dv = 2, 5, 2, 4, 64, 32
    inputs = random_inputs(shape, mx.bfloat16)
    kernel = stock(gated_delta._make_gated_delta_kernel)
    return gated_delta_call(kernel, inputs, shape, (32, Dv, B * Hv), (32, 4, 1))
