"""K-EXAONE: sliding and full layers, a dense head with Qwen's names and plain norms.

Source: vLLM ``exaone_moe_mtp.py`` and ``exaone_moe.py``. In the head as in the target
only sliding layers have rotary positions, or all layers of a target without such.
"""

from dataclasses import replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import exaone_moe

from .family import Config, Family
from .qwen3_5 import PREFIXES
from .spec import MTPSpec

SLIDING = "sliding_attention"


class ExaoneMoe(Family):
    spec = MTPSpec(family="exaone_moe", model_types=("exaone_moe",), prefixes=PREFIXES)
    base = exaone_moe

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        # The target's types too: mlx-lm rotates in full layers if there are no others.
        kinds = [head_type(config), *args.layer_types]
        head_args = replace(args, layer_types=kinds, is_moe_layer=[False] * len(kinds))
        return exaone_moe.DecoderLayer(head_args, 0)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        sliding = head_type(config) == SLIDING
        return {"window": args.sliding_window if sliding else None}


def head_type(config: Config) -> str:
    (kind, *_) = config.get("mtp_layer_types") or [SLIDING]
    return kind
