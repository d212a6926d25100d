"""From the raw projections of a block to what the gated delta rule reads.

One launch selects the convolution's window behind the accepted rows of the previous
block, runs the causal depthwise convolution with SiLU, normalises q and k as mlx-lm's
``normalize_qk`` does, and computes decay and beta. Results are rounded where mlx-lm's
separate operations round.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from .gated_delta_verify import MAX_ROWS, Rows

NORM_EPS = 1e-6  # added to the sum of squares of a q or k head

HEADER = """
METAL_FUNC float sigmoid_of(float x) {
    return 1.0f / (1.0f + metal::precise::exp(-x));
}

// log(1 + exp(x)), accurate for very negative x too.
METAL_FUNC float softplus_of(float x) {
    float e = metal::precise::exp(-metal::abs(x));
    float u = 1.0f + e;
    float log1p = u == 1.0f ? e : metal::precise::log(u) * (e / (u - 1.0f));
    return metal::max(x, 0.0f) + log1p;
}
"""

SOURCE = """
    constexpr int KEEP = W - 1;
    constexpr int C = 2 * Hk * Dk + Hv * Dv;  // channels of the convolution
    int lane = thread_index_in_simdgroup;
    int unit = thread_position_in_grid.y;  // a head of q, k or v, or the gates
    int b = thread_position_in_grid.z / (ROWS + KEEP);
    int t = thread_position_in_grid.z % (ROWS + KEEP);
    int n = metal::clamp(static_cast<int>(n_prev[b]), 0, static_cast<int>(T_prev));

    if (unit == 2 * Hk + Hv) {
        if (t < ROWS) {
            for (int h = lane; h < Hv; h += 32) {
                float decay = 0.0f;
                float rate = 0.0f;
                if (t < T) {
                    int row = b * T + t;
                    GateT x = static_cast<GateT>(
                        static_cast<float>(a[row * A_STRIDE + A_AT + h]) +
                        static_cast<float>(dt_bias[h]));
                    GateT step = static_cast<GateT>(softplus_of(x));
                    decay = metal::precise::exp(
                        -metal::precise::exp(static_cast<float>(A_log[h])) *
                        static_cast<float>(step));
                    rate = sigmoid_of(
                        static_cast<float>(b_in[row * B_STRIDE + B_AT + h]));
                }
                g[(b * ROWS + t) * Hv + h] = decay;
                beta[(b * ROWS + t) * Hv + h] = static_cast<InT>(rate);
            }
        }
        return;
    }

    bool is_v = unit >= 2 * Hk;
    int size = is_v ? Dv : Dk;
    int channel = is_v ? 2 * Hk * Dk + (unit - 2 * Hk) * Dv : unit * Dk;

    // Row s of the previous block's window and inputs, the window's KEEP rows first.
    auto old_window = window_in + b * KEEP * C;
    auto old_rows = qkv_prev + b * T_prev * QKV_STRIDE + QKV_AT;
    auto rows = qkv + b * T * QKV_STRIDE + QKV_AT;

    if (t >= ROWS) {
        int s = n + t - ROWS;
        for (int i = lane; i < size; i += 32) {
            int c = channel + i;
            window_out[(b * KEEP + t - ROWS) * C + c] =
                s < KEEP ? old_window[s * C + c]
                         : old_rows[(s - KEEP) * QKV_STRIDE + c];
        }
        return;
    }

    constexpr int PER_LANE = (Dk > Dv ? Dk : Dv) / 32;
    float values[PER_LANE];
    float squares = 0.0f;
    for (int i = 0; i < size / 32; ++i) {
        values[i] = 0.0f;
        if (t < T) {
            int c = channel + lane + 32 * i;
            float sum = 0.0f;
            for (int tap = 0; tap < W; ++tap) {
                int r = t + tap;  // row of the window and the block
                int s = n + r;
                InT x = r >= KEEP  ? rows[(r - KEEP) * QKV_STRIDE + c]
                        : s < KEEP ? old_window[s * C + c]
                                   : old_rows[(s - KEEP) * QKV_STRIDE + c];
                sum += static_cast<float>(x) * static_cast<float>(conv[c * W + tap]);
            }
            InT u = static_cast<InT>(sum);
            InT gate = static_cast<InT>(sigmoid_of(u));
            values[i] = static_cast<float>(
                static_cast<InT>(static_cast<float>(u) * static_cast<float>(gate)));
            squares += values[i] * values[i];
        }
    }
    if (is_v) {
        int hv = unit - 2 * Hk;
        for (int i = 0; i < Dv / 32; ++i) {
            v[((b * ROWS + t) * Hv + hv) * Dv + lane + 32 * i] =
                static_cast<InT>(values[i]);
        }
        return;
    }

    // scales: of q, of k, and the epsilon for a mean of squares
    float inverse =
        metal::precise::rsqrt(simd_sum(squares) / Dk + static_cast<float>(scales[2]));
    bool is_q = unit < Hk;
    float scale = static_cast<InT>(is_q ? scales[0] : scales[1]);
    for (int i = 0; i < Dk / 32; ++i) {
        InT unit_norm = static_cast<InT>(values[i] * inverse);
        InT x = static_cast<InT>(scale * static_cast<float>(unit_norm));
        int d = lane + 32 * i;
        if (!is_q) {
            k[((b * ROWS + t) * Hk + unit - Hk) * Dk + d] = x;
        } else if (t < T) {
            q[((b * T + t) * Hk + unit) * Dk + d] = x;
        }
    }
"""


@lru_cache
def kernel() -> Any:
    """The kernel object; not made at import, which a CUDA build would refuse."""
    return mx.fast.metal_kernel(
        name="gated_delta_prologue",
        input_names=[
            *("window_in", "qkv_prev", "n_prev", "qkv", "a", "b_in"),
            *("conv", "A_log", "dt_bias", "scales", "T_prev", "T"),
        ],
        output_names=["window_out", "q", "k", "v", "g", "beta"],
        header=HEADER,
        source=SOURCE,
    )


class Columns(NamedTuple):
    """A part of a projection's result: ``array[:, :, start : start + size]``.

    The kernels read it where it lies, so that one matrix can hold several projections.

    Shapes:
        array: [B, T, N]
    """

    array: mx.array
    start: int
    size: int

    def sliced(self) -> mx.array:
        if self.size == self.array.shape[-1]:
            return self.array
        return self.array[..., self.start : self.start + self.size]


class Sizes(NamedTuple):
    """What a Gated DeltaNet layer's kernels are compiled for.

    Args:
        Hk, Hv, Dk, Dv: heads and head sizes of keys and values.
        W: taps of the convolution.
        dtype: of inputs and weights.
    """

    Hk: int
    Hv: int
    Dk: int
    Dv: int
    W: int
    dtype: mx.Dtype


class Weights(NamedTuple):
    """A layer's parameters that the prologue reads.

    Shapes:
        conv: [C, W, 1], C = 2 Hk Dk + Hv Dv; A_log, dt_bias: [Hv]
    """

    conv: mx.array
    A_log: mx.array
    dt_bias: mx.array


@lru_cache
def norm_scales(Dk: int) -> mx.array:
    """The factors of q and k and the epsilon, in ``normalize_qk``'s convention."""
    inverse = Dk**-0.5
    return mx.array([inverse**2, inverse, NORM_EPS * inverse**2], mx.float32)


@lru_cache(maxsize=256)
def _template(
    sizes: Sizes, gate_dtypes: tuple[mx.Dtype, mx.Dtype], columns: tuple[int, ...]
) -> list[tuple[str, int | mx.Dtype]]:
    """Template arguments; the gates' sum has the common dtype of its terms."""
    Hk, Hv, Dk, Dv, W, dtype = sizes
    gate_dtype = dtype if gate_dtypes == (dtype, dtype) else mx.float32
    names = ("QKV_STRIDE", "QKV_AT", "A_STRIDE", "A_AT", "B_STRIDE", "B_AT")
    return [
        *(("InT", dtype), ("GateT", gate_dtype), ("ROWS", MAX_ROWS), ("W", W)),
        *(("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv)),
        *zip(names, columns, strict=True),
    ]


def gated_delta_prologue(
    window: mx.array,
    previous: Columns,
    n_prev: mx.array,
    qkv: Columns,
    a: Columns,
    b: Columns,
    weights: Weights,
    sizes: Sizes,
) -> tuple[mx.array, mx.array, Rows]:
    """Window, q and rows of a block of T <= 9 tokens.

    Args:
        window: the convolution's inputs before the previous block.
        previous: the previous block's qkv; with ``n_prev`` 0 any will do.
        n_prev: rows of it that stand, 0 to its T; never read on the host.
        qkv, a, b: the current block's projections; ``previous`` and ``qkv`` lie at the
            same place of matrices of the same width.
        weights, sizes: the layer's.

    Returns:
        the window before the current block, q, and the rows for the recurrence; rows
        past T are zero.

    Shapes:
        window, result: [B, W - 1, C]; n_prev: [B] int32; q: [B, T, Hk, Dk]
    """
    Hk, Hv, Dk, Dv, W, dtype = sizes
    B, T, width = qkv.array.shape
    columns = (
        *(width, qkv.start, a.array.shape[-1], a.start),
        *(b.array.shape[-1], b.start),
    )
    window_out, q, *rows = kernel()(
        inputs=[
            *(window, previous.array, n_prev, qkv.array, a.array, b.array),
            *(*weights, norm_scales(Dk), previous.array.shape[1], T),
        ],
        template=_template(sizes, (a.array.dtype, weights.dt_bias.dtype), columns),
        grid=(32, 2 * Hk + Hv + 1, B * (MAX_ROWS + W - 1)),
        threadgroup=(32, 4, 1),
        output_shapes=[
            *(window.shape, (B, T, Hk, Dk), (B, MAX_ROWS, Hk, Dk)),
            *((B, MAX_ROWS, Hv, Dv), (B, MAX_ROWS, Hv), (B, MAX_ROWS, Hv)),
        ],
        output_dtypes=[dtype, dtype, dtype, dtype, mx.float32, dtype],
    )
    return window_out, q, Rows(*rows)


def gated_delta_prologue_ops(
    window: mx.array,
    previous: Columns,
    n_prev: mx.array,
    qkv: Columns,
    a: Columns,
    b: Columns,
    weights: Weights,
    sizes: Sizes,
) -> tuple[mx.array, mx.array, Rows]:
    """The same in MLX operations, as :func:`gated_delta_prologue`."""
    conv, A_log, dt_bias = weights
    Hk, Hv, Dk, Dv, *_ = sizes
    B, T, _ = qkv.array.shape
    strip = mx.concatenate([window, previous.sliced()], axis=1)
    at = (n_prev[:, None] + mx.arange(conv.shape[1] - 1))[..., None]
    window = mx.take_along_axis(strip, at, axis=1)
    conv_input = mx.concatenate([window, qkv.sliced()], axis=1)
    out = nn.silu(mx.conv1d(conv_input, conv, groups=conv.shape[0]))
    q, k, v = mx.split(out, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    q, k = q.reshape(B, T, Hk, Dk), k.reshape(B, T, Hk, Dk)
    q, k = normalize_qk(q, k, inv_scale=Dk**-0.5, eps=NORM_EPS)
    g = compute_g(A_log, a.sliced(), dt_bias)
    rows = (k, v.reshape(B, T, Hv, Dv), g, mx.sigmoid(b.sliced()))

    def padded(x: mx.array) -> mx.array:
        return mx.pad(x, [(0, 0), (0, MAX_ROWS - T), *[(0, 0)] * (x.ndim - 2)])

    return window, q, Rows(*map(padded, rows))
