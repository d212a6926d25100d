"""K-EXAONE: sliding layers with rotary positions, full ones without; a dense head.

Sources: transformers ``models/exaone_moe`` (target and the layer of the block); head:
vLLM ``exaone_moe_mtp.py``: Qwen's names, norms with plain weights, and the layer's type
from ``mtp_layer_types``, sliding where the config has none. A full layer of the head
has no rotary positions, as in the target: so vLLM, SGLang ``exaone_moe.py`` and
Megatron-Bridge ``exaone_moe_provider.py``; some versions of vLLM rotate in it too.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.models.exaone_moe.modeling_exaone_moe import ExaoneMoeDecoderLayer

from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import FcReference, causal_mask


def config(*, head_type: str | None) -> dict[str, Any]:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    extra = {}
    if head_type is not None:
        window = 8 if head_type == "sliding_attention" else 0
        extra = {"mtp_layer_types": [head_type], "mtp_sliding_windows": [window]}
    return (
        common_config("ExaoneMoEForCausalLM", "exaone_moe")
        | extra
        | {
            "attention_dropout": 0.0,
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "intermediate_size": 128,
            "is_moe_layer": [False, True, True, True],
            "layer_types": kinds,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "num_hidden_layers": 4,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "routed_scaling_factor": 2.5,
            "sliding_window": 8,
            "sliding_window_pattern": "LLLG",
        }
    )


def layer(draw: Draw, c: Mapping[str, Any], *, dense: bool) -> Weights:
    attention = draw.attention(
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        bias=False,
        qk_norm=True,
    )
    count, size = c["num_experts"], c["moe_intermediate_size"]
    if dense:
        mlp = draw.mlp(c["intermediate_size"])
    else:
        mlp = {
            "gate.weight": draw.linear(count, HIDDEN, gain=2.0),
            "e_score_correction_bias": draw.choice_bias(count),
            **draw.experts(count, size),
            **under("shared_experts.", draw.mlp(c["num_shared_experts"] * size)),
        }
    return under("self_attn.", attention) | under("mlp.", mlp) | draw.layer_norms()


def write(path: str | Path, seed: int = 0, *, head_type: str | None = None) -> Path:
    c, draw = config(head_type=head_type), Draw(seed)
    target = draw.ends()
    for i, sparse in enumerate(c["is_moe_layer"]):
        target |= under(f"model.layers.{i}.", layer(draw, c, dense=not sparse))
    head = draw.fc_ends() | under("layers.0.", layer(draw, c, dense=True))
    return write_raw(path, c, target, under("mtp.", head))


class ExaoneMoeReference(FcReference):
    @property
    def head_type(self) -> str:
        read = json.loads((self.path / "config.json").read_text())
        return read.get("mtp_layer_types", ["sliding_attention"])[0]

    def make_block(self) -> nn.Module:
        dense = copy.deepcopy(self.config)
        dense.mlp_layer_types = ["dense"] * dense.num_hidden_layers
        index = dense.layer_types.index(self.head_type)
        return ExaoneMoeDecoderLayer(dense, index)

    def mask(self, length: int) -> Tensor:
        sliding = self.head_type == "sliding_attention"
        return causal_mask(length, self.config.sliding_window if sliding else None)
