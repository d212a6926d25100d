"""LongCat-Flash: two latent attentions and a MoE per layer; a small dense head.

Sources: vLLM ``longcat_flash_mtp.py``, SGLang ``longcat_flash_nextn.py``. The head's
layer, one latent attention and a dense MLP, is none of the target's.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import longcat_flash

from .family import Config, Family, Weights
from .latent_attention import ABSORBED
from .spec import MTPSpec


class HeadLayer(nn.Module):
    """Shapes: [B, T, hidden_size] -> the same"""

    def __init__(self, args: Any):
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = longcat_flash.LongcatFlashMLA(args)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = longcat_flash.LongcatFlashMLP(args)

    def __call__(
        self, x: mx.array, mask: mx.array | None, cache: Any | None = None
    ) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LongcatFlash(Family):
    spec = MTPSpec(
        family="longcat_flash",
        model_types=("longcat_flash",),
        prefixes=("model.mtp.",),
        names=(
            ("layers.0.enorm.m.", "pre_fc_norm_embedding."),
            ("layers.0.hnorm.m.", "pre_fc_norm_hidden."),
            ("layers.0.eh_proj.", "fc."),
            ("layers.0.transformer_layer.mlp.", "layers.0.mlp."),
        ),
    )
    base = longcat_flash
    swaps = ABSORBED

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return HeadLayer(args)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        return {"array_mask": True}

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        return self.sanitized(
            weights, model, "layers.0.self_attn.", "model.layers.0.self_attn.0."
        )
