"""MiMo-V2-Flash: sliding layers with attention sinks; a head of three modules.

Sources: the report (arXiv 2601.02780, section 2.3.2): every module reads the target's
hidden state, none another module's; SGLang ``mimo_v2_flash_nextn.py``. vLLM uses the
first module only.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import mimo_v2_flash

from .family import Config, Family
from .spec import MTPSpec


class MiMoV2Flash(Family):
    spec = MTPSpec(
        family="mimo_v2_flash",
        model_types=("mimo_v2_flash",),
        prefixes=("model.mtp.layers.{module}.",),
        names=(
            ("enorm.", "pre_fc_norm_embedding."),
            ("hnorm.", "pre_fc_norm_hidden."),
            ("eh_proj.", "fc."),
            ("final_layernorm.", "norm."),
            ("pre_mlp_layernorm.", "layers.0.post_attention_layernorm."),
            ("", "layers.0."),
        ),
        num_modules=None,
        modules="target_fed",
    )
    base = mimo_v2_flash

    def norm_eps(self, args: Any) -> float:
        return args.layernorm_epsilon

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return mimo_v2_flash.DecoderLayer(args, is_moe=False, is_sliding_window=True)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        return {"window": args.sliding_window_size}
