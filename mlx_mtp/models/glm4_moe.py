"""GLM-4.5, 4.6 and 4.7, with and without q/k norms (355B, Air).

Sources: vLLM ``glm4_moe_mtp.py``, SGLang ``glm4_moe_nextn.py``, transformers
``MtpModel``. vLLM chains the state before the head's norm, the others the one after.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import glm4_moe

from . import nextn
from .family import Config, Family
from .spec import MTPSpec


class Glm4Moe(Family):
    spec = MTPSpec(
        family="glm4_moe",
        model_types=("glm4_moe",),
        prefixes=nextn.PREFIXES,
        names=nextn.NAMES,
    )
    base = glm4_moe

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return glm4_moe.DecoderLayer(args, args.num_hidden_layers)
