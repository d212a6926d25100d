"""Qwen3-Next: Gated DeltaNet layers and experts; the config does not tell of the head.

Source: vLLM ``qwen3_next_mtp.py``.
"""

from dataclasses import replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import qwen3_next

from .experts import split_fused_experts, stack_experts
from .family import Config, Family, Weights
from .gated_delta_net import swap_gated_delta
from .qwen3_5 import PREFIXES, ZERO_CENTRED_NORMS
from .spec import MTPSpec


class Qwen3Next(Family):
    spec = MTPSpec(
        family="qwen3_next",
        model_types=("qwen3_next",),
        prefixes=PREFIXES,
        count_keys=("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        zero_centred_norms=ZERO_CENTRED_NORMS,
    )
    base = qwen3_next

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        # The last layer of an interval has full attention; the head's has experts.
        args = replace(args, mlp_only_layers=[], decoder_sparse_step=1)
        return qwen3_next.Qwen3NextDecoderLayer(args, args.full_attention_interval - 1)

    def make_rewindable(self, module: nn.Module) -> None:
        swap_gated_delta(module)

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        # mlx-lm's code shifts norms and moves convolutions along with the experts.
        return split_fused_experts(stack_experts(weights))
