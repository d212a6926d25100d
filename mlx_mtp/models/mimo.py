"""MiMo-7B: a dense head that reads the hidden state first, before the final norm.

Sources: vLLM ``mimo_mtp.py``, exllamav3 (issue 238). SGLang feeds the state after the
final norm.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import mimo

from .family import Config, Family
from .spec import MTPSpec


class MiMo(Family):
    spec = MTPSpec(
        family="mimo",
        model_types=("mimo",),
        prefixes=("model.mtp_layers.{module}.",),
        names=(
            ("token_layernorm.", "pre_fc_norm_embedding."),
            ("hidden_layernorm.", "pre_fc_norm_hidden."),
            ("input_proj.", "fc."),
            ("final_layernorm.", "norm."),
            ("", "layers.0."),
        ),
        concat="hidden_first",
        hidden="pre_norm",
        chain="pre_norm",
        mask_first=True,
    )
    base = mimo

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return mimo.TransformerBlock(args)
