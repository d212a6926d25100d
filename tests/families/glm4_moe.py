"""GLM-4.5, 4.6 and 4.7: 355B (q/k norms) and Air (without).

Sources: transformers ``models/glm4_moe``; head as in its ``MtpModel``, vLLM
``glm4_moe_mtp.py`` and SGLang ``glm4_moe_nextn.py``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import NextNReference


def config(*, use_qk_norm: bool) -> dict[str, Any]:
    return common_config("Glm4MoeForCausalLM", "glm4_moe") | {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "use_qk_norm": use_qk_norm,
    }


def moe(draw: Draw, c: Mapping[str, Any]) -> Weights:
    """Router with a bias for the choice alone, routed and shared experts."""
    count, size = c["n_routed_experts"], c["moe_intermediate_size"]
    return {
        "gate.weight": draw.linear(count, HIDDEN, gain=2.0),
        "gate.e_score_correction_bias": draw.choice_bias(count),
        **draw.experts(count, size),
        **under("shared_experts.", draw.mlp(c["n_shared_experts"] * size)),
    }


def layer(draw: Draw, c: Mapping[str, Any], index: int) -> Weights:
    dense = index < c["first_k_dense_replace"]
    attention = draw.attention(
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        bias=c["attention_bias"],
        qk_norm=c["use_qk_norm"],
    )
    mlp = draw.mlp(c["intermediate_size"]) if dense else moe(draw, c)
    return under("self_attn.", attention) | under("mlp.", mlp) | draw.layer_norms()


def nextn_ends(draw: Draw, target: Weights) -> Weights:
    """The head around its block; embedding and output layer are the target's."""
    return {
        "enorm.weight": draw.norm(HIDDEN),
        "hnorm.weight": draw.norm(HIDDEN),
        "eh_proj.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
        "shared_head.norm.weight": draw.norm(HIDDEN),
        "shared_head.head.weight": target["lm_head.weight"],
        "embed_tokens.weight": target["model.embed_tokens.weight"],
    }


def write(path: str | Path, seed: int = 0, *, use_qk_norm: bool = True) -> Path:
    c, draw = config(use_qk_norm=use_qk_norm), Draw(seed)
    target = draw.ends()
    for i in range(c["num_hidden_layers"]):
        target |= under(f"model.layers.{i}.", layer(draw, c, i))
    index = c["num_hidden_layers"]
    head = nextn_ends(draw, target) | layer(draw, c, index)
    return write_raw(path, c, target, under(f"model.layers.{index}.", head))


class Glm4MoeReference(NextNReference):
    def make_block(self) -> nn.Module:
        return Glm4MoeDecoderLayer(self.config, self.config.num_hidden_layers)
