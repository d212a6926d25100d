"""Gemma 4's raw files: the target and, in a directory below, its assistant.

Names and config as in transformers ``models/gemma4`` and ``models/gemma4_assistant``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import END_OF_TEXT, EOS_IDS, VOCAB_SIZE, write_json
from safetensors.torch import save_file

from .raw import HIDDEN, Draw, Weights, under, write_raw

FULL, SLIDING = "full_attention", "sliding_attention"
ASSISTANT = "assistant"  # the directory beside the target's files
WIDTH, ASSISTANT_LAYERS = 32, [SLIDING, SLIDING, FULL]
CENTROIDS = 24


def common_text() -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": EOS_IDS,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "model_type": "gemma4_text",
        "num_attention_heads": 4,
        "pad_token_id": END_OF_TEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB_SIZE,
    }


def config(*, large: bool) -> dict[str, Any]:
    """Of the small models' kind, with inputs per layer and shared keys, or of the large
    ones', with experts and values that are the keys."""
    kinds = [SLIDING, FULL, SLIDING, SLIDING, FULL]
    own = {
        "attention_k_eq_v": large,
        "enable_moe_block": large,
        "hidden_size_per_layer_input": 0 if large else 32,
        "layer_types": kinds[:3] + kinds[4:] if large else kinds,
        "num_hidden_layers": 4 if large else 5,
        "num_key_value_heads": 2 if large else 1,
        "num_kv_shared_layers": 0 if large else 2,
        "use_double_wide_mlp": not large,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }
    if large:
        own |= {
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_global_key_value_heads": 1,
            "top_k_experts": 3,
        }
    text = common_text() | own | {"hidden_size": HIDDEN, "intermediate_size": 128}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "eos_token_id": EOS_IDS,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
    }


def assistant_config(target: Mapping[str, Any], *, large: bool) -> dict[str, Any]:
    shared = ("attention_k_eq_v", "num_key_value_heads", "num_global_key_value_heads")
    text = common_text() | {k: target[k] for k in shared if k in target}
    layers = len(ASSISTANT_LAYERS)
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": HIDDEN,
        "centroid_intermediate_top_k": 4,
        "eos_token_id": EOS_IDS,
        "model_type": "gemma4_assistant",
        "num_centroids": CENTROIDS,
        "text_config": text
        | {
            "enable_moe_block": False,
            "hidden_size": WIDTH,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 64,
            "layer_types": ASSISTANT_LAYERS,
            "num_hidden_layers": layers,
            "num_kv_shared_layers": layers,
            "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 0,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_ordered_embeddings": not large,
    }


def norms(draw: Draw, size: int, names: list[str]) -> Weights:
    return {f"{name}.weight": draw.norm(size) for name in names}


def mlp(draw: Draw, hidden: int, size: int) -> Weights:
    weights = {
        "gate_proj.weight": draw.linear(size, hidden),
        "up_proj.weight": draw.linear(size, hidden),
        "down_proj.weight": draw.linear(hidden, size, gain=2.0),
    }
    return under("mlp.", weights)


def queries(draw: Draw, c: Mapping[str, Any], kind: str) -> Weights:
    """What every layer has, with keys or without."""
    hidden = c["hidden_size"]
    size = c["global_head_dim"] if kind == FULL else c["head_dim"]
    inner = c["num_attention_heads"] * size
    weights = {
        "self_attn.q_proj.weight": draw.linear(inner, hidden, gain=1.5),
        "self_attn.o_proj.weight": draw.linear(hidden, inner, gain=1.5),
        "self_attn.q_norm.weight": draw.norm(size),
        "layer_scalar": draw.norm(1),
    }
    around = ["input_layernorm", "post_attention_layernorm"]
    around += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return weights | norms(draw, hidden, around)


def layer(draw: Draw, c: Mapping[str, Any], index: int) -> Weights:
    kind = c["layer_types"][index]
    one_projection = c["attention_k_eq_v"] and kind == FULL
    kv_heads = c[
        "num_global_key_value_heads" if one_projection else "num_key_value_heads"
    ]
    size = c["global_head_dim"] if kind == FULL else c["head_dim"]
    weights = queries(draw, c, kind) | {
        # The release has them where keys are shared too; nothing reads those.
        "self_attn.k_proj.weight": draw.linear(kv_heads * size, HIDDEN, gain=1.5),
        "self_attn.k_norm.weight": draw.norm(size),
    }
    if not one_projection:
        rows = kv_heads * size
        weights["self_attn.v_proj.weight"] = draw.linear(rows, HIDDEN, gain=1.5)
    shared = index >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
    wide = 2 if shared and c["use_double_wide_mlp"] else 1
    weights |= mlp(draw, HIDDEN, wide * c["intermediate_size"])
    if c["enable_moe_block"]:
        weights |= moe(draw, c)
    if small := c["hidden_size_per_layer_input"]:
        weights |= {
            "per_layer_input_gate.weight": draw.linear(small, HIDDEN),
            "per_layer_projection.weight": draw.linear(HIDDEN, small),
            "post_per_layer_input_norm.weight": draw.norm(HIDDEN),
        }
    return weights


def moe(draw: Draw, c: Mapping[str, Any]) -> Weights:
    count, size = c["num_experts"], c["moe_intermediate_size"]
    names = ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
    fused = draw.linear(count * 2 * size, HIDDEN).reshape(count, 2 * size, HIDDEN)
    down = draw.linear(count * HIDDEN, size, gain=2.0).reshape(count, HIDDEN, size)
    return norms(draw, HIDDEN, [*names, "pre_feedforward_layernorm_2"]) | {
        "router.proj.weight": draw.linear(count, HIDDEN, gain=2.0),
        "router.scale": draw.norm(HIDDEN),
        "router.per_expert_scale": draw.norm(count),
        "experts.gate_up_proj": fused,
        "experts.down_proj": down,
    }


def write(path: str | Path, seed: int = 0, *, large: bool = False) -> Path:
    """The target in ``path``, the assistant in ``path / ASSISTANT``."""
    whole, draw = config(large=large), Draw(seed)
    c = whole["text_config"]
    target = {
        "embed_tokens.weight": draw.output(),
        "norm.weight": draw.norm(HIDDEN),
    }
    for i in range(c["num_hidden_layers"]):
        target |= under(f"layers.{i}.", layer(draw, c, i))
    if small := c["hidden_size_per_layer_input"]:
        rows = c["num_hidden_layers"] * small
        target |= {
            "embed_tokens_per_layer.weight": draw.linear(VOCAB_SIZE, rows),
            "per_layer_model_projection.weight": draw.linear(rows, HIDDEN),
            "per_layer_projection_norm.weight": draw.norm(small),
        }
    path = write_raw(path, whole, under("model.language_model.", target), {})
    write_assistant(path / ASSISTANT, assistant_config(c, large=large), draw)
    return path


def write_assistant(path: Path, c: Mapping[str, Any], draw: Draw) -> None:
    text = c["text_config"]
    weights = {
        "pre_projection.weight": draw.linear(WIDTH, 2 * HIDDEN, gain=1.5),
        "post_projection.weight": draw.linear(HIDDEN, WIDTH, gain=2.0),
        "model.embed_tokens.weight": draw.linear(VOCAB_SIZE, WIDTH, gain=2.0),
        "model.norm.weight": draw.norm(WIDTH),
    }
    for i, kind in enumerate(ASSISTANT_LAYERS):
        inner = queries(draw, text, kind) | mlp(draw, WIDTH, text["intermediate_size"])
        weights |= under(f"model.layers.{i}.", inner)
    if c["use_ordered_embeddings"]:
        weights |= {
            "masked_embedding.centroids.weight": draw.linear(CENTROIDS, WIDTH),
            "masked_embedding.token_ordering": draw.rng.permutation(VOCAB_SIZE),
        }
    path.mkdir(parents=True, exist_ok=True)
    tensors = {k: torch.from_numpy(v).contiguous() for k, v in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", dict(c))
