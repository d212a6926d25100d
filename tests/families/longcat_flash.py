"""LongCat-Flash: two attentions and a shortcut MoE per layer; a small dense head.

Sources: transformers ``models/longcat_flash`` (target, and the parts of the block);
head: vLLM ``longcat_flash_mtp.py`` and SGLang ``longcat_flash_nextn.py``: one layer of
latent attention and a dense MLP, a last norm, the target's output layer, and a copy of
the embedding. The config does not say that there is a head.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM, PreTrainedModel
from transformers.models.longcat_flash.modeling_longcat_flash import (
    LongcatFlashMLA,
    LongcatFlashMLP,
    LongcatFlashRMSNorm,
)

from .loading import read_raw, stack_experts
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import Reference

PREFIX = "model.mtp."
BLOCK = f"{PREFIX}layers.0."


def config() -> dict[str, Any]:
    return common_config("LongcatFlashForCausalLM", "longcat_flash") | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_method": "MLA",
        "expert_ffn_hidden_size": 64,
        "ffn_hidden_size": 128,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "moe_topk": 3,
        "n_routed_experts": 8,
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_layers": 2,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "routed_scaling_factor": 6.0,
        "router_bias": False,
        "v_head_dim": 16,
        "zero_expert_num": 4,
        "zero_expert_type": "identity",
    }


def layer(draw: Draw, c: Mapping[str, Any]) -> Weights:
    count = c["n_routed_experts"]
    choices = count + c["zero_expert_num"]
    weights = {
        "mlp.router.classifier.weight": draw.linear(choices, HIDDEN),
        "mlp.router.e_score_correction_bias": draw.vector(choices, std=0.03),
        **under("mlp.", draw.experts(count, c["expert_ffn_hidden_size"])),
    }
    for i in range(2):
        weights |= under(f"self_attn.{i}.", draw.latent_attention(c))
        weights |= under(f"mlps.{i}.", draw.mlp(c["ffn_hidden_size"]))
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{i}.weight"] = draw.norm(HIDDEN)
    return weights


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = draw.ends()
    for i in range(c["num_layers"]):
        target |= under(f"model.layers.{i}.", layer(draw, c))
    mlp = under("transformer_layer.mlp.", draw.mlp(c["ffn_hidden_size"]))
    block = under("self_attn.", draw.latent_attention(c)) | mlp | draw.layer_norms()
    head = under(BLOCK, block) | {
        f"{PREFIX}embed_tokens.weight": target["model.embed_tokens.weight"],
        f"{PREFIX}norm.weight": draw.norm(HIDDEN),
        f"{BLOCK}enorm.m.weight": draw.norm(HIDDEN),
        f"{BLOCK}hnorm.m.weight": draw.norm(HIDDEN),
        f"{BLOCK}eh_proj.weight": draw.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
    }
    return write_raw(path, c, target, head)


class DenseLayer(nn.Module):
    def __init__(self, settings: LongcatFlashConfig):
        super().__init__()
        size, eps = settings.hidden_size, settings.rms_norm_eps
        self.input_layernorm = LongcatFlashRMSNorm(size, eps=eps)
        self.self_attn = LongcatFlashMLA(settings, 0)
        self.post_attention_layernorm = LongcatFlashRMSNorm(size, eps=eps)
        self.mlp = LongcatFlashMLP(settings)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class LongcatFlashReference(Reference):
    def load_target(self) -> PreTrainedModel:
        read = json.loads((self.path / "config.json").read_text())
        # transformers rotates head_dim entries, by default the release's number.
        settings = LongcatFlashConfig.from_dict(
            read | {"head_dim": read["qk_rope_head_dim"]}
        )
        settings._attn_implementation = "eager"
        model = LongcatFlashForCausalLM(settings).to(torch.float32)
        raw = read_raw(self.path).items()
        raw = {k: v for k, v in raw if not self.is_head(k)}
        for i in range(settings.num_layers):
            prefix = f"model.layers.{i}."
            inner = {
                k.removeprefix(prefix): raw.pop(k) for k in list(raw) if prefix in k
            }
            inner = stack_experts(inner)
            # It has unused rows for the experts that return their input.
            fused = inner["mlp.experts.gate_up_proj"]
            unused = torch.zeros(settings.zero_expert_num, *fused.shape[1:])
            inner["mlp.experts.gate_up_proj"] = torch.cat([fused, unused])
            raw |= {prefix + k: v for k, v in inner.items()}
        model.load_state_dict(raw)
        return model.eval()

    def is_head(self, key: str) -> bool:
        return key.startswith(PREFIX)

    def names(self) -> dict[str, str]:
        return {
            "enorm": f"{BLOCK}enorm.m.weight",
            "hnorm": f"{BLOCK}hnorm.m.weight",
            "proj": f"{BLOCK}eh_proj.weight",
            "norm": f"{PREFIX}norm.weight",
            "embedding": f"{PREFIX}embed_tokens.weight",
            "block": BLOCK,
        }

    def make_block(self) -> nn.Module:
        return DenseLayer(self.config)

    def block_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.replace("transformer_layer.", ""): v for k, v in weights.items()}
