"""GLM-5: DeepSeek-V3.2's form; the indexer's rotation is interleaved, no YaRN.

Sources: transformers ``models/glm_moe_dsa``; head: vLLM ``deepseek_mtp.py``. Every
layer has an indexer of its own here, as in GLM-5 and unlike GLM-5.2.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer

from . import deepseek_v32
from .glm4_moe import nextn_ends
from .raw import Draw, common_config, under, write_raw
from .reference import NextNReference


def config() -> dict[str, Any]:
    base = deepseek_v32.config()
    del base["rope_scaling"], base["rope_theta"]
    return (
        base
        | common_config("GlmMoeDsaForCausalLM", "glm_moe_dsa")
        | {
            "indexer_rope_interleave": True,
            "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
        }
    )


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = draw.ends()
    for i in range(c["num_hidden_layers"]):
        target |= under(f"model.layers.{i}.", deepseek_v32.layer(draw, c, i))
    index = c["num_hidden_layers"]
    head = nextn_ends(draw, target) | deepseek_v32.layer(draw, c, index)
    return write_raw(path, c, target, under(f"model.layers.{index}.", head))


class GlmMoeDsaReference(NextNReference):
    def make_block(self) -> nn.Module:
        # The lists per layer end at the target's last layer, a MoE layer like the head.
        return GlmMoeDsaDecoderLayer(self.config, self.config.num_hidden_layers - 1)

    def run_block(self, x: Tensor) -> Tensor:
        hidden, _ = super().run_block(x)
        return hidden
