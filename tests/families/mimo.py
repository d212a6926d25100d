"""MiMo-7B: a Qwen2 target and a head that reads the hidden state first.

Sources: ``modeling_mimo.py`` of the XiaomiMiMo/MiMo-7B release (its model derives from
Qwen2's, its head's block is a Qwen2 layer), vLLM ``mimo_mtp.py``, exllamav3 (issue 238:
the state before the final norm). transformers has no MiMo-7B; its Qwen2 is the target.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from .loading import quiet_from_pretrained
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import Reference, Toggles

PREFIX = "model.mtp_layers.0."


def config() -> dict[str, Any]:
    return common_config("MiMoForCausalLM", "mimo") | {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_window_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 640000,
        "sliding_window": 32768,
        "use_mrope": False,
        "use_sliding_window": False,
    }


def layer(draw: Draw) -> Weights:
    c = config()
    attention = draw.attention(
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        bias=True,
        qk_norm=False,
    )
    mlp = draw.mlp(c["intermediate_size"])
    return under("self_attn.", attention) | under("mlp.", mlp) | draw.layer_norms()


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = draw.ends()
    for i in range(c["num_hidden_layers"]):
        target |= under(f"model.layers.{i}.", layer(draw))
    head = layer(draw) | {
        "token_layernorm.weight": draw.norm(HIDDEN),
        "hidden_layernorm.weight": draw.norm(HIDDEN),
        "input_proj.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
        "final_layernorm.weight": draw.norm(HIDDEN),
    }
    return write_raw(path, c, target, under(PREFIX, head))


class MiMoReference(Reference):
    toggles = Toggles(hidden="pre_norm", chain="pre_norm", mask_first=True)
    hidden_first = True

    def load_target(self) -> PreTrainedModel:
        read = config() | {"model_type": "qwen2"}
        settings = Qwen2Config.from_dict(read)
        load = Qwen2ForCausalLM.from_pretrained
        return quiet_from_pretrained(load, self.path, config=settings)

    def is_head(self, key: str) -> bool:
        return key.startswith(PREFIX)

    def names(self) -> dict[str, str]:
        return {
            "enorm": f"{PREFIX}token_layernorm.weight",
            "hnorm": f"{PREFIX}hidden_layernorm.weight",
            "proj": f"{PREFIX}input_proj.weight",
            "norm": f"{PREFIX}final_layernorm.weight",
            "block": PREFIX,
        }

    def make_block(self) -> nn.Module:
        return Qwen2DecoderLayer(self.config, 0)
