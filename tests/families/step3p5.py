"""Step-3.5-Flash: gated attention, clamped experts, and three chained modules.

Sources: transformers ``models/step3p7`` (its text model is Step-3.5's; target and the
layer of the block); head: vLLM ``step3p5_mtp.py``, SGLang pull request 18564, llama.cpp
pull requests 23274 and 24340: module m reads the state of module m - 1, both before a
norm, and has an output layer of its own. The lists per layer have an entry for every
module too. Names: the release's index, where ``transformer.`` stands before
``shared_head`` alone. Norm weights are stored as w of 1 + w.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7DecoderLayer,
    Step3p7TextModel,
)

from .loading import read_raw
from .modules import ModulesReference
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import Toggles, causal_mask

LAYERS, MODULES = 3, 3
FULL, SLIDING = "full_attention", "sliding_attention"


def config() -> dict[str, Any]:
    """The modules are of both kinds here; those of the release are all sliding."""
    kinds = [FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING]
    full = [kind == FULL for kind in kinds]
    return common_config("Step3p5ForCausalLM", "step3p5") | {
        "att_impl_type": "GQA",
        "attention_other_setting": {
            "attention_type": SLIDING,
            "head_dim": 16,
            "num_attention_groups": 2,
            "num_attention_heads": 6,
            "true_head_dim": 16,
        },
        "head_dim": 16,
        "intermediate_size": 128,
        "layer_types": kinds,
        "max_position_embeddings": 256,
        "max_seq_len": 256,
        "moe_every_n_layer": 1,
        "moe_intermediate_size": 64,
        "moe_layer_offset": 0,
        "moe_layers_enum": "1,2",
        "moe_num_experts": 8,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
        "moe_top_k": 3,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "num_attention_groups": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": MODULES,
        "partial_rotary_factors": [0.5 if one else 1.0 for one in full],
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 2.0,
            "high_freq_factor": 32.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 128,
            "rope_type": "llama3",
        },
        "rope_theta": [5000000.0 if one else 10000.0 for one in full],
        "share_expert_dim": 64,
        "sink": False,
        "sliding_window": 8,
        "swiglu_limits": [0.0, 0.0, 0.7, 0.0, 0.0, 0.0],
        "swiglu_limits_shared": [0.0, 0.0, 0.9, 0.0, 0.0, 0.8],
        "use_head_wise_attn_gate": True,
        "use_mfa": False,
        "use_moe": True,
        "use_moe_router_bias": True,
        "use_qk_norm": True,
        "use_rope_layers": [],
        "yarn_only_types": [FULL],
        "zero_centered": True,
    }


def layer(draw: Draw, c: Mapping[str, Any], index: int) -> Weights:
    sliding = c["layer_types"][index] == SLIDING
    sizes = c["attention_other_setting"] if sliding else c
    heads, groups = sizes["num_attention_heads"], sizes["num_attention_groups"]
    attention = draw.attention(heads, groups, c["head_dim"], qk_norm=True)
    attention["g_proj.weight"] = draw.linear(heads, HIDDEN, gain=1.5)
    mlp = under("mlp.", draw.mlp(c["intermediate_size"]))
    if str(index) in c["moe_layers_enum"].split(","):
        mlp = moe(draw, c)
    return under("self_attn.", attention) | mlp | draw.layer_norms()


def moe(draw: Draw, c: Mapping[str, Any]) -> Weights:
    """The experts' tensors are stacked, in three."""
    count, size = c["moe_num_experts"], c["moe_intermediate_size"]

    def stack(rows: int, columns: int, gain: float = 1.0) -> Any:
        return draw.linear(count * rows, columns, gain).reshape(count, rows, columns)

    return {
        "moe.gate.weight": draw.linear(count, HIDDEN, gain=2.0),
        "moe.router_bias": draw.choice_bias(count),
        "moe.gate_proj.weight": stack(size, HIDDEN),
        "moe.up_proj.weight": stack(size, HIDDEN),
        "moe.down_proj.weight": stack(HIDDEN, size, gain=2.0),
        **under("share_expert.", draw.mlp(c["share_expert_dim"])),
    }


def module(draw: Draw, c: Mapping[str, Any], index: int) -> Weights:
    return layer(draw, c, index) | {
        "enorm.weight": draw.norm(HIDDEN),
        "hnorm.weight": draw.norm(HIDDEN),
        "eh_proj.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
        "transformer.shared_head.norm.weight": draw.norm(HIDDEN),
        "transformer.shared_head.output.weight": draw.output(),
    }


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed, centre=0.0)
    target, head = draw.ends(), {}
    for i in range(LAYERS):
        target |= under(f"model.layers.{i}.", layer(draw, c, i))
    for i in range(LAYERS, LAYERS + MODULES):
        head |= under(f"model.layers.{i}.", module(draw, c, i))
    return write_raw(path, c, target, head)


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Raw names of the target or of a layer -> transformers'."""
    names = {
        "moe.gate.weight": "mlp.gate.weight",
        "moe.router_bias": "mlp.gate.e_score_correction_bias",
        "moe.down_proj.weight": "mlp.experts.down_proj",
        "share_expert.": "mlp.shared_experts.",
    }
    out = {}
    for key, value in weights.items():
        if key.endswith("moe.gate_proj.weight"):
            up = weights[key.replace("gate_proj", "up_proj")]
            key = key.replace("moe.gate_proj.weight", "mlp.experts.gate_up_proj")
            value = torch.cat([value, up], dim=1)
        elif key.endswith("moe.up_proj.weight"):
            continue
        for old, new in names.items():
            key = key.replace(old, new)
        out[key] = value
    return out


class CausalLM(nn.Module):
    """The text model with an output layer; transformers has it with images alone."""

    def __init__(self, settings: Step3p7TextConfig):
        super().__init__()
        self.config = settings
        self.model = Step3p7TextModel(settings)
        self.lm_head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)

    def get_decoder(self) -> nn.Module:
        return self.model


class Step3p5Reference(ModulesReference):
    toggles = Toggles(hidden="pre_norm", chain="pre_norm")
    zero_centred = True
    chained = True
    num_modules = MODULES

    def load_target(self) -> CausalLM:
        read = json.loads((self.path / "config.json").read_text())
        model = CausalLM(torch_config(read)).to(torch.float32)
        raw = read_raw(self.path).items()
        model.load_state_dict(renamed({k: v for k, v in raw if not self.is_head(k)}))
        # The modules are the layers that follow.
        self.padded = torch_config(
            read
            | {
                "num_hidden_layers": LAYERS + MODULES,
                "num_nextn_predict_layers": 0,
            }
        )
        return model.eval()

    @property
    def index(self) -> int:
        return LAYERS + self.module

    def prefix(self, module: int) -> str:
        return f"model.layers.{LAYERS + module}."

    def names(self) -> dict[str, str]:
        parts = {
            "enorm": "enorm.weight",
            "hnorm": "hnorm.weight",
            "proj": "eh_proj.weight",
            "norm": "transformer.shared_head.norm.weight",
            "output": "transformer.shared_head.output.weight",
            "block": "",
        }
        prefix = self.prefix(self.module)
        return {part: prefix + name for part, name in parts.items()}

    def make_block(self) -> nn.Module:
        return Step3p7DecoderLayer(self.padded, self.index)

    def block_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return renamed(weights)

    @property
    def kind(self) -> str:
        return self.padded.layer_types[self.index]

    def mask(self, length: int) -> Tensor:
        window = self.padded.sliding_window if self.kind == SLIDING else None
        return causal_mask(length, window)

    def rotary(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder.rotary_emb(x, at, self.kind)


def torch_config(read: Mapping[str, Any]) -> Step3p7TextConfig:
    return Step3p7TextConfig(**dict(read), attn_implementation="eager")
