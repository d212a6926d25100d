"""Gemma 4: the target of a drafter that is a checkpoint of its own (``assistant.py``).

Source: transformers ``models/gemma4``; mlx-lm's model is used as it is.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4
from mlx_lm.models.gemma4_text import logit_softcap

from .family import Family
from .spec import MTPSpec
from .target import Target

FULL, SLIDING = "full_attention", "sliding_attention"


class Gemma4Target(Target):
    """With scaled embeddings, capped logits and caches that a drafter reads."""

    @property
    def head_dim(self) -> None:
        return None  # layers share keys, which attention takes unquantised only

    def embed(self, tokens: mx.array) -> mx.array:
        return super().embed(tokens) * self.model.model.embed_scale

    def output(self, x: mx.array) -> mx.array:
        logits, cap = super().output(x), self.model.final_logit_softcapping
        return logits if cap is None else logit_softcap(cap, logits)

    def shared(self, caches: Sequence[Any]) -> dict[str, Any]:
        """By type of layer, the cache of the last layer with keys of its own."""
        return dict(zip(self.model.args.layer_types, caches, strict=False))

    @property
    def window(self) -> int:
        return self.model.args.sliding_window


class Gemma4(Family):
    spec = MTPSpec(family="gemma4", model_types=("gemma4",), prefixes=())
    base = gemma4
    separate = "google's ...-assistant checkpoint"

    def text_model(self, model: nn.Module) -> nn.Module:
        return model.language_model

    def target(self, model: nn.Module) -> Gemma4Target:
        return Gemma4Target(self.text_model(model), self.spec.hidden)
