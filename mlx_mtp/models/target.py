"""A target in the parts the engine uses: embeddings, hidden states, logits.

mlx-lm's models are a core (embedding, layers, final norm) and an output layer, and
``output(core(ids)) == model(ids)`` bit for bit. For a head that reads the states before
the final norm, the core runs with nothing in that norm's place and the norm follows
here; the model itself stays as it is. Knows no family beyond that.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..speculative.cache import RecurrentCache, RewindableKVCache
from ..speculative.cache_list import RewindableCacheList
from .spec import Stage


class Target:
    """A loaded model's parts.

    Args:
        model: mlx-lm's model of the text: ``model``, ``args`` and maybe ``lm_head``.
        stage: of the hidden states that ``hidden`` returns and ``logits`` takes.
        core, embedding, norm: what the core is called in the model, and the embedding
            and the final norm in the core.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: Stage = "post_norm",
        core: str = "model",
        embedding: str = "embed_tokens",
        norm: str = "norm",
    ):
        self.model, self.stage = model, stage
        whole = getattr(model, core)
        self._embedding, self._norm = whole[embedding], whole[norm]
        self._core = whole if stage == "post_norm" else without_norm(whole, norm)

    @property
    def vocab_size(self) -> int:
        return self._embedding.weight.shape[0]

    @property
    def head_dim(self) -> int | None:
        """Width of cached keys and values; None where they cannot be quantised.

        Attention over a latent cache (MLA) reads it in a way of its own.
        """
        args = self.model.args
        if hasattr(args, "kv_lora_rank"):
            return None
        width = getattr(args, "head_dim", None)
        return width or args.hidden_size // args.num_attention_heads

    @property
    def num_caches(self) -> int:
        """One per layer that has one."""
        return len(make_prompt_cache(self.model))

    def make_cache(self, batch_size: int = 1) -> list[Any]:
        return [rewindable(c, batch_size) for c in make_prompt_cache(self.model)]

    def embed(self, tokens: mx.array) -> mx.array:
        """[B, T] -> [B, T, hidden_size]"""
        return self._embedding(tokens)

    def hidden(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """[B, T] -> [B, T, hidden_size], at the stage that the head reads."""
        return self._core(tokens, cache)

    def norm(self, x: mx.array) -> mx.array:
        """The final norm."""
        return self._norm(x)

    @property
    def output_layer(self) -> nn.Module:
        """The layer whose rows are the vocabulary: linear, or the embedding."""
        return self.model.get("lm_head", self._embedding)

    def output(self, x: mx.array) -> mx.array:
        """[B, T, hidden_size], after the final norm -> [B, T, V]"""
        if "lm_head" in self.model:
            return self.model.lm_head(x)
        return self._embedding.as_linear(x)

    def notes(self) -> tuple[str, ...]:
        """What the layers that have run say of kernels they do without."""
        notes = (getattr(layer, "note", None) for layer in self.model.modules())
        return tuple(dict.fromkeys(note for note in notes if note))

    def logits(self, hidden: mx.array) -> mx.array:
        """What ``hidden`` returns -> [B, T, V]"""
        post = self.stage == "post_norm"
        return self.output(hidden if post else self.norm(hidden))


def without_norm(core: nn.Module, norm: str) -> nn.Module:
    """The same core, its modules shared, with nothing for a final norm."""
    new = type(core).__new__(type(core))
    nn.Module.__init__(new)
    new.__dict__.update(core.__dict__)
    dict.update(new, core)
    new[norm] = nn.Identity()
    return new


def rewindable(cache: Any, batch_size: int) -> Any:
    """An empty cache of ours for the kind of cache that mlx-lm's model asks for.

    Raises:
        ValueError: for a kind that cannot be rewound.
    """
    if type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0):
        return RewindableKVCache(batch_size)  # the model's mask has the window
    if type(cache) is ArraysCache:
        return RecurrentCache(len(cache.cache))
    if type(cache) is CacheList:
        return RewindableCacheList(*(rewindable(c, batch_size) for c in cache.caches))
    raise ValueError(f"a {type(cache).__name__} cannot be rewound")
