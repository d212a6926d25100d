"""The most likely token of an output layer, without writing its logits.

Two launches: the best row of every 64 of the vocabulary, then the best of those. Of
equal logits, rounded to the input's dtype, the first wins, as with ``mx.argmax``.
For drafts: the target's logits are wanted whole.
"""

from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

SIMD_GROUPS = 8  # of a threadgroup
ROWS_PER_SIMD = 8
CHUNK = SIMD_GROUPS * ROWS_PER_SIMD  # vocabulary rows of a threadgroup
BITS = (2, 4, 8)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)

# What a lane adds to the dot product of vocabulary row `row` and input row `n`.
DENSE = """
        for (int k = lane * 4; k < K; k += 128) {
            for (int j = 0; j < 4 && k + j < K; ++j) {
                sum += static_cast<float>(w[row * K + k + j]) *
                    static_cast<float>(x[n * K + k + j]);
            }
        }
"""
QUANTIZED = """
        for (int k = lane * 16; k < K; k += 512) {
            float products = 0.0f;
            float inputs = 0.0f;
            for (int word = 0; word < BITS / 2; ++word) {
                uint packed = w[row * (K * BITS / 32) + k * BITS / 32 + word];
                for (int j = 0; j < 32 / BITS; ++j) {
                    float value = static_cast<float>(
                        x[n * K + k + word * (32 / BITS) + j]);
                    products += static_cast<float>(packed & ((1u << BITS) - 1)) * value;
                    inputs += value;
                    packed >>= BITS;
                }
            }
            int group = row * (K / GROUP) + k / GROUP;
            sum += static_cast<float>(scales[group]) * products +
                static_cast<float>(biases[group]) * inputs;
        }
"""

SOURCE = """
    int lane = thread_index_in_simdgroup;
    int simd = simdgroup_index_in_threadgroup;
    int chunk = threadgroup_position_in_grid.x;
    int n = threadgroup_position_in_grid.y;
    int first = (chunk * 8 + simd) * 8;
    float best = -INFINITY;
    int best_row = metal::min(first, V - 1);
    for (int i = 0; i < 8; ++i) {
        int row = metal::min(first + i, V - 1);
        float sum = 0.0f;
DOT_PRODUCT
        float logit = static_cast<float>(static_cast<InT>(simd_sum(sum)));
        if (logit > best) {
            best = logit;
            best_row = row;
        }
    }
    threadgroup float values[8];
    threadgroup int rows[8];
    if (lane == 0) {
        values[simd] = best;
        rows[simd] = best_row;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd == 0 && lane == 0) {
        for (int s = 1; s < 8; ++s) {
            if (values[s] > best) {
                best = values[s];
                best_row = rows[s];
            }
        }
        value[n * CHUNKS + chunk] = best;
        token[n * CHUNKS + chunk] = best_row;
    }
"""

# One SIMD group takes the best of all chunks.
REDUCE = """
    int lane = thread_index_in_simdgroup;
    int n = threadgroup_position_in_grid.y;
    float best = -INFINITY;
    int best_token = CHUNKS * 64;
    for (int c = lane; c < CHUNKS; c += 32) {
        if (value[n * CHUNKS + c] > best) {
            best = value[n * CHUNKS + c];
            best_token = token[n * CHUNKS + c];
        }
    }
    float highest = simd_max(best);
    int lowest = simd_min(best == highest ? best_token : CHUNKS * 64);
    if (lane == 0) {
        out[n] = lowest == CHUNKS * 64 ? 0 : lowest;
    }
"""


@lru_cache
def kernel(quantized: bool) -> Any:
    """The first launch; not made at import, which a CUDA build would refuse."""
    arrays = ["w", "scales", "biases"] if quantized else ["w"]
    return mx.fast.metal_kernel(
        name="greedy_head_quantized" if quantized else "greedy_head",
        input_names=["x", *arrays],
        output_names=["value", "token"],
        source=SOURCE.replace("DOT_PRODUCT", QUANTIZED if quantized else DENSE),
    )


@lru_cache
def reduce_kernel() -> Any:
    return mx.fast.metal_kernel(
        name="greedy_head_reduce",
        input_names=["value", "token"],
        output_names=["out"],
        source=REDUCE,
    )


def covers(layer: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether the kernel is written for an output layer (linear, or a tied embedding).

    Other bits and modes, and biases, go the way of the logits.
    """
    if "bias" in layer or dtype not in DTYPES:
        return False
    if "scales" not in layer:
        return type(layer) in (nn.Linear, nn.Embedding) and layer.weight.dtype == dtype
    return (
        type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        and layer.mode == "affine"
        and layer.bits in BITS
        and layer.scales.dtype == dtype
    )


def greedy_head(x: mx.array, layer: nn.Module) -> mx.array:
    """The token of the highest logit for each row.

    Args:
        x: what the output layer reads, [B, T, hidden_size].
        layer: one that ``covers`` holds for.

    Returns:
        int32 [B, T].
    """
    B, T, K = x.shape
    V, rows, quantized = layer.weight.shape[0], B * T, "scales" in layer
    chunks = -(-V // CHUNK)
    arrays = [layer.weight]
    template = [("InT", x.dtype), ("K", K), ("V", V), ("CHUNKS", chunks)]
    if quantized:
        arrays += [layer.scales, layer.biases]
        template += [("BITS", layer.bits), ("GROUP", layer.group_size)]
    partial = kernel(quantized)(
        inputs=[x, *arrays],
        template=template,
        grid=(32 * SIMD_GROUPS * chunks, rows, 1),
        threadgroup=(32 * SIMD_GROUPS, 1, 1),
        output_shapes=[(rows, chunks), (rows, chunks)],
        output_dtypes=[mx.float32, mx.int32],
    )
    (out,) = reduce_kernel()(
        inputs=partial,
        template=[("CHUNKS", chunks)],
        grid=(32, rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(B, T)],
        output_dtypes=[mx.int32],
    )
    return out


def greedy_head_ops(x: mx.array, layer: nn.Module) -> mx.array:
    """The same in MLX operations, as :func:`greedy_head`."""
    logits = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
    return mx.argmax(logits, axis=-1).astype(mx.int32)
