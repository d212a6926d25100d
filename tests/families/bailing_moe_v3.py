"""Ling 3: Kimi Delta Attention, and latent attention with a gate per head.

Sources: transformers ``models/bailing_hybrid``, which is Ling 3 alone (target and the
layer of the block); head: vLLM ``bailing_moe_v3_mtp.py``: the layer after the last, of
latent attention and MoE, with a last norm of its own; embedding and output layer are
the target's. The release shares its model type with Ling 2.5 and has another
architecture.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridDecoderLayer,
)

from .loading import stack_experts
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import Reference

LAYERS, GROUP = 4, 4


def config() -> dict[str, Any]:
    return (
        common_config("BailingMoeV3ForCausalLM", "bailing_hybrid")
        | shared_config()
        | {
            "gated_attention_proj_granularity_type": "head_wise",
            "kda_lower_bound": -5.0,
            "kda_safe_gate": True,
            "layer_group_size": GROUP,
            "mtp_use_kda": False,
            "no_kda_lora": True,
            "num_hidden_layers": LAYERS,
            "q_lora_rank": None,
            "short_conv_kernel_size": 4,
            "use_kda_lora": False,
        }
    )


def shared_config() -> dict[str, Any]:
    """What Ling 2.5 and Ling 3 have in common."""
    return {
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "group_norm_size": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "kv_lora_rank": 64,
        "moe_intermediate_size": 64,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "qk_head_dim": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": 6000000,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "v_head_dim": 16,
    }


def delta_attention(draw: Draw, c: Mapping[str, Any]) -> Weights:
    heads = c["num_attention_heads"]
    inner, taps = heads * c["head_dim"], c["short_conv_kernel_size"]
    weights = {
        f"{name}_proj.weight": draw.linear(inner, HIDDEN, gain=1.5) for name in "qkvfg"
    }
    for name in "qkv":
        kernel = draw.rng.standard_normal((inner, 1, taps)) * 0.45
        weights[f"{name}_conv1d.weight"] = kernel.astype(np.float32)
    return weights | {
        "A_log": np.log(draw.rng.uniform(0.2, 2, heads)).astype(np.float32),
        "dt_bias": draw.vector(inner) - np.float32(1),
        "b_proj.weight": draw.linear(heads, HIDDEN),
        "o_norm.weight": draw.norm(c["head_dim"]),
        "o_proj.weight": draw.linear(HIDDEN, inner, gain=1.5),
    }


def latent_attention(draw: Draw, c: Mapping[str, Any], *, gate: bool) -> Weights:
    weights = draw.latent_attention(c)
    weights["dense.weight"] = weights.pop("o_proj.weight")
    if gate:
        weights["g_proj.weight"] = draw.linear(c["num_attention_heads"], HIDDEN, 1.5)
    return weights


def moe(draw: Draw, c: Mapping[str, Any]) -> Weights:
    count, size = c["num_experts"], c["moe_intermediate_size"]
    return {
        "gate.weight": draw.linear(count, HIDDEN, gain=2.0),
        "gate.expert_bias": draw.choice_bias(count),
        **draw.experts(count, size),
        **under("shared_experts.", draw.mlp(c["num_shared_experts"] * size)),
    }


def around(draw: Draw, c: Mapping[str, Any], attention: Weights, index: int) -> Weights:
    dense = index < c["first_k_dense_replace"]
    mlp = draw.mlp(c["intermediate_size"]) if dense else moe(draw, c)
    return under("attention.", attention) | under("mlp.", mlp) | draw.layer_norms()


def ends(draw: Draw) -> Weights:
    weights = draw.ends()
    embedding = weights.pop("model.embed_tokens.weight")
    return weights | {"model.word_embeddings.weight": embedding}


def head_ends(draw: Draw) -> Weights:
    return {
        "enorm.weight": draw.norm(HIDDEN),
        "hnorm.weight": draw.norm(HIDDEN),
        "eh_proj.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
        "final_layernorm.weight": draw.norm(HIDDEN),
    }


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = ends(draw)
    for i in range(LAYERS):
        full = (i + 1) % GROUP == 0
        attention = (
            latent_attention(draw, c, gate=True) if full else delta_attention(draw, c)
        )
        target |= under(f"model.layers.{i}.", around(draw, c, attention, i))
    attention = latent_attention(draw, c, gate=True)
    head = around(draw, c, attention, LAYERS) | head_ends(draw)
    return write_raw(path, c, target, under(f"model.layers.{LAYERS}.", head))


class BailingReference(Reference):
    """The names of Ling 2.5 and Ling 3."""

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.config.num_hidden_layers}."

    def is_head(self, key: str) -> bool:
        return key.startswith(self.prefix)

    def names(self) -> dict[str, str]:
        parts = {
            "enorm": "enorm.weight",
            "hnorm": "hnorm.weight",
            "proj": "eh_proj.weight",
            "norm": "final_layernorm.weight",
            "block": "",
        }
        return {part: self.prefix + name for part, name in parts.items()}

    def block_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return stack_experts(renamed(weights))


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Raw names of the target or of a layer -> transformers'."""
    names = {
        "model.word_embeddings.": "model.embed_tokens.",
        "attention.dense.": "attention.o_proj.",
        "attention.": "self_attn.",
        "gate.expert_bias": "gate.e_score_correction_bias",
    }
    for old, new in names.items():
        weights = {k.replace(old, new): v for k, v in weights.items()}
    return dict(weights)


class BailingMoeV3Reference(BailingReference):
    def make_block(self) -> nn.Module:
        # The last layer is of latent attention and MoE, as the head.
        return BailingHybridDecoderLayer(self.config, LAYERS - 1)
