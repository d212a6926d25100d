"""The gated delta rule over a verify block, the rollback before it included.

One launch replays the accepted rows of the previous block in registers, writes that
state (the one before the current block) and runs the current block behind it. So a
round reads the recurrent state once and writes it once, whatever was drafted and
whatever was accepted; states inside a block are never written.

Rows of the recurrence (Yang, Kautz and Hatamizadeh, 2025,
https://arxiv.org/abs/2412.06464), per head, S being [Dv, Dk]::

    S = g S;  S = S + beta (v - S k) k^T;  y = S q
"""

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

MAX_ROWS = 9  # rows in a record: the pending token and at most 8 drafts

HEADER = """
// A row of the state belongs to 8 neighbouring lanes, so a SIMD group holds 4 rows.
METAL_FUNC float row_sum(float x) {
    x += simd_shuffle_xor(x, 1);
    x += simd_shuffle_xor(x, 2);
    x += simd_shuffle_xor(x, 4);
    return x;
}

// One step for one state row; a lane has 4 elements of every 32.
template <int CHUNKS, typename P>
METAL_FUNC void delta_step(
    thread float* state, P k, float v, float g, float beta) {
    float keys[CHUNKS * 4];
    float memory = 0.0f;
    for (int c = 0; c < CHUNKS; ++c) {
        for (int j = 0; j < 4; ++j) {
            int i = c * 4 + j;
            keys[i] = static_cast<float>(k[c * 32 + j]);
            state[i] = state[i] * g;
            memory += state[i] * keys[i];
        }
    }
    float delta = (v - row_sum(memory)) * beta;
    for (int i = 0; i < CHUNKS * 4; ++i) {
        state[i] = state[i] + keys[i] * delta;
    }
}

template <int CHUNKS, typename P>
METAL_FUNC float read_out(thread float* state, P q) {
    float out = 0.0f;
    for (int c = 0; c < CHUNKS; ++c) {
        for (int j = 0; j < 4; ++j) {
            out += state[c * 4 + j] * static_cast<float>(q[c * 32 + j]);
        }
    }
    return row_sum(out);
}
"""

SOURCE = """
    constexpr int CHUNKS = Dk / 32;
    int head = thread_position_in_grid.z;  // of all rows of the batch
    int b = head / Hv;
    int hv = head % Hv;
    int hk = hv / (Hv / Hk);
    int lane = thread_index_in_simdgroup;
    int dv = thread_position_in_grid.y * 4 + lane / 8;
    int first = lane % 8 * 4;

    int state_at = (head * Dv + dv) * Dk + first;
    float state[CHUNKS * 4];
    for (int c = 0; c < CHUNKS; ++c) {
        for (int j = 0; j < 4; ++j) {
            state[c * 4 + j] = state_in[state_at + c * 32 + j];
        }
    }

    // Where the block's first row of this head begins.
    int k_at = (b * ROWS * Hk + hk) * Dk + first;
    int v_at = (b * ROWS * Hv + hv) * Dv + dv;
    int gate_at = b * ROWS * Hv + hv;

    int replayed = metal::clamp(static_cast<int>(n_prev[b]), 0, ROWS);
    for (int t = 0; t < replayed; ++t) {
        delta_step<CHUNKS>(
            state,
            k_prev + k_at + t * Hk * Dk,
            static_cast<float>(v_prev[v_at + t * Hv * Dv]),
            g_prev[gate_at + t * Hv],
            static_cast<float>(beta_prev[gate_at + t * Hv]));
    }
    for (int c = 0; c < CHUNKS; ++c) {
        for (int j = 0; j < 4; ++j) {
            state_out[state_at + c * 32 + j] = state[c * 4 + j];
        }
    }

    for (int t = 0; t < T; ++t) {
        delta_step<CHUNKS>(
            state,
            k + k_at + t * Hk * Dk,
            static_cast<float>(v[v_at + t * Hv * Dv]),
            g[gate_at + t * Hv],
            static_cast<float>(beta[gate_at + t * Hv]));
        float out = read_out<CHUNKS>(
            state, q + ((b * T + t) * Hk + hk) * Dk + first);
        if (lane % 8 == 0) {
            y[((b * T + t) * Hv + hv) * Dv + dv] = static_cast<InT>(out);
        }
    }
"""


@lru_cache
def kernel() -> Any:
    """The kernel object; not made at import, which a CUDA build would refuse."""
    return mx.fast.metal_kernel(
        name="gated_delta_verify",
        input_names=[
            *("state_in", "k_prev", "v_prev", "g_prev", "beta_prev", "n_prev"),
            *("q", "k", "v", "g", "beta", "T"),
        ],
        output_names=["y", "state_out"],
        header=HEADER,
        source=SOURCE,
    )


class Rows(NamedTuple):
    """What the recurrence reads of a block of T <= 9 tokens, padded to 9 rows.

    Shapes:
        k: [B, 9, Hk, Dk]; v: [B, 9, Hv, Dv]; g: [B, 9, Hv] float32, the decay;
        beta: [B, 9, Hv]
    """

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


def gated_delta_verify(
    state: mx.array, previous: Rows, n_prev: mx.array, q: mx.array, rows: Rows
) -> tuple[mx.array, mx.array]:
    """Replay ``n_prev`` rows of the previous block, then run the current one.

    Args:
        state: before the previous block.
        previous: the previous block; with ``n_prev`` 0 any rows will do.
        n_prev: rows of it that stand, 0 to 9; never read on the host.
        q: of the current block's T tokens, T from 1 to 9.
        rows: of the current block.

    Returns:
        outputs, and the state before the current block.

    Shapes:
        state: [B, Hv, Dv, Dk] float32; n_prev: [B] int32; q: [B, T, Hk, Dk];
        result: [B, T, Hv, Dv] in q's dtype, [B, Hv, Dv, Dk] float32
    """
    B, T, Hk, Dk = q.shape
    Hv, Dv = rows.v.shape[2:]
    y, new_state = kernel()(
        inputs=[state, *previous, n_prev, q, *rows, T],
        template=[
            *(("InT", q.dtype), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv)),
            ("ROWS", MAX_ROWS),
        ],
        grid=(32, Dv // 4, B * Hv),
        threadgroup=(32, 4, 1),
        output_shapes=[(B, T, Hv, Dv), state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return y, new_state


def gated_delta_verify_ops(
    state: mx.array, previous: Rows, n_prev: mx.array, q: mx.array, rows: Rows
) -> tuple[mx.array, mx.array]:
    """The same in MLX operations, as :func:`gated_delta_verify`."""
    T = q.shape[1]
    mask = mx.arange(MAX_ROWS) < n_prev[:, None]
    _, before = gated_delta_ops(previous.k, *previous, state, mask)
    y, _ = gated_delta_ops(q, *(x[:, :T] for x in rows), before)
    return y, before
