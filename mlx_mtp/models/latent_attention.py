"""Attention over a latent cache (MLA) for the few rows of a verify block.

With a single row mlx-lm stays in the latent space (the absorbed form); with more it
expands the whole cache to keys and values of every head, which grows with the text. The
layers here stay in the latent space for a whole verify block. Their forwards follow
mlx_lm.models.deepseek_v3 and deepseek_v32 (MIT, Copyright 2024-2025 Apple Inc.), and
with any other cache or more rows the stock forwards run.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import (
    bailing_hybrid,
    bailing_moe_v3,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    longcat_flash,
)
from mlx_lm.models.base import scaled_dot_product_attention

from ..speculative.cache import MAX_BLOCK, RewindableKVCache
from ..speculative.cache_list import RewindableCacheList


class Absorbed(nn.Module):
    """Put before mlx-lm's layer: shares its weights, serves short blocks itself."""

    @classmethod
    def from_base(cls, layer: nn.Module) -> "Absorbed":
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.__dict__.update(layer.__dict__)
        dict.update(new, layer)
        return new

    def __call__(
        self,
        x: mx.array,
        mask: mx.array | None = None,
        cache: Any | None = None,
    ) -> mx.array:
        if type(cache) is not RewindableKVCache or x.shape[1] > MAX_BLOCK:
            return super().__call__(x, mask, cache)
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = self.queries(q, cache.offset)
        latent, k_pe = cache.update_and_fetch(*self.latents(x, cache.offset))
        return self.attend(x, q_nope, q_pe, latent, k_pe, mask)

    def queries(self, q: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
        """[B, T, heads * size] -> the same by head: nope, and rope turned"""
        q = q.reshape(*q.shape[:2], self.num_heads, -1).swapaxes(1, 2)
        q_nope, q_pe = mx.split(q, [self.qk_nope_head_dim], axis=-1)
        return q_nope, self.rope(q_pe, offset)

    def latents(self, x: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
        """What is cached: [B, 1, T, kv_lora_rank] and [B, 1, T, rope], turned"""
        latent, k_pe = mx.split(
            self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1
        )
        return self.kv_a_layernorm(latent)[:, None], self.rope(k_pe[:, None], offset)

    def attend(
        self,
        x: mx.array,
        q_nope: mx.array,
        q_pe: mx.array,
        latent: mx.array,
        k_pe: mx.array,
        mask: mx.array | None,
    ) -> mx.array:
        """-> [B, T, hidden_size]"""
        scores = self.latent_attention(q_nope, q_pe, latent, k_pe, mask)
        return self.project(self.unembed_out(scores).swapaxes(1, 2), x)

    def project(self, out: mx.array, x: mx.array) -> mx.array:
        """[B, T, heads, v_head_dim] and the layer's input -> [B, T, hidden_size]"""
        return self.o_proj(out.reshape(*out.shape[:2], -1))

    def latent_attention(
        self,
        q_nope: mx.array,
        q_pe: mx.array,
        latent: mx.array,
        k_pe: mx.array,
        mask: mx.array | None,
    ) -> mx.array:
        """-> [B, heads, T, kv_lora_rank]"""
        scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2)
        if mask is not None:
            least = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
            scores = mx.where(mask, scores, least)
        return scaled_dot_product_attention(
            self.embed_q(q_nope), latent, latent, None, self.scale, scores
        )


class AbsorbedDeepseekV3Attention(Absorbed, deepseek_v3.DeepseekV3Attention):
    pass


class AbsorbedGlm4MoeLiteAttention(Absorbed, glm4_moe_lite.Glm4MoeLiteAttention):
    pass


class AbsorbedDeepseekV32Attention(Absorbed, deepseek_v32.DeepseekV32Attention):
    """With an indexer: every row reads the ``index_topk`` positions it scores highest.

    Rows of a block choose differently. Each gathers its own positions, in the order of
    the text, so that a row does not depend on the others nor on unused room behind it.
    """

    def __call__(
        self,
        x: mx.array,
        mask: mx.array | None = None,
        cache: Any | None = None,
    ) -> mx.array:
        if type(cache) is not RewindableCacheList or x.shape[1] > MAX_BLOCK:
            # Not Absorbed's: the stock forward.
            return super(Absorbed, self).__call__(x, mask, cache)
        latents, keys = cache
        low = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_pe = self.queries(self.q_b_proj(low), latents.offset)
        latent, k_pe = latents.update_and_fetch(*self.latents(x, latents.offset))
        chosen = self.choose(x, low, mask, keys)
        if chosen is None:
            # The keys are not read; they must be computed all the same.
            latent = mx.depends(latent, keys.keys)
            return self.attend(x, q_nope, q_pe, latent, k_pe, mask)
        return self.attend_chosen(q_nope, q_pe, latent, k_pe, mask, chosen)

    def choose(
        self, x: mx.array, low: mx.array, mask: mx.array | None, cache: Any
    ) -> mx.array | None:
        """Positions [B, T, index_topk] in ascending order; None for all of them.

        Shapes:
            x: [B, T, hidden_size]; low: [B, T, q_lora_rank]; mask: [B, 1, T, S]
        """
        indexer = self.indexer
        q = indexer.wq_b(low).reshape(*x.shape[:2], indexer.n_heads, -1).swapaxes(1, 2)
        k = indexer.k_norm(indexer.wk(x))[:, None]
        q, k = (indexer.rope(y, offset=cache.offset) for y in (q, k))
        k, _ = cache.update_and_fetch(k, mx.zeros_like(k))  # mlx-lm's form
        if k.shape[2] <= indexer.index_topk:
            return None
        scores = mx.maximum(q @ k.swapaxes(-1, -2), 0)
        weights = indexer.weights_proj(x) * (
            indexer.n_heads**-0.5 * indexer.softmax_scale
        )
        # One head after the other, so that the sum is the same for any number of rows.
        scores = scores * weights.swapaxes(-1, -2)[..., None]  # [B, heads, T, S]
        scores = sum(scores[:, h] for h in range(indexer.n_heads))
        if mask is not None:
            scores = mx.where(mask[:, 0], scores, -mx.inf)
        size = indexer.index_topk
        chosen = mx.argpartition(scores, kth=-size, axis=-1)[..., -size:]
        return mx.sort(mx.stop_gradient(chosen), axis=-1)

    def attend_chosen(
        self,
        q_nope: mx.array,
        q_pe: mx.array,
        latent: mx.array,
        k_pe: mx.array,
        mask: mx.array | None,
        chosen: mx.array,
    ) -> mx.array:
        """Attention of every row over its own positions; rows become a batch."""
        B, T, size = chosen.shape

        def gathered(y: mx.array) -> mx.array:  # [B, 1, S, D] -> [B T, 1, size, D]
            at = chosen.reshape(B, 1, T * size, 1)
            return mx.take_along_axis(y, at, axis=2).reshape(B * T, 1, size, -1)

        def row(y: mx.array) -> mx.array:  # [B, heads, T, D] -> [B T, heads, 1, D]
            return y.swapaxes(1, 2).reshape(B * T, self.num_heads, 1, -1)

        if mask is not None:
            mask = mx.broadcast_to(mask, (B, 1, T, mask.shape[-1]))
            mask = mx.take_along_axis(mask[:, 0], chosen, axis=-1)
            mask = mask.reshape(B * T, 1, 1, size)
        out = self.latent_attention(
            row(q_nope), row(q_pe), gathered(latent), gathered(k_pe), mask
        )
        out = out.reshape(B, T, self.num_heads, -1).swapaxes(1, 2)
        out = self.unembed_out(out).swapaxes(1, 2)
        return self.o_proj(out.reshape(B, T, -1))


class AbsorbedLongcatFlashMLA(Absorbed, longcat_flash.LongcatFlashMLA):
    """Queries and latents are scaled where the config says so."""

    @property
    def num_heads(self) -> int:
        return self.num_attention_heads

    def queries(self, q: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
        scale = getattr(self, "mla_scale_q_lora", None)
        return super().queries(q if scale is None else q * scale, offset)

    def latents(self, x: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
        scale = getattr(self, "mla_scale_kv_lora", None)
        latent, k_pe = super().latents(x, offset)
        return latent if scale is None else latent * scale, k_pe


class AbsorbedBailingMLA(Absorbed, bailing_hybrid.MultiLatentAttention):
    @property
    def o_proj(self) -> nn.Module:
        return self.dense


class AbsorbedBailingV3MLA(Absorbed, bailing_moe_v3.BailingMLA):
    """With a gate per head before the output projection."""

    def project(self, out: mx.array, x: mx.array) -> mx.array:
        gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(out.dtype)
        out = out * gate[..., None]
        return self.dense(out.reshape(*out.shape[:2], -1))


ABSORBED = {
    deepseek_v3.DeepseekV3Attention: AbsorbedDeepseekV3Attention,
    glm4_moe_lite.Glm4MoeLiteAttention: AbsorbedGlm4MoeLiteAttention,
    longcat_flash.LongcatFlashMLA: AbsorbedLongcatFlashMLA,
    bailing_hybrid.MultiLatentAttention: AbsorbedBailingMLA,
    bailing_moe_v3.BailingMLA: AbsorbedBailingV3MLA,
    deepseek_v32.DeepseekV32Attention: AbsorbedDeepseekV32Attention,
}
