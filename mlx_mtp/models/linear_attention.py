"""Linear attention of Ling and Ring whose state can be rewound inside a short block.

Lightning attention (Ling 2.5) runs token by token there, as one token does in mlx-lm,
whose form for several rounds otherwise; Kimi Delta Attention (Ling 3) is sequential
anyway. The forwards follow mlx_lm.models.bailing_hybrid and bailing_moe_v3 (MIT,
Copyright 2026 Apple Inc.).
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import bailing_hybrid, bailing_moe_v3
from mlx_lm.models.bailing_hybrid import recurrent_gla
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from ..speculative.cache import MAX_BLOCK, RecurrentCache
from .recorded import Recorded, conv_input, conv_window, ends_of

QK_EPS = 1e-6  # mlx-lm's for this layer


class LightningBlock(NamedTuple):
    """Shapes: q, k: [B, H, T, K]; v: [B, H, T, V]; state: [B, H, K, V] or None"""

    q: mx.array
    k: mx.array
    v: mx.array
    state: mx.array | None


class RewindableLinearAttention(Recorded, bailing_hybrid.LinearAttention):
    def __call__(
        self,
        x: mx.array,
        mask: mx.array | None = None,
        cache: Any | None = None,
        offset: int | mx.array = 0,
    ) -> mx.array:
        if isinstance(cache, RecurrentCache):
            cache.commit()
            if x.shape[1] <= MAX_BLOCK:
                return self.run_short(x, mask, cache, offset)
        return super().__call__(x, mask, cache, offset)

    def run_short(
        self,
        x: mx.array,
        mask: mx.array | None,
        cache: RecurrentCache,
        offset: int | mx.array,
    ) -> mx.array:
        """[B, T, hidden_size] -> the same"""
        B, T, _ = x.shape
        qkv = self.query_key_value(x).reshape(B, T, -1, self.head_dim).swapaxes(1, 2)
        q, k, v = mx.split(qkv, 3, axis=1)
        if self.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        block = LightningBlock(q, k, v, cache[0])
        out, cache[0] = self.scan(block, mask)
        cache.advance(T)
        cache.record(block, self.replay)
        out = out.swapaxes(1, 2).reshape(B, T, -1)
        return self.dense(self.g_norm(out) * mx.sigmoid(self.g_proj(x)))

    def scan(
        self, block: LightningBlock, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Token by token -> outputs [B, H, T, V], last state."""
        outputs, state = [], block.state
        for t in range(block.q.shape[2]):
            row = slice(t, t + 1)
            q, k, v = (a[:, :, row] for a in block[:3])
            out, state = recurrent_gla(
                *(q, k, v, self._slope),
                scale=self.scale,
                h=state,
                mask=None if mask is None else mask[:, row],
            )
            outputs.append(out)
        return mx.concatenate(outputs, axis=2), state

    def replay(self, block: LightningBlock, n: mx.array) -> tuple[mx.array]:
        """State after the first ``n`` [B] tokens of a block."""
        _, state = self.scan(block, mx.arange(block.q.shape[2]) < n[:, None])
        return (state,)


class DeltaBlock(NamedTuple):
    """Shapes: inputs: [B, kernel - 1 + T, H D] each; state: [B, H, D, D] or None;
    q, k, v, gate: [B, T, H, D]; beta: [B, T, H]"""

    q_input: mx.array
    k_input: mx.array
    v_input: mx.array
    state: mx.array | None
    q: mx.array
    k: mx.array
    v: mx.array
    gate: mx.array
    beta: mx.array


class RewindableKDA(Recorded, bailing_moe_v3.BailingKDA):
    def __call__(
        self,
        x: mx.array,
        mask: mx.array | None = None,
        cache: Any | None = None,
    ) -> mx.array:
        if isinstance(cache, RecurrentCache):
            cache.commit()
            if x.shape[1] <= MAX_BLOCK:
                return self.run_short(x, mask, cache)
        return super().__call__(x, mask, cache)

    def run_short(
        self, x: mx.array, mask: mx.array | None, cache: RecurrentCache
    ) -> mx.array:
        """[B, T, hidden_size] -> the same"""
        B, T, _ = x.shape
        inputs, by_head, width = [], [], self.conv_kernel_size - 1
        for i, name in enumerate("qkv"):
            y = self[f"{name}_proj"](x)
            if mask is not None:
                y = mx.where(mask[..., None], y, 0)
            inputs.append(conv_input(y, cache[i], width))
            y = nn.silu(self[f"{name}_conv1d"](inputs[-1]))
            by_head.append(y.reshape(B, T, self.num_heads, self.head_dim))
        q, k, v = by_head
        q, k = normalize_qk(q, k, inv_scale=self.head_dim**-0.5, eps=QK_EPS)
        gate = self.f_proj(x).reshape(v.shape)
        beta = self.b_proj(x).astype(mx.float32)
        block = DeltaBlock(*inputs, cache[3], q, k, v, gate, beta)
        out, cache[3] = self.scan(block, mask)
        for i, y in enumerate(inputs):
            cache[i] = conv_window(y, ends_of(cache, T), width)
        cache.advance(T)
        cache.record(block, self.replay)
        opened = mx.sigmoid(self.g_proj(x).reshape(v.shape).astype(mx.float32))
        out = self.o_norm(out)
        out = out * opened.astype(out.dtype)
        return self.o_proj(out.reshape(B, T, -1))

    def scan(
        self, block: DeltaBlock, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """The delta rule over a block -> outputs [B, T, H, D], last state."""
        return gated_delta_update(
            *(block.q, block.k, block.v, block.gate, block.beta),
            self.A_log.reshape(self.num_heads, 1),
            self.dt_bias.reshape(self.num_heads, self.head_dim),
            state=block.state,
            mask=mask,
            use_kernel=not self.training,
            lower_bound=self.lower_bound,
        )

    def replay(self, block: DeltaBlock, n: mx.array) -> tuple[mx.array, ...]:
        """Conv windows and state after the first ``n`` [B] tokens of a block."""
        _, state = self.scan(block, mx.arange(block.q.shape[1]) < n[:, None])
        width = self.conv_kernel_size - 1
        return *(conv_window(y, n, width) for y in block[:3]), state


LINEAR_ATTENTION = {
    bailing_hybrid.LinearAttention: RewindableLinearAttention,
    bailing_moe_v3.BailingKDA: RewindableKDA,
}
