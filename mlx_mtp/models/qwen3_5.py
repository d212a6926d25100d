"""Qwen3.5, 3.6 and 3.8 (dense): the target, its rewindable layers and its MTP head.

The target is mlx-lm's own model. Two things are added: the head, and Gated DeltaNet
layers which record a verify block so that the state can be rewound inside it.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5 as base
from mlx_lm.models.base import create_attention_mask

from ..speculative.cache import RecurrentCache, RewindableKVCache
from .gated_delta_net import swap_gated_delta
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


def make_rewindable(model: base.Model) -> None:
    """Swap the Gated DeltaNet layers in place; the weights are shared."""
    swap_gated_delta(model)
