"""The MTP head of every family: a projection of two states, a layer, a norm.

``norm(layer(fc([norm(e); norm(h)])))``. The layer is mlx-lm's own class; what else
differs is data (:class:`spec.MTPSpec`). Knows neither files nor the engine.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from ..speculative.cache import RewindableKVCache
from .spec import MTPSpec
from .target import Target


class MTPHead(nn.Module):
    """One module: (embedding of x[t+1], hidden state of x[t]) -> state for x[t+2].

    Args:
        layer: called with the projected states, a mask and a cache.
        spec: the head's data; toggles applied.
        hidden_size: of the target.
        eps: of the norms.
        vocab_size: of an embedding or an output layer of its own.
        bias: whether the projection has one.
        window: of the layer's attention; None for all positions.
        array_mask: whether the layer needs its mask as an array.
        make_cache: batch size -> the layer's cache.

    Shapes:
        embedding, hidden, result: [B, T, hidden_size]
    """

    def __init__(
        self,
        layer: nn.Module,
        spec: MTPSpec,
        hidden_size: int,
        eps: float,
        *,
        vocab_size: int,
        bias: bool = False,
        window: int | None = None,
        array_mask: bool = False,
        make_cache: Callable[[int], Any] = RewindableKVCache,
    ):
        super().__init__()
        self.spec, self.window, self.array_mask = spec, window, array_mask
        self._make_cache = make_cache
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=bias)
        self.layers = [layer]
        if spec.final_norm == "own":
            self.norm = nn.RMSNorm(hidden_size, eps)
        if spec.embedding == "own":
            self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        if spec.output == "own":
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def __call__(
        self, embedding: mx.array, hidden: mx.array, cache: Any | None = None
    ) -> mx.array:
        """The state that the next draft step reads (``spec.chain``)."""
        if self.spec.mask_first:
            embedding = self._masked(embedding, cache)
        halves = [
            self.pre_fc_norm_embedding(embedding),
            self.pre_fc_norm_hidden(hidden),
        ]
        if self.spec.concat == "hidden_first":
            halves.reverse()
        x = self.fc(mx.concatenate(halves, axis=-1))
        mask = create_attention_mask(x, cache, self.window, self.array_mask)
        x = self.layers[0](x, mask, cache)
        return self.norm(x) if self._normed else x

    @property
    def _normed(self) -> bool:
        """Whether the result has passed the final norm."""
        return self.spec.final_norm == "own" and self.spec.chain == "post_norm"

    def _masked(self, embedding: mx.array, cache: Any | None) -> mx.array:
        """Zero at position 0, as vLLM does for some families."""
        start = 0
        if cache is not None:
            start = cache.offset[:, None] - getattr(cache, "late", 0)
        positions = start + mx.arange(embedding.shape[1])  # [B, T] or [T]
        return mx.where((positions == 0)[..., None], 0, embedding)

    def embed(self, target: Target, tokens: mx.array) -> mx.array:
        """[B, T] -> [B, T, hidden_size]"""
        own = self.spec.embedding == "own"
        return self.embed_tokens(tokens) if own else target.embed(tokens)

    def normed(self, target: Target, state: mx.array) -> mx.array:
        """What the output layer reads of the states that a call returns."""
        if self._normed or self.spec.final_norm == "none":
            return state
        return self.norm(state) if self.spec.final_norm == "own" else target.norm(state)

    def output_layer(self, target: Target) -> nn.Module:
        """The layer whose rows are the vocabulary: linear, or an embedding."""
        return self.lm_head if self.spec.output == "own" else target.output_layer

    def logits(self, target: Target, state: mx.array) -> mx.array:
        """[B, T, hidden_size] -> [B, T, V]"""
        x = self.normed(target, state)
        return self.lm_head(x) if self.spec.output == "own" else target.output(x)

    def make_cache(self, batch_size: int = 1) -> Any:
        return self._make_cache(batch_size)
