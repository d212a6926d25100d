"""GLM-4.7-Flash: latent attention; the head may differ from the target at both ends.

Source: vLLM ``glm4_moe_lite_mtp.py``, which takes the target's embedding and output
layer; here the head's own are kept where they differ.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import glm4_moe_lite

from . import nextn
from .deepseek_v3 import DeepseekV3
from .family import Config
from .spec import MTPSpec


class Glm4MoeLite(DeepseekV3):
    spec = MTPSpec(
        family="glm4_moe_lite",
        model_types=("glm4_moe_lite",),
        prefixes=nextn.PREFIXES,
        names=nextn.NAMES,
    )
    base = glm4_moe_lite

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return glm4_moe_lite.Glm4MoeLiteDecoderLayer(args, args.num_hidden_layers)
