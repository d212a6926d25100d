"""Several projections of one input as one matrix product.

The joined matrix is the only copy: the layers keep views of it under their own names,
so parameters, saving and stock code see what they saw before.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..kernels.gated_delta_prologue import Columns

KINDS = ("weight", "scales", "biases")
FORMAT = ("group_size", "bits", "mode")


class JoinedLinear:
    """Linear layers without a bias whose rows lie in one matrix.

    Args:
        layers: of one kind, and if quantised of the same bits, group size and mode.
            They keep views of the joined arrays.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        first = layers[0]
        self.quantized = isinstance(first, nn.QuantizedLinear)
        names = [name for name in KINDS if name in first]
        self.arrays = {n: mx.concatenate([x[n] for x in layers]) for n in names}
        self.options = {}
        if self.quantized:
            self.options = {
                n: getattr(first, n) for n in ("group_size", "bits", "mode")
            }
        self.sizes = [layer.weight.shape[0] for layer in layers]
        self.starts = [sum(self.sizes[:i]) for i in range(len(layers))]
        self.views = []
        for layer, start, size in zip(layers, self.starts, self.sizes, strict=True):
            views = {n: x[start : start + size] for n, x in self.arrays.items()}
            layer.update(views)
            self.views.append(views)

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the layers still are what was joined: adapters, sharding or new
        weights would have replaced something."""
        return all(
            layer.get(name) is view
            for layer, views in zip(layers, self.views, strict=True)
            for name, view in views.items()
        )

    def __call__(self, x: mx.array) -> list[Columns]:
        """[B, T, inputs] -> the layers' results, side by side in one array."""
        if self.quantized:
            out = mx.quantized_matmul(
                x, **self._packed(), transpose=True, **self.options
            )
        else:
            out = x @ self.arrays["weight"].T
        return [
            Columns(out, start, size)
            for start, size in zip(self.starts, self.sizes, strict=True)
        ]


def joined(layers: Sequence[nn.Module]) -> JoinedLinear | None:
    """The layers joined, or None where they cannot be: they then stay as they are."""
    kinds = {
        (
            type(layer),
            *(getattr(layer, n, None) for n in FORMAT),
            *(layer[n].dtype if n in layer else None for n in KINDS),
        )
        for layer in layers
    }
    plain = all(type(x) in (nn.Linear, nn.QuantizedLinear) for x in layers)
    if len(kinds) > 1 or not plain or any("bias" in layer for layer in layers):
        return None
    return JoinedLinear(layers)
