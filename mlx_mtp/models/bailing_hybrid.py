"""Ling and Ring 2.5 and 3: linear and latent attention; the head is the layer past the
last one, with latent attention and experts.

Both have the model type ``bailing_hybrid``; the architecture tells them apart, as in
mlx-lm. Sources: ``modeling_bailing_moe_v2_5.py`` of inclusionAI/Ring-V2.5, vLLM
``bailing_moe_v3_mtp.py``.
"""

from types import ModuleType
from typing import Any

import mlx.nn as nn
from mlx_lm.models import bailing_hybrid, bailing_moe_v3

from . import nextn
from .family import Config, Family, Weights
from .latent_attention import ABSORBED
from .linear_attention import LINEAR_ATTENTION
from .spec import MTPSpec

V3 = "BailingMoeV3ForCausalLM"


class Bailing(Family):
    spec = MTPSpec(
        family="bailing_hybrid",
        model_types=("bailing_hybrid", "bailing_moe_v3"),
        prefixes=nextn.PREFIXES,
        names=(("final_layernorm.", "norm."), *nextn.NAMES),
    )
    base = bailing_hybrid
    embedding = "word_embeddings"
    swaps = ABSORBED | LINEAR_ATTENTION

    def build_model(self, config: Config) -> nn.Module:
        base = module_of(config)
        return base.Model(base.ModelArgs.from_dict(config))

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        if isinstance(args, bailing_moe_v3.ModelArgs):
            return bailing_moe_v3.BailingDecoderLayer(args, args.num_hidden_layers)
        return bailing_hybrid.DecoderLayer(args, args.num_hidden_layers)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        return {"array_mask": True}

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        # Its layer is one with experts, as the target's last.
        last = model.args.num_hidden_layers - 1
        return self.sanitized(weights, model, "layers.0.", f"model.layers.{last}.")

    def alike(self, path: str, model: nn.Module) -> str:
        # Ling 3 is quantised by kind of layer.
        index = getattr(model.model, "attention_index", None)
        if index is None or not path.startswith("layers.0."):
            return path
        return f"model.layers.{index}.{path.removeprefix('layers.0.')}"


def module_of(config: Config) -> ModuleType:
    v3 = V3 in (config.get("architectures") or ())
    return (
        bailing_moe_v3
        if v3 or config["model_type"] == "bailing_moe_v3"
        else (bailing_hybrid)
    )
