"""Tiny Qwen3.5 checkpoints in the layout of the Hugging Face files.

Raw layout means: RMS norms centred on zero, ``conv1d.weight`` [C, 1, K], the draft head
under ``mtp.`` and alone in the last shard. Three kinds:

* ``random``: all weights random, all norm weights away from zero. Structure and
  numerics show; nearly every draft is rejected.
* ``oracle``: a first-order Markov text. The token after ``t`` is ``succ[t]`` and the
  head drafts ``draft_succ[t]``, so a test chooses the text and which drafts are right.
* ``noisy``: the oracle's tokens, but every branch adds a little noise which depends on
  the history, so a wrong state shows in the log-probabilities.

Oracles have an identity embedding, hence ``hidden_size == VOCAB_SIZE``, branches whose
output projections are zero, and a permutation as output layer.

The module knows nothing of mlx_mtp: it is the input side of the tests.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
from byte_tokenizer import (
    END,
    END_OF_TEXT,
    END_THINK,
    EOS_IDS,
    START,
    THINK,
    VOCAB_SIZE,
    write_json,
    write_tokenizer,
)
from tiny_layers import Dims, Maker, Weights

__all__ = [
    "END",
    "END_OF_TEXT",
    "END_THINK",
    "EOS_IDS",
    "START",
    "THINK",
    "VOCAB_SIZE",
    "build",
    "chain",
]

Kind = Literal["random", "oracle", "noisy"]
# Gain of every branch's output projection, in the target and in the head.
BRANCH_GAIN = {"random": 1.0, "oracle": 0.0, "noisy": 0.005}
HEAD_GAIN = {"random": 1.0, "oracle": 0.0, "noisy": 0.0}
# Kept in float32 in the released checkpoints, whatever the rest is stored in.
FLOAT32_SUFFIXES = ("A_log", "linear_attn.norm.weight")


def chain(sequence: Sequence[int]) -> np.ndarray:
    """A successor map that walks through ``sequence``, for ``build(succ=...)``.

    It is a permutation without fixed points: the other tokens follow in order and lead
    back to the start. A sequence that ends where it began is a loop of its own.
    """
    sequence = [int(t) for t in sequence]
    closed = len(sequence) > 2 and sequence[0] == sequence[-1]
    walk = sequence[:-1] if closed else sequence
    if len(set(walk)) != len(walk):
        raise ValueError(f"a token has two successors in {sequence}")
    others = [t for t in range(VOCAB_SIZE) if t not in walk]
    succ = np.empty(VOCAB_SIZE, np.int64)
    for cycle in (walk, others) if closed else (walk + others,):
        succ[cycle] = np.roll(cycle, -1)
    return succ


def _target(
    maker: Maker, kind: Kind, succ: np.ndarray, tie: bool, body: str
) -> Weights:
    """The target's tensors; ``body`` is the prefix of the text model."""
    d = maker.dims
    if kind == "random":
        embedding, lm_head = (maker.normal(VOCAB_SIZE, d.hidden) for _ in range(2))
    else:
        embedding = np.eye(VOCAB_SIZE, dtype=np.float32)
        lm_head = np.zeros_like(embedding)
        lm_head[succ, np.arange(VOCAB_SIZE)] = 1
    weights = {f"{body}embed_tokens.weight": embedding}
    for i in range(d.layers):
        layer = maker.layer(d.full_attention(i), BRANCH_GAIN[kind])
        weights |= {f"{body}layers.{i}.{key}": value for key, value in layer.items()}
    weights[f"{body}norm.weight"] = maker.norm(d.hidden)
    if not tie:
        weights["lm_head.weight"] = lm_head
    return weights


def _head(
    maker: Maker, kind: Kind, succ: np.ndarray, draft_succ: np.ndarray, prefix: str
) -> Weights:
    """The draft head's tensors. An oracle's ``fc`` reads the embedding alone."""
    d = maker.dims
    if kind == "random":
        fc = maker.normal(d.hidden, 2 * d.hidden)
    else:
        # The output layer maps a token to its successor, so fc goes one step back.
        before = np.argsort(succ)
        fc = np.zeros((d.hidden, 2 * d.hidden), np.float32)
        fc[before[draft_succ], np.arange(VOCAB_SIZE)] = 1
    weights = {
        "fc.weight": fc,
        "pre_fc_norm_embedding.weight": maker.norm(d.hidden),
        "pre_fc_norm_hidden.weight": maker.norm(d.hidden),
        "norm.weight": maker.norm(d.hidden),
    }
    layer = maker.layer(True, HEAD_GAIN[kind])
    weights |= {f"layers.0.{key}": value for key, value in layer.items()}
    return {prefix + key: value for key, value in weights.items()}


def _config(d: Dims, *, tie: bool, flat: bool, dtype: mx.Dtype) -> dict:
    types = {True: "full_attention", False: "linear_attention"}
    text = {
        "model_type": "qwen3_5_text",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "hidden_size": d.hidden,
        "intermediate_size": d.intermediate,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": d.hk,
        "linear_num_value_heads": d.hv,
        "linear_key_head_dim": d.dk,
        "linear_value_head_dim": d.dv,
        "linear_conv_kernel_dim": d.kernel,
        "full_attention_interval": d.interval,
        "layer_types": [types[d.full_attention(i)] for i in range(d.layers)],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": tie,
        "eos_token_id": END_OF_TEXT,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    if flat:
        return {"architectures": ["Qwen3_5ForCausalLM"]} | text
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": tie,
    }


def _write_weights(path: Path, groups: list[Weights], dtype: mx.Dtype) -> None:
    """One shard per group, and the index."""
    weight_map, size = {}, 0
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        arrays = {
            key: mx.array(value).astype(
                mx.float32 if key.endswith(FLOAT32_SUFFIXES) else dtype
            )
            for key, value in group.items()
        }
        mx.save_safetensors(str(path / name), arrays, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
        size += sum(a.nbytes for a in arrays.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(path / "model.safetensors.index.json", index)


def build(
    path: str | Path,
    kind: Kind = "random",
    *,
    succ: Sequence[int] | None = None,
    draft_succ: Sequence[int] | None = None,
    seed: int = 0,
    layers: int = 4,
    interval: int = 4,
    tie: bool = False,
    dtype: mx.Dtype = mx.float32,
    shards: int = 3,
    hk: int = 2,
    hv: int = 4,
    dk: int = 16,
    dv: int = 16,
    hidden: int = 64,
    head_dim: int = 16,
    norm_std: float = 0.3,
    flat: bool = False,
    head_prefix: str = "mtp.",
    vision: bool = False,
) -> Path:
    """Write a checkpoint into an empty or new directory and return the directory.

    Args:
        succ: successor of each token (a permutation); default: the next id.
        draft_succ: what the head drafts after each token; default: ``succ``.
        tie: no output layer of its own; random kind only.
        shards: the head is alone in the last one; with 1, all is in one file.
        hidden: hidden size of the random kind.
        head_dim: of the attention layers.
        norm_std: spread of the random kind's norm weights around their centre.
        flat: the text-only form, without the wrapper's ``text_config`` and prefix.
        vision: add a tensor of the vision tower.
    """
    oracle = kind != "random"
    if oracle and tie:
        raise ValueError("an oracle's output layer differs from its embedding")
    succ = np.asarray(np.roll(range(VOCAB_SIZE), -1) if succ is None else succ)
    draft_succ = succ if draft_succ is None else np.asarray(draft_succ)
    if not np.array_equal(np.sort(succ), np.arange(VOCAB_SIZE)):
        raise ValueError("succ must be a permutation of the vocabulary")
    hidden = VOCAB_SIZE if oracle else hidden
    dims = Dims(hidden, layers, interval, hk, hv, dk, dv, head_dim=head_dim)
    maker = Maker(dims, seed=seed, norm_std=0 if oracle else norm_std)
    body = "model." if flat else "model.language_model."
    target = _target(maker, kind, succ, tie, body)
    head = _head(maker, kind, succ, draft_succ, head_prefix)
    if vision:
        target["model.visual.patch_embed.proj.weight"] = maker.normal(8, 3, 2, 4, 4)
    keys, parts = list(target), max(1, shards - 1)
    groups = [{key: target[key] for key in keys[i::parts]} for i in range(parts)]
    groups = [target | head] if shards == 1 else [*groups, head]

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(path, groups, dtype)
    write_json(path / "config.json", _config(dims, tie=tie, flat=flat, dtype=dtype))
    write_json(path / "generation_config.json", {"eos_token_id": EOS_IDS})
    write_tokenizer(path)
    return path
