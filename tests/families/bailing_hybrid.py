"""Ling and Ring 2.5: lightning attention, whose decay is fixed, and latent attention.

Sources: ``modeling_bailing_moe_v2_5.py`` of inclusionAI/Ring-V2.5 for both target and
head; Lightning Attention-2 (arXiv 2401.04658). transformers has Ling 3 alone, of which
the MLP and MoE are taken, and DeepSeek-V3's latent attention; the rest is written here.

The decay of a layer follows mlx_lm and vLLM ``bailing_moe_linear.py`` in counting the
layers from 0; the released file counts from -1 (its head has no such layer).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BailingHybridConfig, DeepseekV3Config
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridMLP,
    BailingHybridMoE,
    BailingHybridRMSNorm,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from .bailing_moe_v3 import (
    BailingReference,
    around,
    ends,
    head_ends,
    latent_attention,
    renamed,
    shared_config,
)
from .loading import read_raw, stack_experts
from .raw import HIDDEN, Draw, Weights, common_config, under, write_raw
from .reference import causal_mask

LAYERS, GROUP = 4, 3


def config() -> dict[str, Any]:
    return (
        common_config("BailingMoeV2_5ForCausalLM", "bailing_hybrid")
        | shared_config()
        | {
            "layer_group_size": GROUP,
            "linear_silu": False,
            "num_hidden_layers": LAYERS,
            "q_lora_rank": 64,
        }
    )


def is_full(index: int) -> bool:
    """The last of a group, and what is left over after the whole groups."""
    return (index + 1) % GROUP == 0 or index >= LAYERS // GROUP * GROUP


def linear_attention(draw: Draw, c: Mapping[str, Any]) -> Weights:
    head_dim = c["head_dim"]
    inner = c["num_attention_heads"] * head_dim
    return {
        "query_key_value.weight": draw.linear(3 * inner, HIDDEN, gain=1.5),
        "query_layernorm.weight": draw.norm(head_dim),
        "key_layernorm.weight": draw.norm(head_dim),
        "g_proj.weight": draw.linear(inner, HIDDEN, gain=1.5),
        "g_norm.weight": draw.norm(inner),
        "dense.weight": draw.linear(HIDDEN, inner, gain=1.5),
    }


def write(path: str | Path, seed: int = 0) -> Path:
    c, draw = config(), Draw(seed)
    target = ends(draw)
    for i in range(LAYERS):
        attention = (
            latent_attention(draw, c, gate=False)
            if is_full(i)
            else linear_attention(draw, c)
        )
        target |= under(f"model.layers.{i}.", around(draw, c, attention, i))
    attention = latent_attention(draw, c, gate=False)
    head = around(draw, c, attention, LAYERS) | head_ends(draw)
    return write_raw(path, c, target, under(f"model.layers.{LAYERS}.", head))


def rotation(at: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, T, size], both halves alike."""
    angles = at[..., None] * base ** (-torch.arange(0, size, 2) / size)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


class LightningAttention(nn.Module):
    """softmax-free attention: q_t . k_s decays with t - s, by a rate of the head."""

    def __init__(self, c: Mapping[str, Any], index: int):
        super().__init__()
        self.c, inner = c, c["num_attention_heads"] * c["head_dim"]
        self.query_key_value = nn.Linear(HIDDEN, 3 * inner, bias=False)
        self.query_layernorm = BailingHybridRMSNorm(c["head_dim"], c["rms_norm_eps"])
        self.key_layernorm = BailingHybridRMSNorm(c["head_dim"], c["rms_norm_eps"])
        self.g_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.g_norm = nn.Module()
        self.g_norm.weight = nn.Parameter(torch.ones(inner))
        self.o_proj = nn.Linear(inner, HIDDEN, bias=False)
        heads = c["num_attention_heads"]
        assert math.log2(heads).is_integer()
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        self.decay = slopes * (1 - index / (c["num_hidden_layers"] - 1) + 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        c, (batch, length, _) = self.c, x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, -1, c["head_dim"])
        q, k, v = qkv.unbind(2)
        q = self.rotate(self.query_layernorm(q)).transpose(1, 2)
        k = self.rotate(self.key_layernorm(k)).transpose(1, 2)
        at = torch.arange(length)
        away = (at[:, None] - at[None, :]).clamp(min=0)
        weight = torch.exp(-self.decay[:, None, None] * away).tril()
        scores = q @ k.transpose(-1, -2) * c["head_dim"] ** -0.5 * weight
        out = (scores @ v.transpose(1, 2)).transpose(1, 2)
        groups = out.reshape(batch, length, c["group_norm_size"], -1)
        scale = groups.square().mean(-1, keepdim=True) + c["rms_norm_eps"]
        out = (groups * torch.rsqrt(scale)).flatten(2) * self.g_norm.weight
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)))

    def rotate(self, x: Tensor) -> Tensor:
        """The first entries of each head, half against half; x: [B, T, heads, D]."""
        size = int(self.c["head_dim"] * self.c["partial_rotary_factor"])
        at = torch.arange(x.shape[1])
        cos, sin = (part[:, None] for part in rotation(at, size, self.c["rope_theta"]))
        turned, kept = x[..., :size], x[..., size:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned, kept], dim=-1)


class Layer(nn.Module):
    def __init__(self, c: Mapping[str, Any], index: int, *, full: bool):
        super().__init__()
        self.full, norm = full, BailingHybridRMSNorm
        self.input_layernorm = norm(HIDDEN, c["rms_norm_eps"])
        self.post_attention_layernorm = norm(HIDDEN, c["rms_norm_eps"])
        if full:
            latent = DeepseekV3Config(**c, attn_implementation="eager")
            self.self_attn = DeepseekV3Attention(latent, index)
        else:
            self.self_attn = LightningAttention(c, index)
        dense = index < c["first_k_dense_replace"]
        settings = BailingHybridConfig(**c)
        self.mlp = (BailingHybridMLP if dense else BailingHybridMoE)(settings)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        read = self.input_layernorm(x)
        if self.full:
            mixed = self.self_attn(read, position_embeddings, attention_mask)[0]
        else:
            mixed = self.self_attn(read)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c: Mapping[str, Any]):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], HIDDEN)
        layers = [Layer(c, i, full=is_full(i)) for i in range(LAYERS)]
        self.layers = nn.ModuleList(layers)
        self.norm = BailingHybridRMSNorm(HIDDEN, c["rms_norm_eps"])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def rotary_emb(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return rotation(at, self.c["qk_rope_head_dim"], self.c["rope_theta"])

    def forward(self, tokens: Tensor, **_: Any) -> SimpleNamespace:
        x, length = self.embed_tokens(tokens), tokens.shape[1]
        rotary = self.rotary_emb(x, torch.arange(length)[None])
        for layer in self.layers:
            x = layer(x, causal_mask(length), rotary)
        return SimpleNamespace(last_hidden_state=self.norm(x))


class CausalLM(nn.Module):
    def __init__(self, c: Mapping[str, Any]):
        super().__init__()
        self.config = BailingHybridConfig(**c)
        self.model = Decoder(c)
        self.lm_head = nn.Linear(HIDDEN, c["vocab_size"], bias=False)

    def get_decoder(self) -> nn.Module:
        return self.model


class BailingHybridReference(BailingReference):
    @property
    def prefix(self) -> str:
        return f"model.layers.{LAYERS}."

    def load_target(self) -> CausalLM:
        self.read = json.loads((self.path / "config.json").read_text())
        model = CausalLM(self.read).to(torch.float32)
        raw = renamed(read_raw(self.path))
        state = {k: v for k, v in raw.items() if ".layers." not in k}
        for i in range(LAYERS):
            prefix = f"model.layers.{i}."
            inner = {k.removeprefix(prefix): v for k, v in raw.items() if prefix in k}
            state |= {prefix + k: v for k, v in stack_experts(inner).items()}
        model.load_state_dict(state)
        return model.eval()

    def make_block(self) -> nn.Module:
        return Layer(self.read, LAYERS, full=True)
