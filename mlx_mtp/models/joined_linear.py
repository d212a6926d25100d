"""Several projections of one input as one matrix product.

The joined matrix is the only copy: the layers keep views of it under their own names,
so parameters, saving and stock code see what they saw before.
"""

from collections.abc import Mapping

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

    def __init__(self, layers: Mapping[str, nn.Module]):
        self.layers = dict(layers)
        first = next(iter(layers.values()))
        self.quantized = isinstance(first, nn.QuantizedLinear)
        names = [name for name in KINDS if name in first]
        parts = {n: [layer[n] for layer in layers.values()] for n in names}
        self.arrays = {n: mx.concatenate(arrays) for n, arrays in parts.items()}
        format_names = FORMAT if self.quantized else ()
        self.options = {name: getattr(first, name) for name in format_names}
        self.columns, self.views, start = [], [], 0
        for layer in layers.values():
            size = layer.weight.shape[0]
            for name, array in self.arrays.items():
                layer[name] = array[start : start + size]
                self.views.append((layer, name, layer[name]))
            self.columns.append((start, size))
            start += size

    def stands(self, owner: nn.Module) -> bool:
        """Whether the owner's layers still are what was joined.

        Adapters, sharding or new weights would have replaced something.
        """
        for name, layer in self.layers.items():
            if owner.get(name) is not layer:
                return False
        return all(layer.get(name) is view for layer, name, view in self.views)

    def __call__(self, x: mx.array) -> list[Columns]:
        """[B, T, inputs] -> the layers' results, side by side in one array."""
        if self.quantized:
            weight, scales, biases = (self.arrays.get(name) for name in KINDS)
            out = mx.quantized_matmul(x, weight, scales, biases, **self.options)
        else:
            out = x @ self.arrays["weight"].T
        return [Columns(out, *columns) for columns in self.columns]


def joined(layers: Mapping[str, nn.Module]) -> JoinedLinear | None:
    """The layers joined, or None where they cannot be: they then stay as they are."""
    kinds = {
        (
            type(layer),
            *(getattr(layer, n, None) for n in FORMAT),
            *(layer[n].dtype if n in layer else None for n in KINDS),
        )
        for layer in layers.values()
    }
    linear = all(type(x) in (nn.Linear, nn.QuantizedLinear) for x in layers.values())
    if len(kinds) > 1 or not linear or any("bias" in x for x in layers.values()):
        return None
    return JoinedLinear(layers)
