"""The greedy head's kernels: the token that ``mx.argmax`` of the logits gives."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mtp.kernels import greedy_head

from . import ORDERS, KernelFault, run_kernel


@pytest.fixture
def on_harness(monkeypatch):
    make, make_reduce = greedy_head.kernel.__wrapped__, greedy_head.reduce_kernel

    def change(fault=("", ""), **options):
        for name in ("SOURCE", "DENSE", "REDUCE"):
            text = getattr(greedy_head, name)
            monkeypatch.setattr(greedy_head, name, text.replace(*fault))
        launch = {q: partial(run_kernel, make(q), **options) for q in (False, True)}
        reduce = partial(run_kernel, make_reduce.__wrapped__(), **options)
        monkeypatch.setattr(greedy_head, "kernel", launch.get)
        monkeypatch.setattr(greedy_head, "reduce_kernel", lambda: reduce)

    return change


def layer_of(vocab, size, dtype, bits=None, tied=False, seed=0):
    weight = mx.random.normal((vocab, size), key=mx.random.key(seed)) * size**-0.5
    layer = nn.Embedding(vocab, size) if tied else nn.Linear(size, vocab, bias=False)
    layer.weight = weight
    if bits:
        layer = layer.to_quantized(32, bits)
    layer.set_dtype(dtype)
    return layer


LAYERS = [
    (129, 96, mx.float32, None, False),
    (200, 64, mx.bfloat16, None, True),
    (64, 100, mx.float16, None, False),
    (130, 64, mx.float32, 4, True),
    (65, 96, mx.bfloat16, 8, False),
    (128, 64, mx.float16, 2, False),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_token(on_harness, layer, order):
    on_harness(order=order)
    _, size, dtype, *_ = layer
    layer = layer_of(*layer)
    x = mx.random.normal((2, 3, size), key=mx.random.key(1)).astype(dtype)
    assert greedy_head.covers(layer, dtype)
    got, want = greedy_head.greedy_head(x, layer), greedy_head.greedy_head_ops(x, layer)
    assert got.shape == want.shape
    logits = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
    logits = np.array(logits.astype(mx.float32))
    # Sums in another order may round to a neighbour: then it is as good as the best.
    chosen = np.take_along_axis(logits, np.array(got)[..., None], axis=-1)[..., 0]
    step = {mx.float32: 1e-6, mx.bfloat16: 2**-7, mx.float16: 2**-10}[dtype]
    assert (chosen >= logits.max(-1) * (1 - step)).all()
    assert (np.array(got) == np.array(want)).mean() > 0.5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ties", [[0, 199], [7, 8], [63, 64], [70, 71, 135], [199]])
def test_first_of_equal_logits(on_harness, ties, order):
    on_harness(order=order)
    layer = nn.Linear(32, 200, bias=False)
    weight = np.zeros((200, 32), np.float32)
    weight[:, 0] = -1
    weight[ties, 0] = 3
    layer.weight = mx.array(weight)
    token = greedy_head.greedy_head(mx.ones((1, 1, 32)), layer)
    assert (
        token.item() == greedy_head.greedy_head_ops(mx.ones((1, 1, 32)), layer).item()
    )
    assert token.item() == ties[0]


@pytest.mark.parametrize("order", ORDERS)
def test_exact_where_sums_are(on_harness, order):
    """Small integers: no rounding, many ties."""
    on_harness(order=order)
    rng = np.random.default_rng(0)
    layer = nn.Linear(64, 300, bias=False)
    layer.weight = mx.array(rng.integers(-2, 3, (300, 64)).astype(np.float32))
    x = mx.array(rng.integers(-1, 2, (4, 2, 64)).astype(np.float32))
    got = greedy_head.greedy_head(x, layer)
    assert mx.array_equal(got, greedy_head.greedy_head_ops(x, layer))


def test_no_row_is_read_past_the_vocabulary(on_harness):
    on_harness(("metal::min(first + i, V - 1)", "first + i"))
    with pytest.raises(KernelFault):
        greedy_head.greedy_head(mx.ones((1, 1, 96)), layer_of(129, 96, mx.float32))


FAULTS = {
    "last of equal": ("logit > best", "logit >= best"),
    "missing barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "a SIMD group forgotten": ("s = 1; s < 8", "s = 1; s < 7"),
    "chunks in the wrong order": ("simd_min(best ==", "simd_max(best =="),
    "a chunk forgotten": ("c < CHUNKS;", "c < CHUNKS - 1;"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_is_noticed(on_harness, fault):
    """Every logit has its equal next to it and further on; once the last is best."""
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.integers(-1, 2, (75, 64)), 2, axis=0).astype(np.float32)
    weight = np.concatenate([rows, rows])
    x = mx.array(rng.integers(-1, 2, (16, 2, 64)).astype(np.float32))
    weight[-1] = 9 * np.array(x)[0, 0]
    layer = nn.Linear(64, len(weight), bias=False)
    layer.weight = mx.array(weight)
    want = greedy_head.greedy_head_ops(x, layer)
    right = []
    for order in ORDERS:
        on_harness(fault, order=order)
        right.append(mx.array_equal(greedy_head.greedy_head(x, layer), want).item())
    assert not all(right)


def test_what_is_not_covered():
    layer = nn.Linear(64, 128)
    assert not greedy_head.covers(layer, mx.float32)  # a bias
    layer = nn.Linear(64, 128, bias=False)
    assert not greedy_head.covers(layer, mx.bfloat16)
    assert not greedy_head.covers(layer.to_quantized(32, 3), mx.float32)
    assert not greedy_head.covers(layer.to_quantized(32, 4, "mxfp4"), mx.float32)
