"""DeepSeek-V3, V3.1 and R1: latent attention, experts in target and head.

Sources: the technical report (arXiv 2412.19437, section 2.2), vLLM ``deepseek_mtp.py``,
SGLang ``deepseek_nextn.py``. The released weights have the embedding first, other than
the report's equation. vLLM counts the first embedding as zero, the others do not.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import deepseek_v3

from . import nextn
from .family import Config, Family
from .latent_attention import ABSORBED
from .spec import MTPSpec


class DeepseekV3(Family):
    spec = MTPSpec(
        family="deepseek_v3",
        model_types=("deepseek_v3",),
        prefixes=nextn.PREFIXES,
        names=nextn.NAMES,
    )
    base = deepseek_v3
    swaps = ABSORBED

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return deepseek_v3.DeepseekV3DecoderLayer(args, args.num_hidden_layers)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        return {"array_mask": True}
