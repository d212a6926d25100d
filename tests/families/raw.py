"""Tiny random checkpoints in the layout of the released Hugging Face files.

Pieces of layers under their released names, and the writer of a directory: shards,
index, config and tokenizer. Norm weights are random around their centre, expert biases
and attention biases are not zero, and the scales keep the log-probabilities from being
flat. The module knows nothing of mlx_mtp.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byte_tokenizer import END_OF_TEXT, EOS_IDS, VOCAB_SIZE, write_json, write_tokenizer
from safetensors.torch import save_file

Weights = dict[str, np.ndarray]
HIDDEN = 64


def under(prefix: str, weights: Mapping[str, np.ndarray]) -> Weights:
    return {prefix + key: value for key, value in weights.items()}


class Draw:
    """Draws tensors; ``centre`` is that of the norm weights (0: stored as w of 1+w)."""

    def __init__(self, seed: int, *, centre: float = 1.0):
        self.rng = np.random.default_rng(seed)
        self.centre = centre

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        values = self.rng.standard_normal((rows, columns))
        return (values * gain / columns**0.5).astype(np.float32)

    def norm(self, size: int, centre: float | None = None) -> np.ndarray:
        centre = self.centre if centre is None else centre
        return (centre + self.rng.uniform(-0.5, 0.5, size)).astype(np.float32)

    def vector(self, size: int, std: float = 0.3) -> np.ndarray:
        return (self.rng.standard_normal(size) * std).astype(np.float32)

    def choice_bias(self, count: int, std: float = 0.1) -> np.ndarray:
        """The routers' bias for the choice alone.

        Positive: mlx_lm gives the experts of the groups left out a score of zero where
        others say minus infinity, and a negative score lies between the two.
        """
        return np.float32(0.5) + self.vector(count, std)

    def embedding(self) -> np.ndarray:
        return self.linear(VOCAB_SIZE, HIDDEN, gain=HIDDEN**0.5)

    def output(self) -> np.ndarray:
        return self.linear(VOCAB_SIZE, HIDDEN, gain=2.0)

    def mlp(self, size: int) -> Weights:
        return {
            "gate_proj.weight": self.linear(size, HIDDEN),
            "up_proj.weight": self.linear(size, HIDDEN),
            "down_proj.weight": self.linear(HIDDEN, size, gain=2.0),
        }

    def experts(self, count: int, size: int) -> Weights:
        """One set of tensors per expert, as most families are released."""
        weights: Weights = {}
        for i in range(count):
            weights |= under(f"experts.{i}.", self.mlp(size))
        return weights

    def attention(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        qk_norm: bool = False,
        value_dim: int | None = None,
    ) -> Weights:
        """Grouped-query attention; ``bias`` is that of q, k and v."""
        value_dim = value_dim or head_dim
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim}
        sizes["v"] = kv_heads * value_dim
        weights = {
            f"{name}_proj.weight": self.linear(size, HIDDEN, gain=1.5)
            for name, size in sizes.items()
        }
        weights["o_proj.weight"] = self.linear(HIDDEN, heads * value_dim, gain=1.5)
        if bias:
            weights |= {f"{n}_proj.bias": self.vector(s) for n, s in sizes.items()}
        if qk_norm:
            weights |= {f"{n}_norm.weight": self.norm(head_dim) for n in "qk"}
        return weights

    def latent_attention(self, config: Mapping[str, Any]) -> Weights:
        """DeepSeek's MLA; the query is of low rank where the config has a rank."""
        heads = config["num_attention_heads"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        value, rank = config["v_head_dim"], config["kv_lora_rank"]
        query_rank = config["q_lora_rank"]
        if query_rank is None:
            query = {"q_proj.weight": self.linear(heads * (nope + rope), HIDDEN, 1.5)}
        else:
            query = {
                "q_a_proj.weight": self.linear(query_rank, HIDDEN),
                "q_a_layernorm.weight": self.norm(query_rank),
                "q_b_proj.weight": self.linear(heads * (nope + rope), query_rank, 1.5),
            }
        return query | {
            "kv_a_proj_with_mqa.weight": self.linear(rank + rope, HIDDEN, 1.5),
            "kv_a_layernorm.weight": self.norm(rank),
            "kv_b_proj.weight": self.linear(heads * (nope + value), rank, 1.5),
            "o_proj.weight": self.linear(HIDDEN, heads * value, 1.5),
        }

    def layer_norms(self) -> Weights:
        names = ("input_layernorm", "post_attention_layernorm")
        return {f"{name}.weight": self.norm(HIDDEN) for name in names}

    def ends(self, body: str = "model.") -> Weights:
        """Embedding, final norm and output layer of the target."""
        return {
            f"{body}embed_tokens.weight": self.embedding(),
            f"{body}norm.weight": self.norm(HIDDEN),
            "lm_head.weight": self.output(),
        }

    def fc_ends(self) -> Weights:
        """The head around its layers, in Qwen's names."""
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        return {
            "fc.weight": self.linear(HIDDEN, 2 * HIDDEN, gain=1.5),
            **{f"{name}.weight": self.norm(HIDDEN) for name in names},
        }


def write_raw(
    path: str | Path, config: Mapping[str, Any], target: Weights, head: Weights
) -> Path:
    """Three shards: target, target and head, head. Returns the directory."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    cut = [list(target)[: len(target) // 2], list(target)[len(target) // 2 :]]
    last = list(head)[len(head) // 2 :]
    cut = [cut[0], cut[1] + list(head)[: len(head) // 2], last]
    weights = target | head
    assert len(weights) == len(target) + len(head)
    weight_map = {}
    for i, keys in enumerate(cut, 1):
        name = f"model-{i:05d}-of-{len(cut):05d}.safetensors"
        shard = {key: torch.from_numpy(weights[key]).contiguous() for key in keys}
        save_file(shard, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, name)
    size = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(path / "model.safetensors.index.json", index)
    write_json(path / "config.json", dict(config))
    write_json(path / "generation_config.json", {"eos_token_id": EOS_IDS})
    write_tokenizer(path)
    return path


def common_config(architecture: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": END_OF_TEXT,
        "eos_token_id": EOS_IDS,
        "use_cache": True,
    }
