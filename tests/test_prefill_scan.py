"""MLX's own recurrence for long prompts, and the choice between it and mlx-lm's."""

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops, normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet

import mlx_mtp
from mlx_mtp.kernels import dispatch
from mlx_mtp.models.gated_delta_net import RewindableGatedDeltaNet
from mlx_mtp.speculative.cache import RecurrentCache


def layer_of(path) -> RewindableGatedDeltaNet:
    model, _ = mlx_mtp.load(path)
    return next(m for _, m in model.named_modules() if isinstance(m, GatedDeltaNet))


@pytest.mark.parametrize("length", [10, 63, 64, 65, 500, 1023])
def test_agrees_with_the_operations(length):
    """Bit for bit on a CPU, where both run the same steps; within 1e-4 on a GPU."""
    keys = iter(mx.random.split(mx.random.key(length), 6))
    shape = (2, length, 2, 32)
    q, k = (mx.random.normal(shape, key=next(keys)) for _ in range(2))
    q, k = normalize_qk(q, k, inv_scale=32**-0.5, eps=1e-6)
    v = mx.random.normal((2, length, 4, 16), key=next(keys))
    a, b = (mx.random.normal((2, length, 4), key=next(keys)) for _ in range(2))
    g, beta = compute_g(mx.zeros(4), a, mx.ones(4)), mx.sigmoid(b)
    state = mx.random.normal((2, 4, 16, 32), key=next(keys))
    ours = mx.fast.gated_delta_update(q, k, v, g, beta, initial_state=state)
    theirs = gated_delta_ops(q, k, v, g, beta, state)
    for x, y in zip(ours, theirs):
        assert x.shape == y.shape
        if mx.default_device() == mx.cpu:
            assert mx.array_equal(x, y)
        else:
            assert mx.allclose(x, y, atol=1e-4)


def run_layer(layer, parts, native, monkeypatch):
    """Outputs and states, by MLX's recurrence or by mlx-lm's."""
    calls, scan = [], RewindableGatedDeltaNet.native_scan

    def watched(self, block):
        calls.append(1)
        return scan(self, block)

    monkeypatch.setattr(dispatch, "native_scan", lambda *sizes: native)
    monkeypatch.setattr(layer, "native_scan", watched.__get__(layer), raising=False)
    cache = RecurrentCache(2)
    outputs = [layer(part, None, cache) for part in parts]
    assert len(calls) == native * len(parts)
    return [mx.concatenate(outputs, axis=1), *cache.cache]


@pytest.mark.parametrize("cached", [False, True])
def test_the_layer_on_it(random_dir, monkeypatch, cached):
    """An odd number of chunks, with and without a state from before."""
    layer = layer_of(random_dir)
    x = mx.random.normal((1, 48, layer.hidden_size), key=mx.random.key(0))
    parts = (x[:, :17], x[:, 17:]) if cached else (x,)
    ours, theirs = (run_layer(layer, parts, n, monkeypatch) for n in (True, False))
    for a, b in zip(ours, theirs):
        assert mx.allclose(a, b, atol=1e-5)


def test_chosen_only_where_it_is_one_node(monkeypatch):
    """On a CPU it is many: there, mlx-lm's own path stays."""
    arrays = [mx.zeros((1, 64, 2, 32)), mx.zeros((1, 64, 2, 32)), mx.zeros((1, 64, 2))]
    assert dispatch._is_one_node(*arrays) == (mx.default_device() == mx.gpu)
    monkeypatch.setattr(dispatch, "on_metal", lambda: True)
    monkeypatch.setattr(dispatch, "_is_one_node", lambda *arrays: True)
    assert dispatch.native_scan.__wrapped__(2, 2, 32, 32)
    monkeypatch.setattr(dispatch, "on_metal", lambda: False)
    assert not dispatch.native_scan.__wrapped__(2, 2, 32, 32)
