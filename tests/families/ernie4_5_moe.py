"""ERNIE-4.5-MoE: a dense head that ends in the target's final norm; tied embeddings.

Sources: transformers ``models/ernie4_5_moe`` (target and the dense layer of the block);
head: PaddleFormers (the training code), which chains the state before the norm and puts
the target's norm before the output layer. FastDeploy ``ernie4_5_mtp.py`` has that norm
too and hands on its output; vLLM and SGLang have no norm there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import (
    Ernie4_5_MoeDecoderLayer,
)

from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import Reference, Toggles

BLOCK = "model.mtp_block.0."


def config() -> dict[str, Any]:
    return common_config("Ernie4_5_MoeForCausalLM", "ernie4_5_moe") | {
        "head_dim": 16,
        "intermediate_size": 128,
        "moe_capacity": [8, 8, 8],
        "moe_gate": "topk",
        "moe_intermediate_size": 64,
        "moe_k": 3,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    }


def layer(draw: Draw, c: Mapping[str, Any], *, dense: bool, bias_std: float) -> Weights:
    attention = draw.attention(
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        bias=False,
        qk_norm=False,
    )
    count, size = c["moe_num_experts"], c["moe_intermediate_size"]
    if dense:
        mlp = draw.mlp(c["intermediate_size"])
    else:
        bias = draw.vector(count, std=bias_std)
        mlp = {
            "gate.weight": draw.linear(count, HIDDEN, gain=1.5),
            "moe_statics.e_score_correction_bias": bias[None],
            **draw.experts(count, size),
            **under("shared_experts.", draw.mlp(c["moe_num_shared_experts"] * size)),
        }
    return under("self_attn.", attention) | under("mlp.", mlp) | draw.layer_norms()


def write(path: str | Path, seed: int = 0, *, bias_std: float = 0.1) -> Path:
    """``bias_std`` is that of the experts' bias, which mlx_lm drops."""
    c, draw = config(), Draw(seed)
    target: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": draw.output(),
        "model.norm.weight": draw.norm(HIDDEN),
    }
    for i in range(c["num_hidden_layers"]):
        dense = i < c["moe_layer_start_index"]
        weights = layer(draw, c, dense=dense, bias_std=bias_std)
        target |= under(f"model.layers.{i}.", weights)
    head = under(BLOCK, layer(draw, c, dense=True, bias_std=0.0)) | {
        "model.mtp_emb_norm.0.weight": draw.norm(HIDDEN),
        "model.mtp_hidden_norm.0.weight": draw.norm(HIDDEN),
        "model.mtp_linear_proj.0.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
    }
    return write_raw(path, c, target, head)


class Ernie45MoeReference(Reference):
    toggles = Toggles(
        hidden="pre_norm", chain="pre_norm", final_norm="main", mask_first=True
    )

    def is_head(self, key: str) -> bool:
        return key.startswith("model.mtp_")

    def names(self) -> dict[str, str]:
        return {
            "enorm": "model.mtp_emb_norm.0.weight",
            "hnorm": "model.mtp_hidden_norm.0.weight",
            "proj": "model.mtp_linear_proj.0.weight",
            "block": BLOCK,
        }

    def make_block(self) -> nn.Module:
        return Ernie4_5_MoeDecoderLayer(self.config, 0)  # layer 0 is dense
