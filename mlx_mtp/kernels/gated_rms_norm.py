"""RMSNorm of the recurrence's output, gated with SiLU of z, in one launch."""

from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import precise_swiglu

from .gated_delta_prologue import Columns

SOURCE = """
    // One SIMD group per (token, head).
    int lane = thread_index_in_simdgroup;
    int row = thread_position_in_grid.y;
    int token = row / Hv;
    int h = row % Hv;
    float values[Dv / 32];
    float squares = 0.0f;
    for (int i = 0; i < Dv / 32; ++i) {
        values[i] = static_cast<float>(x[row * Dv + lane + 32 * i]);
        squares += values[i] * values[i];
    }
    float inverse = metal::precise::rsqrt(simd_sum(squares) / Dv + eps);
    for (int i = 0; i < Dv / 32; ++i) {
        int d = lane + 32 * i;
        InT normed = static_cast<InT>(
            values[i] * inverse * static_cast<float>(weight[d]));
        float gate = static_cast<float>(z[token * Z_STRIDE + Z_AT + h * Dv + d]);
        gate = gate / (1.0f + metal::precise::exp(-gate));
        out[row * Dv + d] = static_cast<InT>(gate * static_cast<float>(normed));
    }
"""


@lru_cache
def kernel() -> Any:
    """The kernel object; not made at import, which a CUDA build would refuse."""
    return mx.fast.metal_kernel(
        name="gated_rms_norm",
        input_names=["x", "z", "weight", "eps"],
        output_names=["out"],
        source=SOURCE,
    )


@lru_cache
def scalar(value: float) -> mx.array:
    """A 0-d array, which a kernel gets as a constant."""
    return mx.array(value, mx.float32)


def gated_rms_norm(x: mx.array, z: Columns, weight: mx.array, eps: float) -> mx.array:
    """``rms_norm(x) * silu(z)``.

    Shapes:
        x: [B, T, Hv, Dv]; z: [B, T, Hv Dv]; weight: [Dv]; result: [B, T, Hv Dv]
    """
    B, T, Hv, Dv = x.shape
    (out,) = kernel()(
        inputs=[x, z.array, weight, scalar(eps)],
        template=[
            *(("InT", x.dtype), ("Dv", Dv), ("Hv", Hv)),
            *(("Z_STRIDE", z.array.shape[-1]), ("Z_AT", z.start)),
        ],
        grid=(32, B * T * Hv, 1),
        threadgroup=(32, 4, 1),
        output_shapes=[(B, T, Hv * Dv)],
        output_dtypes=[x.dtype],
    )
    return out


def gated_rms_norm_ops(
    x: mx.array, z: Columns, weight: mx.array, eps: float
) -> mx.array:
    """The same in MLX operations, as :func:`gated_rms_norm`."""
    normed = mx.fast.rms_norm(x, weight, eps)
    out = precise_swiglu(x, z.sliced().reshape(x.shape), normed)
    return out.reshape(*x.shape[:2], -1)
