"""ERNIE-4.5-MoE: a dense head without a norm of its own.

Sources: PaddleFormers, which trains it with the state before the final norm, and
FastDeploy: the target's final norm stands before the output layer. vLLM and SGLang have
no norm there.
"""

from dataclasses import replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import ernie4_5_moe

from .family import Config, Family
from .spec import MTPSpec


class Ernie45Moe(Family):
    spec = MTPSpec(
        family="ernie4_5_moe",
        model_types=("ernie4_5_moe",),
        prefixes=("model.mtp_",),
        names=(
            ("emb_norm.0.", "pre_fc_norm_embedding."),
            ("hidden_norm.0.", "pre_fc_norm_hidden."),
            ("linear_proj.0.", "fc."),
            ("block.0.", "layers.0."),
        ),
        hidden="pre_norm",
        chain="pre_norm",
        final_norm="main",
        mask_first=True,
    )
    base = ernie4_5_moe
    unused = ("e_score_correction_bias",)

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        dense = replace(args, moe_layer_start_index=1)
        return ernie4_5_moe.Ernie4_5_DecoderLayer(dense, 0)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        return {"bias": args.use_bias}
