"""Qwen3.5, 3.6 and 3.8 (dense): the target, its rewindable layers and its MTP head.

The target is mlx-lm's own model. Two things are added: the head, and Gated DeltaNet
layers which record a verify block so that the state can be rewound inside it.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models import qwen3_5 as base
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from ..speculative.cache import MAX_BLOCK, RecurrentCache, RewindableKVCache
from .spec import MTPSpec

SPEC = MTPSpec(
    family="qwen3_5",
    prefixes=(
        "model.language_model.mtp.",
        "language_model.mtp.",
        "model.mtp.",
        "mtp.",
    ),
    num_modules=1,
    hidden="post_norm",
    zero_centred_norms=(
        "norm.weight",
        "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "q_norm.weight",
        "k_norm.weight",
    ),
)

VISION_PREFIXES = ("model.visual.", "visual.", "vision_tower.")


def build_model(config: dict) -> base.Model:
    """mlx-lm's model for a config, with random weights."""
    return base.Model(base.ModelArgs.from_dict(config))


def head_args(model: base.Model) -> base.TextModelArgs:
    return model.language_model.args


class MTPHead(nn.Module):
    """The draft head: (embedding of x[t+1], hidden of x[t]) -> hidden for x[t+2].

    ``norm(layer(fc([norm(e); norm(h)])))``; its output passes through the target's
    output layer and is also the hidden state of the next draft step.

    Shapes:
        embedding, hidden, result: [B, T, hidden_size]
    """

    def __init__(self, args: base.TextModelArgs):
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        # The last layer of an interval is the one with full attention.
        self.layers = [base.DecoderLayer(args, args.full_attention_interval - 1)]
        self.norm = nn.RMSNorm(size, eps)

    def __call__(
        self,
        embedding: mx.array,
        hidden: mx.array,
        cache: RewindableKVCache | None = None,
    ) -> mx.array:
        e, h = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        x = self.fc(mx.concatenate([e, h], axis=-1))
        return self.norm(self.layers[0](x, create_attention_mask(x, cache), cache))

    def make_cache(self, batch_size: int = 1) -> RewindableKVCache:
        return RewindableKVCache(batch_size)


class Target:
    """The model in the parts the engine uses: embed, hidden states, logits."""

    def __init__(self, model: base.Model):
        self.text = model.language_model

    @property
    def vocab_size(self) -> int:
        return self.text.model.embed_tokens.weight.shape[0]

    @property
    def head_dim(self) -> int:
        return self.text.args.head_dim

    def make_cache(self, batch_size: int = 1) -> list[Any]:
        return [
            RecurrentCache(2) if layer.is_linear else RewindableKVCache(batch_size)
            for layer in self.text.layers
        ]

    def embed(self, tokens: mx.array) -> mx.array:
        """[B, T] -> [B, T, hidden_size]"""
        return self.text.model.embed_tokens(tokens)

    def hidden(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """[B, T] -> [B, T, hidden_size], after the final norm."""
        return self.text.model(tokens, cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, T, hidden_size] -> [B, T, V]; also the head's output layer."""
        if self.text.args.tie_word_embeddings:
            return self.text.model.embed_tokens.as_linear(hidden)
        return self.text.lm_head(hidden)


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


class RewindableGatedDeltaNet(base.GatedDeltaNet):
    """mlx-lm's layer, sharing its weights, that records short blocks in its cache.

    The forward follows mlx_lm.models.qwen3_5.GatedDeltaNet (MIT, Copyright 2026 Apple
    Inc.). With any other cache the stock forward runs.
    """

    @classmethod
    def from_base(cls, layer: base.GatedDeltaNet) -> "RewindableGatedDeltaNet":
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
        qkv = self.in_proj_qkv(inputs)
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
        block = GatedDeltaBlock(
            conv_input,
            cache[1],
            *(q, k, v),
            *(self.in_proj_a(inputs), self.in_proj_b(inputs)),
        )
        out, state = self.scan(block, mask)
        ends = T if cache.lengths is None else mx.clip(cache.lengths, 0, T)
        cache[0], cache[1] = self.conv_window(conv_input, ends), state
        cache.advance(T)
        if T <= MAX_BLOCK:
            cache.record(block, self.replay)
        z = self.in_proj_z(inputs).reshape(B, T, -1, self.head_v_dim)
        out = self.out_proj(self.norm(out, z).reshape(B, T, -1))
        if self.sharding_group is not None:
            out = mx.distributed.all_sum(out, group=self.sharding_group)
        return out

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


def make_rewindable(model: base.Model) -> None:
    """Swap the Gated DeltaNet layers in place; the weights are shared."""
    swaps = [
        (name, RewindableGatedDeltaNet.from_base(module))
        for name, module in model.named_modules()
        if type(module) is base.GatedDeltaNet
    ]
    model.update_modules(tree_unflatten(swaps))
