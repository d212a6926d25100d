"""Nemotron-H: Mamba2, attention and MoE layers; a head of an attention and a MoE one.

The projection and its norms lie in the first of the head's layers, its last norm in the
last. Sources: vLLM ``nemotron_h_mtp.py``, Megatron-Bridge.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import nemotron_h

from .experts import stack_experts
from .family import Config, Family, Weights
from .mamba2 import REWINDABLE
from .spec import MTPSpec

PATTERN = "*E"
CHARACTERS = {"attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}


class HeadLayer(nn.Module):
    """Layers of the kinds in a pattern, one of them with attention.

    Shapes: [B, T, hidden_size] -> the same
    """

    def __init__(self, args: Any, pattern: str):
        super().__init__()
        self.blocks = [nemotron_h.NemotronHBlock(args, kind) for kind in pattern]

    def __call__(
        self, x: mx.array, mask: mx.array | str | None, cache: Any | None = None
    ) -> mx.array:
        for block in self.blocks:
            x = block(x, mask, cache)  # only the one with attention looks at them
        return x


class NemotronH(Family):
    spec = MTPSpec(
        family="nemotron_h",
        model_types=("nemotron_h",),
        prefixes=("mtp.",),
        names=(
            ("layers.0.enorm.", "pre_fc_norm_embedding."),
            ("layers.0.hnorm.", "pre_fc_norm_hidden."),
            ("layers.0.eh_proj.", "fc."),
            *((f"layers.{i}.final_layernorm.", "norm.") for i in range(4)),
            ("layers.", "layers.0.blocks."),
        ),
    )
    base = nemotron_h
    core, embedding, norm = "backbone", "embeddings", "norm_f"
    swaps = REWINDABLE

    def norm_eps(self, args: Any) -> float:
        return args.layer_norm_epsilon

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return HeadLayer(args, head_pattern(config))

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        names = {"switch_mlp.up_proj.": "switch_mlp.fc1."}
        names |= {"switch_mlp.down_proj.": "switch_mlp.fc2."}
        weights = stack_experts(weights)
        for old, new in names.items():
            weights = {name.replace(old, new): x for name, x in weights.items()}
        return weights


def head_pattern(config: Config) -> str:
    """Of the kinds of the head's layers, from either form of the config.

    Raises:
        ValueError: for a kind that the head cannot have, or another number of layers
            with attention than one.
    """
    kinds = config.get("mtp_layers_block_type")
    pattern = config.get("mtp_hybrid_override_pattern") or PATTERN
    if kinds:
        pattern = "".join(CHARACTERS.get(kind, "?") for kind in kinds)
    if pattern.count("*") != 1 or set(pattern) - set(CHARACTERS.values()):
        raise ValueError(
            f"the MTP head's layers are {kinds or pattern!r}; supported are one with "
            "attention (*) and others with experts (E) or an MLP (-)"
        )
    return pattern
