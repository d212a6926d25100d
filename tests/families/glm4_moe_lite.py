"""GLM-4.7-Flash: latent attention, and a head with an embedding and output of its own.

Sources: transformers ``models/glm4_moe_lite``; head: vLLM ``glm4_moe_lite_mtp.py``.
transformers puts the target's embedding and output layer in the place of the head's,
which is right only where the two are equal; here they differ.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import (
    Glm4MoeLiteDecoderLayer,
)

from .deepseek_v3 import layer
from .glm4_moe import nextn_ends
from .raw import Draw, common_config, under, write_raw
from .reference import NextNReference


def config() -> dict[str, Any]:
    return common_config("Glm4MoeLiteForCausalLM", "glm4_moe_lite") | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
    }


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = draw.ends()
    for i in range(c["num_hidden_layers"]):
        target |= under(f"model.layers.{i}.", layer(draw, c, i))
    index = c["num_hidden_layers"]
    head = nextn_ends(draw, draw.ends()) | layer(draw, c, index)
    return write_raw(path, c, target, under(f"model.layers.{index}.", head))


class Glm4MoeLiteReference(NextNReference):
    def make_block(self) -> nn.Module:
        # The lists per layer end at the target's last layer, a MoE layer like the head.
        return Glm4MoeLiteDecoderLayer(self.config, self.config.num_hidden_layers - 1)
