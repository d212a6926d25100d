"""MiMo-V2-Flash: sliding layers with attention sinks, and a head of three modules.

Sources: transformers ``models/mimo_v2_flash`` (target and the layer of the block);
head: the report (arXiv 2601.02780, section 2.3.2): every module reads the *target's*
state, and the token m + 1 further on; one dense sliding layer and a last norm each,
embedding and output layer shared. SGLang ``mimo_v2_flash_nextn.py`` has the names.
The config does not count the modules.

The window is ``sliding_window_size`` keys, the query's own among them, as mlx_lm and
the released modelling file have it; transformers, after SGLang, sees one key more.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM, PreTrainedModel
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
    MiMoV2FlashDecoderLayer,
)

from .loading import quiet_from_pretrained, stack_experts
from .modules import ModulesReference
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import causal_mask

MODULES = 3
KINDS = ("full_attention", "sliding_attention")  # by the entry of hybrid_layer_pattern


def config() -> dict[str, Any]:
    return common_config("MiMoV2FlashForCausalLM", "mimo_v2_flash") | {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_bias": False,
        "attention_chunk_size": 8,
        "attention_dropout": 0.0,
        "attention_value_scale": 0.707,
        "head_dim": 24,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "intermediate_size": 128,
        "layernorm_epsilon": 1e-5,
        "moe_intermediate_size": 64,
        "moe_layer_freq": [0, 1, 1, 1],
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": None,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 8,
        "sliding_window_size": 8,
        "swa_head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 16,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 16,
    }


def layer(draw: Draw, c: Mapping[str, Any], *, sliding: bool, dense: bool) -> Weights:
    swa = "swa_" if sliding else ""
    heads = c[f"{swa}num_attention_heads"]
    attention = draw.attention(
        heads,
        c[f"{swa}num_key_value_heads"],
        c[f"{swa}head_dim"],
        value_dim=c[f"{swa}v_head_dim"],
    )
    if sliding:
        attention["attention_sink_bias"] = draw.vector(heads, std=1.0)
    count = c["n_routed_experts"]
    if dense:
        mlp = draw.mlp(c["intermediate_size"])
    else:
        mlp = {
            "gate.weight": draw.linear(count, HIDDEN, gain=2.0),
            "gate.e_score_correction_bias": draw.choice_bias(count),
            **draw.experts(count, c["moe_intermediate_size"]),
        }
    return under("self_attn.", attention) | under("mlp.", mlp) | draw.layer_norms()


def module(draw: Draw, c: Mapping[str, Any]) -> Weights:
    weights = layer(draw, c, sliding=True, dense=True) | {
        "enorm.weight": draw.norm(HIDDEN),
        "hnorm.weight": draw.norm(HIDDEN),
        "eh_proj.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
        "final_layernorm.weight": draw.norm(HIDDEN),
    }
    norm = weights.pop("post_attention_layernorm.weight")
    return weights | {"pre_mlp_layernorm.weight": norm}


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = draw.ends()
    kinds = zip(c["hybrid_layer_pattern"], c["moe_layer_freq"], strict=True)
    for i, (sliding, sparse) in enumerate(kinds):
        weights = layer(draw, c, sliding=bool(sliding), dense=not sparse)
        target |= under(f"model.layers.{i}.", weights)
    head: Weights = {}
    for m in range(MODULES):
        head |= under(f"model.mtp.layers.{m}.", module(draw, c))
    return write_raw(path, c, target, head)


def torch_config(read: Mapping[str, Any]) -> MiMoV2FlashConfig:
    """transformers takes what it does not read in the config to be as released."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    rotary = {
        KINDS[0]: rope | {"rope_theta": read["rope_theta"]},
        KINDS[1]: rope | {"rope_theta": read["swa_rope_theta"]},
    }
    made = MiMoV2FlashConfig.from_dict(
        dict(read)
        | {
            "layer_types": [KINDS[i] for i in read["hybrid_layer_pattern"]],
            "mlp_layer_types": [("dense", "sparse")[i] for i in read["moe_layer_freq"]],
            "rms_norm_eps": read["layernorm_epsilon"],
            "rope_parameters": rotary,
        }
    )
    made.sliding_window = read["sliding_window_size"]
    return made


class MiMoV2FlashReference(ModulesReference):
    chained = False
    num_modules = MODULES

    def load_target(self) -> PreTrainedModel:
        settings = torch_config(json.loads((self.path / "config.json").read_text()))
        load = MiMoV2FlashForCausalLM.from_pretrained
        return quiet_from_pretrained(load, self.path, config=settings)

    def prefix(self, module: int) -> str:
        return f"model.mtp.layers.{module}."

    def names(self) -> dict[str, str]:
        parts = {
            "enorm": "enorm.weight",
            "hnorm": "hnorm.weight",
            "proj": "eh_proj.weight",
            "norm": "final_layernorm.weight",
            "block": "",
        }
        prefix = self.prefix(self.module)
        return {part: prefix + name for part, name in parts.items()}

    def make_block(self) -> nn.Module:
        dense = copy.deepcopy(self.config)
        dense.mlp_layer_types = ["dense"] * dense.num_hidden_layers
        return MiMoV2FlashDecoderLayer(dense, dense.layer_types.index(KINDS[1]))

    def block_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attn.attention_sink_bias": "self_attn.sinks",
        }
        for old, new in renamed.items():
            weights = {k.replace(old, new): v for k, v in weights.items()}
        return stack_experts(weights)

    def mask(self, length: int) -> Tensor:
        return causal_mask(length, self.config.sliding_window)

    def rotary(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder.rotary_emb(x, at, KINDS[1])
