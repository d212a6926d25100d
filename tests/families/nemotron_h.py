"""Nemotron-H: Mamba2, attention and MoE as layers of their own; a head of two of them.

Sources: transformers ``models/nemotron_h`` (target and the layers of the block); head:
vLLM ``nemotron_h_mtp.py`` and Megatron-Bridge: an attention layer, which holds the
projection and its norms, and a MoE layer, which holds the last norm; output layer and
embedding are the target's. Nothing has rotary positions. The two variants: a config
with patterns, as older releases, and experts in a latent space with lists, as newer.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import Reference

PATTERN, HEAD_PATTERN = "MEM*-E", "*E"
KINDS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


def config(*, latent: int | None) -> dict[str, Any]:
    if latent is None:
        layout: dict[str, Any] = {
            "hybrid_override_pattern": PATTERN,
            "mtp_hybrid_override_pattern": HEAD_PATTERN,
        }
    else:
        layout = {
            "layers_block_type": [KINDS[one] for one in PATTERN],
            "mtp_layers_block_type": [KINDS[one] for one in HEAD_PATTERN],
            "moe_latent_size": latent,
        }
    return (
        common_config("NemotronHForCausalLM", "nemotron_h")
        | layout
        | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "chunk_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": 16,
            "hidden_dropout": 0.0,
            "intermediate_size": 128,
            "layer_norm_epsilon": 1e-5,
            "mamba_head_dim": 16,
            "mamba_hidden_act": "silu",
            "mamba_num_heads": 4,
            "mamba_proj_bias": False,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 128,
            "n_group": 1,
            "n_groups": 2,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_experts_per_tok": 3,
            "num_hidden_layers": len(PATTERN),
            "num_key_value_heads": 2,
            "num_nextn_predict_layers": 1,
            "residual_in_fp32": False,
            "routed_scaling_factor": 2.5,
            "ssm_state_size": 32,
            "time_step_max": 0.1,
            "time_step_min": 0.001,
            "topk_group": 1,
            "use_bias": False,
            "use_conv_bias": True,
        }
    )


def mamba(draw: Draw, c: Mapping[str, Any]) -> Weights:
    heads = c["mamba_num_heads"]
    inner = heads * c["mamba_head_dim"]
    channels = inner + 2 * c["n_groups"] * c["ssm_state_size"]
    kernel = draw.rng.standard_normal((channels, 1, c["conv_kernel"])) * 0.45
    return {
        "in_proj.weight": draw.linear(inner + channels + heads, HIDDEN, gain=1.5),
        "conv1d.weight": kernel.astype(np.float32),
        "conv1d.bias": draw.vector(channels),
        "A_log": np.log(draw.rng.uniform(0.2, 2, heads)).astype(np.float32),
        "D": draw.norm(heads),
        "dt_bias": draw.vector(heads) - np.float32(1),
        "norm.weight": draw.norm(inner),
        "out_proj.weight": draw.linear(HIDDEN, inner, gain=1.5),
    }


def mlp(draw: Draw, size: int, hidden: int = HIDDEN) -> Weights:
    """Of squared ReLUs, without a gate."""
    return {
        "up_proj.weight": draw.linear(size, hidden),
        "down_proj.weight": draw.linear(hidden, size, gain=2.0),
    }


def moe(draw: Draw, c: Mapping[str, Any]) -> Weights:
    count, latent = c["n_routed_experts"], c.get("moe_latent_size")
    shared = mlp(draw, c["moe_shared_expert_intermediate_size"])
    weights = {
        "gate.weight": draw.linear(count, HIDDEN, gain=2.0),
        "gate.e_score_correction_bias": draw.choice_bias(count),
        **under("shared_experts.", shared),
    }
    for i in range(count):
        expert = mlp(draw, c["moe_intermediate_size"], latent or HIDDEN)
        weights |= under(f"experts.{i}.", expert)
    if latent:
        weights |= {
            "fc1_latent_proj.weight": draw.linear(latent, HIDDEN),
            "fc2_latent_proj.weight": draw.linear(HIDDEN, latent),
        }
    return weights


def layer(draw: Draw, c: Mapping[str, Any], kind: str) -> Weights:
    if kind == "M":
        mixer = mamba(draw, c)
    elif kind == "*":
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        mixer = draw.attention(heads, kv_heads, c["head_dim"])
    elif kind == "-":
        mixer = mlp(draw, c["intermediate_size"])
    else:
        mixer = moe(draw, c)
    return under("mixer.", mixer) | {"norm.weight": draw.norm(HIDDEN)}


def write(path: str | Path, seed: int = 0, *, latent: int | None = None) -> Path:
    c, draw = config(latent=latent), Draw(seed)
    target = {
        "backbone.embeddings.weight": draw.embedding(),
        "backbone.norm_f.weight": draw.norm(HIDDEN),
        "lm_head.weight": draw.output(),
    }
    for i, kind in enumerate(PATTERN):
        target |= under(f"backbone.layers.{i}.", layer(draw, c, kind))
    head = {
        "0.enorm.weight": draw.norm(HIDDEN),
        "0.hnorm.weight": draw.norm(HIDDEN),
        "0.eh_proj.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
        "1.final_layernorm.weight": draw.norm(HIDDEN),
    }
    for i, kind in enumerate(HEAD_PATTERN):
        head |= under(f"{i}.", layer(draw, c, kind))
    return write_raw(path, c, target, under("mtp.layers.", head))


class Layers(nn.ModuleList):
    """One after the other; the mask is for attention alone."""

    def forward(self, x: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        for one in self:
            attends = one.block_type == "full_attention"
            x = one(x, attention_mask=attention_mask if attends else None)
        return x


class NemotronHReference(Reference):
    @property
    def eps(self) -> float:
        return self.config.layer_norm_epsilon

    @property
    def main_norm(self) -> nn.Module:
        return self.decoder.norm_f

    def is_head(self, key: str) -> bool:
        return key.startswith("mtp.")

    def names(self) -> dict[str, str]:
        return {
            "enorm": "mtp.layers.0.enorm.weight",
            "hnorm": "mtp.layers.0.hnorm.weight",
            "proj": "mtp.layers.0.eh_proj.weight",
            "norm": "mtp.layers.1.final_layernorm.weight",
            "block": "mtp.layers.",
        }

    def make_block(self) -> nn.Module:
        settings = copy.deepcopy(self.config)
        settings.layers_block_type = settings.mtp_layers_block_type
        count = len(settings.layers_block_type)
        return Layers(NemotronHBlock(settings, i) for i in range(count))

    def block_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stacks the experts."""
        state = {k: v for k, v in weights.items() if ".experts." not in k}
        for name in ("up_proj", "down_proj"):
            each = [
                weights[f"1.mixer.experts.{i}.{name}.weight"]
                for i in range(self.config.n_routed_experts)
            ]
            state[f"1.mixer.experts.{name}"] = torch.stack(each)
        return state

    def rotary(self, x: Tensor, at: Tensor) -> None:
        return None
