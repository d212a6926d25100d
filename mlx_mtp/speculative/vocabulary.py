"""Drafts from a part of the vocabulary: the output layer over it costs a fraction.

The part is the first ids, and slots for others that the text has shown. Byte-pair
tokenizers number their tokens in the order of merges, so the first ids are the frequent
ones; a prefix of the weight's rows is no copy. A token outside is never drafted, which
may cost acceptance and nothing else: drafts are judged over the whole vocabulary, and
what they were drawn from is 0 outside (``spread``).
"""

from collections.abc import Collection, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

LEAST_VOCABULARY = 65_536  # for a part to be worth it
SIZE = 32_768
SLOTS = 512

# Share of the text's tokens outside, over about MEMORY tokens, at which the part is
# left and taken up again. A third of a small model's weights is its output layer, so
# that a part pays until it loses about this much acceptance.
LEAVE, RETURN = 0.12, 0.06
MEMORY = 64


class DraftVocabulary:
    """Rows of an output layer.

    Args:
        layer: ``nn.Linear`` or ``nn.Embedding``, quantised or not.
        size: of the part that is always there, its first rows.
        slots: rows for other tokens; the longest unseen one makes room.
    """

    def __init__(self, layer: nn.Module, size: int, slots: int):
        self.layer, self.size = layer, size
        self.total = layer.weight.shape[0]
        slots = min(slots, self.total - size)
        # Tokens in slots, the longest unseen first; some of them until others come.
        self._slots = dict.fromkeys(range(size, size + slots))
        self._fixed = _rows(layer, slice(0, size))
        self._extra: list[mx.array] | None = None
        self.ids = mx.array([0])
        self.outside = 0.0  # share of the text's tokens
        self.active = True

    def __contains__(self, token: int) -> bool:
        return token < self.size or token in self._slots

    def see(self, tokens: Iterable[int]) -> None:
        """Tokens of the text: they can be drafted from the next round built on."""
        for token in tokens:
            known = token in self
            self.outside += ((not known) - self.outside) / MEMORY
            self._take_in(token)
        self.active = self.outside < (LEAVE if self.active else RETURN)

    def keep(self, tokens: Collection[int]) -> None:
        """Tokens that are no news, such as end tokens."""
        for token in tokens:
            self._take_in(token)

    def _take_in(self, token: int) -> None:
        if token < self.size or token >= self.total or not self._slots:
            return
        if token not in self._slots:
            self._extra = None
            del self._slots[next(iter(self._slots))]
        else:
            del self._slots[token]
        self._slots[token] = None

    def logits(self, state: mx.array) -> mx.array:
        """[B, T, H], as the output layer takes it -> [B, T, size + slots]"""
        if self._extra is None:
            slots = mx.array(list(self._slots), mx.int32)
            self._extra = _rows(self.layer, slots)
            self.ids = mx.concatenate([mx.arange(self.size, dtype=mx.int32), slots])
            mx.eval(self._extra, self.ids)
        parts = [_product(self.layer, part, state) for part in self._parts]
        return mx.concatenate(parts, axis=-1)

    @property
    def _parts(self) -> list[list[mx.array]]:
        return [self._fixed, self._extra] if self._slots else [self._fixed]

    def tokens(self, index: mx.array) -> mx.array:
        """Places in ``logits`` -> token ids."""
        return self.ids[index]

    def spread(self, logits: mx.array) -> mx.array:
        """[B, T, size + slots] -> [B, T, V], with no weight on what is outside."""
        whole = mx.full((*logits.shape[:-1], self.total), -mx.inf, logits.dtype)
        at = mx.broadcast_to(self.ids, logits.shape)
        return mx.put_along_axis(whole, at, logits, axis=-1)


def draft_vocabulary(
    head: Any, target: Any, special_tokens: Collection[int] = ()
) -> DraftVocabulary | None:
    """The part that a head drafts from; None for all of its vocabulary.

    ``head.draft_vocab_size``, where it is set, says how many of the first ids are in
    it, and with 0 that there is no part.
    """
    if head is None:
        return None
    layer = head.output_layer(target)
    kinds = (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding)
    if type(layer) not in kinds or "bias" in layer:
        return None
    total = layer.weight.shape[0]
    size = getattr(head, "draft_vocab_size", SIZE if total >= LEAST_VOCABULARY else 0)
    if not 0 < size < total:
        return None
    part = DraftVocabulary(layer, size, SLOTS)
    part.keep(special_tokens)
    return part


def _rows(layer: nn.Module, which: slice | mx.array) -> list[mx.array]:
    names = ("weight", "scales", "biases")
    return [layer[name][which] for name in names if layer.get(name) is not None]


def _product(layer: nn.Module, rows: list[mx.array], x: mx.array) -> mx.array:
    if len(rows) == 1:
        return x @ rows[0].T
    weight, scales, *biases = rows
    return mx.quantized_matmul(
        x,
        weight,
        scales=scales,
        biases=biases[0] if biases else None,
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
