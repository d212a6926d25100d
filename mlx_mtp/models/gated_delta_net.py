"""Gated DeltaNet layers that record a verify block, so that they can be rewound."""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from ..speculative.cache import MAX_BLOCK, RecurrentCache


class GatedDeltaBlock(NamedTuple):
    """What the recurrence of one layer read during a block of T tokens.

    Shapes:
        conv_input: [B, kernel - 1 + T, conv_dim]; state: [B, Hv, Dv, Dk] or None;
        q, k: [B, T, Hk, Dk]; v: [B, T, Hv, Dv]; a, b: [B, T, Hv]
    """

    conv_input: mx.array
    state: mx.array | None
    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array


class Projected(NamedTuple):
    """What a layer reads of its inputs.

    Shapes:
        qkv: [B, T, conv_dim]; z: [B, T, Hv, Dv]; b, a: [B, T, Hv]
    """

    qkv: mx.array
    z: mx.array
    b: mx.array
    a: mx.array


class Rewindable(nn.Module):
    """Put before mlx-lm's layer: shares its weights, records short blocks in its cache.

    The forward follows mlx_lm.models.qwen3_5.GatedDeltaNet (MIT, Copyright 2026 Apple
    Inc.). With any other cache the stock forward runs.
    """

    @classmethod
    def from_base(cls, layer: nn.Module) -> "Rewindable":
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.__dict__.update(layer.__dict__)
        dict.update(new, layer)
        return new

    def __call__(
        self,
        inputs: mx.array,
        mask: mx.array | None = None,
        cache: Any | None = None,
    ) -> mx.array:
        if not isinstance(cache, RecurrentCache):
            return super().__call__(inputs, mask, cache)
        B, T, _ = inputs.shape
        cache.commit()
        qkv, z, b, a = self.project(inputs)
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        window = cache[0]
        if window is None:
            window = mx.zeros((B, self.conv_kernel_size - 1, self.conv_dim), qkv.dtype)
        conv_input = mx.concatenate([window, qkv], axis=1)
        conv_out = nn.silu(self.conv1d(conv_input))
        q, k, v = (
            x.reshape(B, T, -1, dim)
            for x, dim in zip(
                mx.split(conv_out, [self.key_dim, 2 * self.key_dim], axis=-1),
                (self.head_k_dim, self.head_k_dim, self.head_v_dim),
                strict=True,
            )
        )
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        block = GatedDeltaBlock(conv_input, cache[1], q, k, v, a, b)
        out, state = self.scan(block, mask)
        ends = T if cache.lengths is None else mx.clip(cache.lengths, 0, T)
        cache[0], cache[1] = self.conv_window(conv_input, ends), state
        cache.advance(T)
        if T <= MAX_BLOCK:
            cache.record(block, self.replay)
        return self.out(self.norm(out, z).reshape(B, T, -1))

    def project(self, inputs: mx.array) -> Projected:
        raise NotImplementedError

    def out(self, x: mx.array) -> mx.array:
        return self.out_proj(x)

    def scan(
        self, block: GatedDeltaBlock, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """The delta rule over a block -> outputs [B, T, Hv, Dv], last state."""
        return gated_delta_update(
            *(block.q, block.k, block.v, block.a, block.b),
            *(self.A_log, self.dt_bias, block.state, mask),
            use_kernel=not self.training,
        )

    def conv_window(self, conv_input: mx.array, ends: int | mx.array) -> mx.array:
        """The inputs the convolution needs next, after ``ends`` tokens of the block."""
        width = self.conv_kernel_size - 1
        if isinstance(ends, int):
            return mx.contiguous(conv_input[:, ends : ends + width])
        at = (ends[:, None] + mx.arange(width))[..., None]
        return mx.take_along_axis(conv_input, at, axis=1)

    def replay(self, block: GatedDeltaBlock, n: mx.array) -> tuple[mx.array, mx.array]:
        """Conv window and state after the first ``n`` [B] tokens of a block.

        Only the recurrence runs again: no projection, no MLP.
        """
        mask = mx.arange(block.q.shape[1]) < n[:, None]
        _, state = self.scan(block, mask)
        return self.conv_window(block.conv_input, n), state


class RewindableGatedDeltaNet(Rewindable, qwen3_5.GatedDeltaNet):
    """Qwen3.5's layer: four projections."""

    def project(self, inputs: mx.array) -> Projected:
        z = self.in_proj_z(inputs).reshape(*inputs.shape[:2], -1, self.head_v_dim)
        return Projected(
            self.in_proj_qkv(inputs),
            z,
            self.in_proj_b(inputs),
            self.in_proj_a(inputs),
        )

    def out(self, x: mx.array) -> mx.array:
        x = self.out_proj(x)
        if self.sharding_group is not None:
            x = mx.distributed.all_sum(x, group=self.sharding_group)
        return x


class RewindableQwen3NextGatedDeltaNet(Rewindable, qwen3_next.Qwen3NextGatedDeltaNet):
    """Qwen3-Next's layer: two projections, their rows grouped by key head."""

    def project(self, inputs: mx.array) -> Projected:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(inputs), self.in_proj_ba(inputs)
        )
        B, T, _ = inputs.shape
        qkv = mx.concatenate([x.reshape(B, T, -1) for x in (q, k, v)], axis=-1)
        return Projected(qkv, z, b, a)


REWINDABLE = {
    qwen3_5.GatedDeltaNet: RewindableGatedDeltaNet,
    qwen3_next.Qwen3NextGatedDeltaNet: RewindableQwen3NextGatedDeltaNet,
}
