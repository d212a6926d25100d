"""DeepSeek-V3, R1 and V3.1: latent attention with YaRN, group-limited routing.

Sources: transformers ``models/deepseek_v3``; head: technical report (arXiv 2412.19437,
section 2.2) with the embedding first, as in the released weights, vLLM
``deepseek_mtp.py`` and SGLang ``deepseek_nextn.py``. Unquantised, unlike the release.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from .glm4_moe import moe, nextn_ends
from .raw import Draw, Weights, common_config, under, write_raw
from .reference import NextNReference

YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,  # 1.0 in the release, where the two cancel in the rotation
}


def config() -> dict[str, Any]:
    return common_config("DeepseekV3ForCausalLM", "deepseek_v3") | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 128,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_scaling": YARN,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
    }


def layer(draw: Draw, c: Mapping[str, Any], index: int) -> Weights:
    dense = index < c["first_k_dense_replace"]
    mlp = draw.mlp(c["intermediate_size"]) if dense else moe(draw, c)
    attention = draw.latent_attention(c)
    return under("self_attn.", attention) | under("mlp.", mlp) | draw.layer_norms()


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = draw.ends()
    for i in range(c["num_hidden_layers"]):
        target |= under(f"model.layers.{i}.", layer(draw, c, i))
    index = c["num_hidden_layers"]
    head = nextn_ends(draw, target) | layer(draw, c, index)
    return write_raw(path, c, target, under(f"model.layers.{index}.", head))


class DeepseekV3Reference(NextNReference):
    def make_block(self) -> nn.Module:
        return DeepseekV3DecoderLayer(self.config, self.config.num_hidden_layers)
