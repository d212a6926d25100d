"""Qwen3.5, 3.6 and 3.8, dense: Gated DeltaNet layers, a head with full attention."""

from types import ModuleType
from typing import Any

import mlx.nn as nn
from mlx_lm.models import qwen3_5

from .family import Config, Family, Weights
from .gated_delta_net import swap_gated_delta
from .spec import MTPSpec

PREFIXES = (
    "model.language_model.mtp.",
    "language_model.mtp.",
    "model.mtp.",
    "mtp.",
)
ZERO_CENTRED_NORMS = (
    "norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


class Qwen35(Family):
    spec = MTPSpec(
        family="qwen3_5",
        model_types=("qwen3_5", "qwen3_5_text"),
        prefixes=PREFIXES,
        count_keys=("mtp_num_hidden_layers",),
        zero_centred_norms=ZERO_CENTRED_NORMS,
    )
    base: ModuleType = qwen3_5
    vision_prefixes = ("model.visual.", "visual.", "vision_tower.")

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        # The last layer of an interval is the one with full attention.
        return qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)

    def text_model(self, model: nn.Module) -> nn.Module:
        return model.language_model

    def make_rewindable(self, module: nn.Module) -> None:
        swap_gated_delta(module)

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        return weights  # named as the head's parameters already
