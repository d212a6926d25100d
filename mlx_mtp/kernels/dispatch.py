"""Where the kernels run: on a Metal GPU, for the shapes they are written for.

Everywhere else, and on a machine whose compiler refuses a kernel, the operations of
MLX that are each kernel's reference do the work.
"""

import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import greedy_head as greedy
from .gated_delta_prologue import (
    Columns,
    Sizes,
    Weights,
    gated_delta_prologue,
)
from .gated_delta_verify import MAX_ROWS, Rows, gated_delta_verify
from .gated_rms_norm import gated_rms_norm

MAX_HEAD_DIM = 256
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def on_metal() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def covers(sizes: Sizes) -> bool:
    """Whether the kernels are written for such a layer."""
    Hk, Hv, Dk, Dv, W, dtype = sizes
    dims = all(32 <= size <= MAX_HEAD_DIM and size % 32 == 0 for size in (Dk, Dv))
    return dims and Hv % Hk == 0 and W >= 2 and dtype in DTYPES


def failure(sizes: Sizes) -> str | None:
    """Why the kernels do not run here although they should; None where they do."""
    return _probe(sizes) if on_metal() and covers(sizes) else None


def usable(sizes: Sizes) -> bool:
    """Whether a layer's short blocks run on the kernels."""
    return on_metal() and _runs(sizes)


@lru_cache
def _runs(sizes: Sizes) -> bool:
    return covers(sizes) and _probe(sizes) is None


@lru_cache
def _probe(sizes: Sizes) -> str | None:
    """Compile and run each kernel once on zeros; warn of the one that fails."""
    for name, run in _trials(sizes):
        note = _trial(name, run)
        if note:
            return note
    return None


def _trial(name: str, run: Callable[[], Any]) -> str | None:
    try:
        mx.eval(run())
    except Exception as error:  # MLX raises what the Metal compiler says
        reason = str(error).strip().splitlines()[0] if str(error) else "no reason"
        note = f"kernel {name} does not run on this machine ({reason})"
        warnings.warn(
            f"{note}; the slower reference takes its place",
            RuntimeWarning,
            stacklevel=2,
        )
        return note
    return None


def greedy_usable(layer: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether an output layer's most likely token comes from the kernel."""
    if not on_metal() or not greedy.covers(layer, dtype):
        return False
    quantized = "scales" in layer
    return _greedy_runs(
        *(layer.weight.shape[1] * 32 // layer.bits if quantized else None, dtype),
        *((layer.bits, layer.group_size) if quantized else (None, None)),
    )


@lru_cache
def _greedy_runs(
    size: int | None, dtype: mx.Dtype, bits: int | None, group_size: int | None
) -> bool:
    """The same for all layers of a kind: on a small one it is compiled and run."""
    layer = nn.Linear(size or 64, greedy.CHUNK, bias=False)
    layer.weight = mx.zeros_like(layer.weight)
    if bits:
        layer = layer.to_quantized(group_size, bits)
    layer.set_dtype(dtype)
    x = mx.zeros((1, 1, size or 64), dtype)
    return _trial("greedy_head", lambda: greedy.greedy_head(x, layer)) is None


def _trials(sizes: Sizes) -> list[tuple[str, Callable[[], Any]]]:
    Hk, Hv, Dk, Dv, W, dtype = sizes
    channels, none = 2 * Hk * Dk + Hv * Dv, mx.array([0], mx.int32)

    def zeros(*shape: int) -> mx.array:
        return mx.zeros(shape, dtype)

    def columns(size: int) -> Columns:
        return Columns(zeros(1, 1, size), 0, size)

    weights = Weights(zeros(channels, W, 1), mx.zeros(Hv), zeros(Hv))
    qkv, gates, z = columns(channels), columns(Hv), columns(Hv * Dv)
    rows = Rows(
        zeros(1, MAX_ROWS, Hk, Dk),
        zeros(1, MAX_ROWS, Hv, Dv),
        mx.zeros((1, MAX_ROWS, Hv)),
        zeros(1, MAX_ROWS, Hv),
    )
    state, q = mx.zeros((1, Hv, Dv, Dk)), zeros(1, 1, Hk, Dk)
    window = zeros(1, W - 1, channels)
    return [
        (
            "gated_delta_prologue",
            lambda: gated_delta_prologue(
                window, qkv, none, qkv, gates, gates, weights, sizes
            ),
        ),
        (
            "gated_delta_verify",
            lambda: gated_delta_verify(state, rows, none, q, rows),
        ),
        (
            "gated_rms_norm",
            lambda: gated_rms_norm(zeros(1, 1, Hv, Dv), z, zeros(Dv), 1e-6),
        ),
    ]


@lru_cache
def native_scan(Hk: int, Hv: int, Dk: int, Dv: int) -> bool:
    """Whether ``mx.fast.gated_delta_update`` has kernels for these sizes here.

    Which sizes it covers changes between releases of MLX, and for all others it runs
    one step after the other. Its graph shows which: a single node, or many.
    """
    return on_metal() and _is_one_node(
        *(mx.zeros((1, 64, Hk, Dk)), mx.zeros((1, 64, Hv, Dv)), mx.zeros((1, 64, Hv)))
    )


def _is_one_node(k: mx.array, v: mx.array, g: mx.array) -> bool:
    out, _ = mx.fast.gated_delta_update(k, k, v, g, g)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), out)
        return "GatedDeltaUpdate" in file.read_text()
