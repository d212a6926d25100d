"""K-EXAONE: sliding and full layers, a dense head with Qwen's names and plain norms.

Source: vLLM ``exaone_moe_mtp.py``. The head has rotary positions whatever its type;
the target has them in sliding layers only.
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
        # mlx-lm gives rotary positions to sliding layers; the window is the mask's.
        kinds = {"layer_types": [SLIDING], "is_moe_layer": [False]}
        return exaone_moe.DecoderLayer(replace(args, **kinds), 0)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        (kind, *_) = config.get("mtp_layer_types") or [SLIDING]
        return {"window": args.sliding_window if kind == SLIDING else None}
