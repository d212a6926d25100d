"""Qwen3-Next: Gated DeltaNet and gated attention, experts one by one.

Sources: transformers ``models/qwen3_next`` (target and the layer of the block); head:
vLLM ``qwen3_next_mtp.py`` and SGLang ``qwen3_next_mtp.py``: one full-attention MoE
layer. Norm weights are stored as w of 1 + w, but for the DeltaNet's gated norm. The
config does not say that there is a head.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import FcReference

SIZES: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "full_attention_interval": 4,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 64,
}


def config() -> dict[str, Any]:
    return (
        common_config("Qwen3NextForCausalLM", "qwen3_next")
        | SIZES
        | {
            "decoder_sparse_step": 1,
            "intermediate_size": 128,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
            "rope_scaling": None,
            "rope_theta": 10000000,
        }
    )


def attention(draw: Draw, c: Mapping[str, Any]) -> Weights:
    """q_proj holds query and output gate, head by head."""
    heads, head_dim = c["num_attention_heads"], c["head_dim"]
    weights = draw.attention(
        heads, c["num_key_value_heads"], head_dim, bias=False, qk_norm=True
    )
    return weights | {
        "q_proj.weight": draw.linear(2 * heads * head_dim, HIDDEN, gain=1.5)
    }


def delta_net_sizes(c: Mapping[str, Any]) -> tuple[int, int, int]:
    """All keys', all values' channels, and the number of value heads."""
    heads = c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    return keys, heads * c["linear_value_head_dim"], heads


def delta_net(draw: Draw, c: Mapping[str, Any]) -> Weights:
    """All but the input projections, whose layout differs between the families."""
    keys, values, heads = delta_net_sizes(c)
    kernel = draw.rng.standard_normal((2 * keys + values, 1, 4)) * 0.45
    return {
        "conv1d.weight": kernel.astype(np.float32),
        "dt_bias": 1 + draw.vector(heads),
        "A_log": np.log(draw.rng.uniform(0.2, 2, heads)).astype(np.float32),
        "norm.weight": draw.norm(c["linear_value_head_dim"], centre=1.0),
        "out_proj.weight": draw.linear(HIDDEN, values, gain=1.5),
    }


def fused_inputs(draw: Draw, c: Mapping[str, Any]) -> Weights:
    keys, values, heads = delta_net_sizes(c)
    return {
        "in_proj_qkvz.weight": draw.linear(2 * keys + 2 * values, HIDDEN, gain=1.5),
        "in_proj_ba.weight": draw.linear(2 * heads, HIDDEN),
    }


def moe(draw: Draw, c: Mapping[str, Any]) -> Weights:
    count, size = c["num_experts"], c["moe_intermediate_size"]
    shared = draw.mlp(c["shared_expert_intermediate_size"])
    return {
        "gate.weight": draw.linear(count, HIDDEN, gain=1.5),
        "shared_expert_gate.weight": draw.linear(1, HIDDEN),
        **under("shared_expert.", shared),
        **draw.experts(count, size),
    }


def is_full(c: Mapping[str, Any], index: int) -> bool:
    return (index + 1) % c["full_attention_interval"] == 0


def layer(draw: Draw, c: Mapping[str, Any], *, full: bool) -> Weights:
    if full:
        mixer = under("self_attn.", attention(draw, c))
    else:
        mixer = under("linear_attn.", fused_inputs(draw, c) | delta_net(draw, c))
    return mixer | under("mlp.", moe(draw, c)) | draw.layer_norms()


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed, centre=0.0)
    target = draw.ends()
    for i in range(c["num_hidden_layers"]):
        target |= under(f"model.layers.{i}.", layer(draw, c, full=is_full(c, i)))
    head = draw.fc_ends() | under("layers.0.", layer(draw, c, full=True))
    return write_raw(path, c, target, under("mtp.", head))


class Qwen3NextReference(FcReference):
    zero_centred = True

    def make_block(self) -> nn.Module:
        # The last layer has full attention, as the head.
        return Qwen3NextDecoderLayer(self.config, self.config.num_hidden_layers - 1)
