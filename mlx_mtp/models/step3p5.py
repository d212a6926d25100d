"""Step-3.5-Flash: sliding and full layers; a head of three modules, each in the chain.

Every module has an output layer of its own, and its layer is of the kind that the
config's lists, which are longer than the target, say for it. Sources: vLLM
``step3p5_mtp.py`` and SGLang ``step3p5_mtp.py``: states before the final norm, each
module reading the one before. transformers feeds the state behind the norm.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import step3p5

from .family import Config, Family, Weights
from .qwen3_5 import ZERO_CENTRED_NORMS
from .spec import MTPSpec

# The config's lists with an entry for every layer, the head's behind the target's.
BY_LAYER = (
    "layer_types",
    "rope_theta",
    "partial_rotary_factors",
    "swiglu_limits",
    "swiglu_limits_shared",
)


class Step35(Family):
    spec = MTPSpec(
        family="step3p5",
        model_types=("step3p5",),
        prefixes=("model.layers.{layer}.transformer.", "model.layers.{layer}."),
        names=(
            ("enorm.", "pre_fc_norm_embedding."),
            ("hnorm.", "pre_fc_norm_hidden."),
            ("eh_proj.", "fc."),
            ("shared_head.norm.", "norm."),
            ("shared_head.output.", "lm_head."),
            ("embed_tokens.", "embed_tokens."),
            ("", "layers.0."),
        ),
        num_modules=None,
        modules="chained",
        hidden="pre_norm",
        chain="pre_norm",
        zero_centred_norms=ZERO_CENTRED_NORMS,
    )
    base = step3p5
    raw_names = (".moe.",)

    def module_parts(
        self, args: Any, config: Config, module: int
    ) -> tuple[nn.Module, dict[str, Any]]:
        index = args.num_hidden_layers + module
        for name in BY_LAYER:
            values = getattr(args, name)
            if isinstance(values, list) and values and len(values) <= index:
                raise ValueError(
                    f"{name} in config.json has {len(values)} entries, none for layer "
                    f"{index}, which is the head's module {module}; use the config of "
                    "the original repository"
                )
        layer = step3p5.Step3p5DecoderLayer(args, index)
        return layer, {"window": args.sliding_window if layer.is_sliding else None}

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        return weights  # dense layers, named as the head's parameters already
