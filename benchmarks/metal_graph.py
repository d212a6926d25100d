"""Count what a graph would launch on Metal, on a machine without it.

On a CPU, MLX takes its fast operations apart and a Metal kernel cannot be recorded. So
in the counting process, and nowhere else, stand-ins of one node each take their places,
and mlx-lm's and this project's code builds the graph that it would build on a Mac.

What it does not know: launches inside one operation (a long attention runs as two,
large matrix products may split), copies of operands that are not contiguous, and how
Metal overlaps them.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta, qwen3_5, qwen3_next

from mlx_mtp.kernels import (
    dispatch,
    gated_delta_prologue,
    gated_delta_verify,
    gated_rms_norm,
    greedy_head,
)

KERNELS = (gated_delta_prologue, gated_delta_verify, gated_rms_norm, greedy_head)

# Primitives that give another view of the same memory.
VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten"),
    *("Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose"),
    *("Unflatten", "NumberOfElements"),
}


class Launch(NamedTuple):
    """Shapes of what one stand-in reads and writes."""

    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]


log: list[Launch] | None = None  # of every stand-in called, while one is kept


@contextlib.contextmanager
def logged() -> Iterator[list[Launch]]:
    """The stand-ins called while it is open."""
    global log
    log = []
    try:
        yield log
    finally:
        log = None


@cache
def leaf(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array that exists already, so that it is no node."""
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    return array


def one_node(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
    inputs: Sequence[Any],
) -> list[mx.array]:
    """Outputs of a single node that depends on all inputs."""
    arrays = [x for x in inputs if type(x) is mx.array]
    if log is not None:
        log.append(Launch([x.shape for x in arrays], list(shapes)))
    return mx.depends([*map(leaf, shapes, dtypes)], arrays)


def _like_first(x: mx.array, *others: Any, **named: Any) -> mx.array:
    return one_node((x.shape,), (x.dtype,), (x, *others, *named.values()))[0]


def _attention(q: mx.array, k: mx.array, v: mx.array, **named: Any) -> mx.array:
    shape = (*q.shape[:-1], v.shape[-1])
    return one_node([shape], [q.dtype], [q, k, v, *named.values()])[0]


def _recurrence(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **_: Any,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's update as it runs on Metal: decay, beta, and its kernel."""
    g, beta = gated_delta.compute_g(A_log, a, dt_bias), mx.sigmoid(b)
    B, Dk = k.shape[0], k.shape[3]
    shape = (B, *v.shape[2:], Dk)
    inputs = [q, k, v, g, beta, state, mask]
    return tuple(one_node([v.shape, shape], [q.dtype, mx.float32], inputs))


def _kernel(**arguments: Any) -> list[mx.array]:
    """In place of a kernel object: called with the same keyword arguments."""
    shapes, dtypes = arguments["output_shapes"], arguments["output_dtypes"]
    return one_node(shapes, dtypes, arguments["inputs"])


@contextlib.contextmanager
def metal_shaped() -> Iterator[None]:
    """While it is open, graphs are built as on Metal; what they compute is void."""
    swaps: list[tuple[Any, str, Callable]] = [
        (mx.fast, "rms_norm", _like_first),
        (mx.fast, "layer_norm", _like_first),
        (mx.fast, "rope", _like_first),
        (mx.fast, "scaled_dot_product_attention", _attention),
        (qwen3_5, "gated_delta_update", _recurrence),
        (qwen3_next, "gated_delta_update", _recurrence),
        (dispatch, "on_metal", lambda: True),
        (dispatch, "_probe", lambda sizes: None),
        (dispatch, "native_scan", lambda *sizes: False),
        (dispatch, "_greedy_runs", lambda *kind: True),
        (greedy_head, "reduce_kernel", lambda: _kernel),
        *((module, "kernel", lambda *kind: _kernel) for module in KERNELS),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in swaps:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def primitives(*outputs: Any) -> Counter:
    """How often each primitive stands in the graph behind some outputs."""
    arrays = [x for _, x in tree_flatten(list(outputs)) if isinstance(x, mx.array)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *arrays)
        lines = file.read_text().splitlines()
    labels = (x.split('label ="')[1].split('"')[0] for x in lines if "label =" in x)
    return Counter(labels)


def launches(count: Counter) -> int:
    """The nodes that are work for the GPU."""
    return sum(n for name, n in count.items() if name not in VIEWS)
