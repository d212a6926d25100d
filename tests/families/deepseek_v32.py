"""DeepSeek-V3.2: V3 with an indexer in every layer, in the head one of its own.

Sources: transformers ``models/deepseek_v32`` (without the Hadamard rotation and the
8-bit scores of the release, which do not change the selection but for rounding); head
as in ``deepseek_v3``. ``index_topk`` is far below the length of the tests' sequences.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32DecoderLayer,
)

from . import deepseek_v3
from .glm4_moe import nextn_ends
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import NextNReference


def config() -> dict[str, Any]:
    names = common_config("DeepseekV32ForCausalLM", "deepseek_v32")
    # Many heads: where all scores of a key are cut off at zero, keys are tied.
    indexer = {"index_head_dim": 32, "index_n_heads": 16, "index_topk": 8}
    return deepseek_v3.config() | names | {"max_position_embeddings": 256} | indexer


def indexer(draw: Draw, c: Mapping[str, Any]) -> Weights:
    heads, size = c["index_n_heads"], c["index_head_dim"]
    return {
        "wq_b.weight": draw.linear(heads * size, c["q_lora_rank"], gain=2.0),
        "wk.weight": draw.linear(size, HIDDEN, gain=4.0),
        "k_norm.weight": draw.norm(size),
        "k_norm.bias": draw.vector(size),
        "weights_proj.weight": draw.linear(heads, HIDDEN, gain=2.0),
    }


def layer(draw: Draw, c: Mapping[str, Any], index: int) -> Weights:
    extra = under("self_attn.indexer.", indexer(draw, c))
    return deepseek_v3.layer(draw, c, index) | extra


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = draw.ends()
    for i in range(c["num_hidden_layers"]):
        target |= under(f"model.layers.{i}.", layer(draw, c, i))
    index = c["num_hidden_layers"]
    head = nextn_ends(draw, target) | layer(draw, c, index)
    return write_raw(path, c, target, under(f"model.layers.{index}.", head))


class DeepseekV32Reference(NextNReference):
    def make_block(self) -> nn.Module:
        # The lists per layer end at the target's last layer, a MoE layer like the head.
        return DeepseekV32DecoderLayer(self.config, self.config.num_hidden_layers - 1)
