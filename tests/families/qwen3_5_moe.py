"""Qwen3.5-MoE and 3.6-MoE: fused experts in the target, fused or single in the head.

Sources: transformers ``models/qwen3_5_moe`` (target and the layer of the block); head:
vLLM ``qwen3_5_mtp.py``. The text model is nested under ``text_config`` and
``model.language_model.``; the released heads come with ``experts.gate_up_proj`` or with
one set of tensors per expert.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
)

from .qwen3_next import (
    SIZES,
    attention,
    delta_net,
    delta_net_sizes,
    is_full,
    moe,
)
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import FcReference


def config() -> dict[str, Any]:
    names = common_config("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text")
    architectures = names.pop("architectures")
    kinds = {True: "full_attention", False: "linear_attention"}
    text = (
        names
        | SIZES
        | {
            "layer_types": [kinds[is_full(SIZES, i)] for i in range(4)],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
        }
    )
    return {
        "architectures": architectures,
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def separate_inputs(draw: Draw, c: Mapping[str, Any]) -> Weights:
    keys, values, heads = delta_net_sizes(c)
    sizes = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return {
        f"in_proj_{name}.weight": draw.linear(size, HIDDEN, gain=1.5)
        for name, size in sizes.items()
    }


def fuse(weights: Weights, count: int) -> Weights:
    """One set of tensors per expert -> ``gate_up_proj`` [E, 2I, H], ``down_proj``."""
    weights = dict(weights)

    def take(name: str) -> np.ndarray:
        keys = [f"experts.{i}.{name}_proj.weight" for i in range(count)]
        return np.stack([weights.pop(key) for key in keys])

    gate_up = np.concatenate([take("gate"), take("up")], axis=1)
    return weights | {
        "experts.gate_up_proj": gate_up,
        "experts.down_proj": take("down"),
    }


def layer(draw: Draw, c: Mapping[str, Any], *, full: bool, fused: bool) -> Weights:
    if full:
        mixer = under("self_attn.", attention(draw, c))
    else:
        mixer = under("linear_attn.", separate_inputs(draw, c) | delta_net(draw, c))
    mlp = moe(draw, c)
    mlp = fuse(mlp, c["num_experts"]) if fused else mlp
    return mixer | under("mlp.", mlp) | draw.layer_norms()


def write(path: str | Path, seed: int = 0, *, fused_head: bool = True) -> Path:
    settings, draw = config(), Draw(seed, centre=0.0)
    c, body = settings["text_config"], "model.language_model."
    target = draw.ends(body)
    for i in range(c["num_hidden_layers"]):
        weights = layer(draw, c, full=is_full(c, i), fused=True)
        target |= under(f"{body}layers.{i}.", weights)
    weights = layer(draw, c, full=True, fused=fused_head)
    head = draw.fc_ends() | under("layers.0.", weights)
    return write_raw(path, settings, target, under("mtp.", head))


class Qwen35MoeReference(FcReference):
    zero_centred = True

    def make_block(self) -> nn.Module:
        # The last layer has full attention, as the head.
        return Qwen3_5MoeDecoderLayer(self.config, self.config.num_hidden_layers - 1)
