"""A model end to end on the kernels, as on a Mac, against MLX's operations."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from checks import engine_of, loop_of, mtp_stream, plain_stream, stop_after
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_next

import mlx_mtp
from mlx_mtp.kernels import dispatch, gated_delta_verify
from mlx_mtp.models.gated_delta_net import (
    KernelBlock,
    RewindableGatedDeltaNet,
    RewindableQwen3NextGatedDeltaNet,
)
from mlx_mtp.speculative.cache import MAX_BLOCK, RecurrentCache

PROMPT = [ord(c) for c in "Qa verify step"]
PROMPTS = [PROMPT, PROMPT[:1], PROMPT[3:9]]


@pytest.fixture(scope="module")
def path(make_model_dir, text_chain):
    """Head sizes that the kernels cover; a third of the drafts is wrong."""
    draft_succ = text_chain.copy()
    draft_succ[::3] = (draft_succ[::3] + 7) % len(draft_succ)
    return make_model_dir(
        "kernel sizes", kind="noisy", succ=text_chain, draft_succ=draft_succ,
        dk=64, dv=32,
    )  # fmt: skip


def layer_of(model) -> RewindableGatedDeltaNet:
    return next(m for _, m in model.named_modules() if hasattr(m, "conv1d"))


def watch(monkeypatch):
    """Count the launches of the verify kernel."""
    launches, kernel = [], gated_delta_verify.kernel()
    monkeypatch.setattr(
        gated_delta_verify,
        "kernel",
        lambda: lambda **call: launches.append(1) or kernel(**call),
    )
    return launches


@pytest.mark.parametrize("k", [0, 1, 3])
def test_tokens_equal_plain_decoding(path, as_on_metal, monkeypatch, k):
    """With greedy drafts from the greedy head's kernel."""
    launches = watch(monkeypatch)
    model, _ = mlx_mtp.load(path)
    got = mtp_stream(model, PROMPT, 16, k)
    want = plain_stream(path, PROMPT, 16)
    assert [token for token, *_ in got] == [token for token, _ in want]
    for (_, ours, _), (_, theirs) in zip(got, want):
        assert mx.allclose(ours, theirs, atol=1e-4)
    layers = sum(layer.is_linear for layer in model.layers)
    rounds = len(got) - sum(drafted for *_, drafted in got)
    assert len(launches) >= layers * rounds  # it ran on the kernels
    assert k == 0 or rounds < len(got)


def test_greedy_drafts_come_from_the_kernel(path, as_on_metal, monkeypatch):
    """The same drafts as by the logits, and no head's logits are computed."""
    model, _ = mlx_mtp.load(path)
    want = [drafted for *_, drafted in mtp_stream(model, PROMPT, 12, 2)]
    monkeypatch.setattr(dispatch, "greedy_usable", lambda *layer: False)
    assert [drafted for *_, drafted in mtp_stream(model, PROMPT, 12, 2)] == want
    assert any(want)


def test_no_logits_for_greedy_drafts(path, as_on_metal, monkeypatch):
    def forbidden(*_):
        raise AssertionError("logits of a greedy draft")

    model, _ = mlx_mtp.load(path)
    monkeypatch.setattr(type(model.mtp), "logits", forbidden)
    mtp_stream(model, PROMPT, 6, 2)
    with pytest.raises(AssertionError, match="logits of a greedy draft"):
        mtp_stream(model, PROMPT, 6, 2, temp=1.0)


def test_rows_of_a_batch(path, as_on_metal):
    """Different accept counts per row, one of the prompts a single token."""
    model, _ = mlx_mtp.load(path)
    rows = stop_after(loop_of(engine_of(model, batch_size=3), PROMPTS, 2, 40), 5)
    for prompt, tokens in zip(PROMPTS, rows):
        want = plain_stream(path, prompt, len(tokens))
        assert tokens == [token for token, _ in want]


def test_a_stop_inside_a_block_leaves_the_right_state(path, as_on_metal, monkeypatch):
    model, _ = mlx_mtp.load(path)
    engine = engine_of(model)
    loop = loop_of(engine, [PROMPT], 3, 40)
    (tokens,) = stop_after(loop, 4)
    loop.stop([1])
    kept = PROMPT + tokens[: len(tokens) - len(loop.last.tokens[0])]
    monkeypatch.setattr(dispatch, "on_metal", lambda: False)
    fresh = engine_of(model)
    fresh.target.hidden(mx.array([kept]), fresh.cache)
    for ours, theirs in zip(engine.cache, fresh.cache):
        if isinstance(ours, RecurrentCache):
            assert mx.allclose(ours[0], theirs[0], atol=1e-5)
            assert mx.allclose(ours[1], theirs[1], atol=1e-5)


@pytest.mark.parametrize("num_rows", range(1, MAX_BLOCK + 1))
def test_commit_equals_a_fresh_run(path, as_on_metal, monkeypatch, num_rows):
    """For every accept count of a block, each in a row of its own."""
    layer = layer_of(mlx_mtp.load(path)[0])
    rows = num_rows + 1
    x = mx.random.normal((rows, 11 + num_rows, layer.hidden_size), key=mx.random.key(0))
    cache = RecurrentCache(2)
    layer(x[:, :11], None, cache)  # a prefill: too long for the kernels
    layer(x[:, 11:], None, cache)
    assert isinstance(cache.block, KernelBlock)
    if num_rows > 1:
        cache.keep(mx.arange(rows))
    cache.commit()
    monkeypatch.setattr(dispatch, "on_metal", lambda: False)
    for n in range(rows) if num_rows > 1 else [num_rows]:
        fresh = RecurrentCache(2)
        layer(x[n : n + 1, : 11 + n], None, fresh)
        assert mx.allclose(cache[0][n], fresh[0][0], atol=1e-6)
        assert mx.allclose(cache[1][n], fresh[1][0], atol=1e-5)


def test_bfloat16_rounds_as_stock(make_model_dir, as_on_metal):
    """One layer over two blocks; where a value is rounded decides a last bit or two."""
    path = make_model_dir("kernel bfloat16", dk=32, dv=32, dtype=mx.bfloat16)
    layer = layer_of(mlx_mtp.load(path)[0])
    x = mx.random.normal((1, 8, layer.hidden_size), key=mx.random.key(1))
    x, cache = x.astype(mx.bfloat16), RecurrentCache(2)
    ours = [layer(x[:, :3], None, cache), layer(x[:, 3:], None, cache)]
    theirs = layer(x)
    ours = mx.concatenate(ours, axis=1)
    assert ours.dtype == theirs.dtype == mx.bfloat16
    a, b = (np.array(y.astype(mx.float32)) for y in (ours, theirs))
    assert np.abs(a - b).max() <= 2**-6 * np.abs(b).max()


@pytest.mark.parametrize("quantized", [False, True])
def test_joined_projections(make_model_dir, quantized, tmp_path, as_on_metal):
    """Bit-equal rows; the same parameters and, in memory, the same bytes."""
    convert_args = {"quantize": True, "q_bits": 4, "q_group_size": 32}
    path = make_model_dir(
        f"joined {quantized}", convert_args if quantized else None, dk=32, dv=32
    )
    model, _ = mlx_mtp.load(path)
    layer = layer_of(model)
    assert layer._joined is not None
    assert layer._joined.stands(layer)
    x = mx.random.normal((2, 3, layer.hidden_size), key=mx.random.key(2))
    joined = [columns.sliced() for columns in layer.project(x)]
    weight = layer.in_proj_a.weight
    layer.in_proj_a.weight = weight * 1
    assert not layer._joined.stands(layer)  # as with an adapter
    single = [columns.sliced() for columns in layer.project(x)]
    assert all(mx.array_equal(a, b) for a, b in zip(joined, single))
    layer.in_proj_a.weight = weight
    assert layer._joined.stands(layer)

    stored = mx.load(str(path / "model.safetensors"))
    parameters = dict(tree_flatten(model.parameters()))
    mtp = {name for name in parameters if name.startswith("mtp.")}
    assert set(parameters) - mtp == set(stored)
    assert all(mx.array_equal(parameters[name], x) for name, x in stored.items())


def test_joined_projections_are_the_only_copy():
    from mlx import nn

    from mlx_mtp.models.joined_linear import joined

    mx.clear_cache()
    before = mx.get_active_memory()
    layers = {name: nn.Linear(512, 1024, bias=False) for name in "abcd"}
    mx.eval([layer.parameters() for layer in layers.values()])
    single = mx.get_active_memory() - before
    one = joined(layers)
    mx.eval(one.arrays, [layer.parameters() for layer in layers.values()])
    assert mx.get_active_memory() - before < 1.1 * single


def test_a_kernel_that_does_not_compile(path, as_on_metal, monkeypatch):
    """Said once, by name; the output is plain decoding's all the same."""

    def broken(**call):
        raise RuntimeError("[metal::Device] Unable to build metal library\nmore")

    monkeypatch.setattr(gated_delta_verify, "kernel", lambda: broken)
    model, _ = mlx_mtp.load(path)
    with pytest.warns(RuntimeWarning, match="gated_delta_verify") as caught:
        got = mtp_stream(model, PROMPT, 12, 2)
    assert len(caught) == 1
    want = plain_stream(path, PROMPT, 12)
    assert [token for token, *_ in got] == [token for token, _ in want]
    _, tokenizer = mlx_mtp.load(path)
    (*_, last) = mlx_mtp.stream_generate(model, tokenizer, PROMPT, max_tokens=3)
    (note,) = last.stats.notes
    assert "gated_delta_verify" in note
    assert "Unable to build" in note


def test_other_shapes_run_on_the_operations(random_dir, as_on_metal, monkeypatch):
    """Heads of 16: no kernel is launched, and nothing is said."""
    launches = watch(monkeypatch)
    model, _ = mlx_mtp.load(random_dir)
    got = mtp_stream(model, PROMPT, 6, 2)
    want = plain_stream(random_dir, PROMPT, 6)
    assert [token for token, *_ in got] == [token for token, _ in want]
    assert not launches


@pytest.mark.parametrize(
    ("change", "covered"),
    [
        ({}, True),
        ({"Dk": 256, "Dv": 32}, True),
        ({"Dk": 48}, False),
        ({"Dv": 288}, False),
        ({"Hk": 3}, False),
        ({"W": 1}, False),
        ({"dtype": mx.float64}, False),
    ],
    ids=str,
)
def test_what_is_covered(change, covered):
    sizes = dispatch.Sizes(2, 4, 64, 32, 4, mx.bfloat16)._replace(**change)
    assert dispatch.covers(sizes) == covered


def test_qwen3_next_layer(as_on_metal, monkeypatch):
    """Its projections are reordered, so the kernels get them one by one."""
    args = SimpleNamespace(
        hidden_size=64, rms_norm_eps=1e-6, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=64, linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
    )  # fmt: skip
    stock = qwen3_next.Qwen3NextGatedDeltaNet(args).eval()
    layer = RewindableQwen3NextGatedDeltaNet.from_base(stock)
    x = mx.random.normal((2, 7, 64), key=mx.random.key(4))
    cache = RecurrentCache(2)
    first = layer(x[:, :4], None, cache)
    cache.keep(mx.array([2, 4]))
    second = layer(x[:, 4:], None, cache)
    assert isinstance(cache.block, KernelBlock)
    for row, kept in enumerate((2, 4)):
        text = mx.concatenate([x[row : row + 1, :kept], x[row : row + 1, 4:]], axis=1)
        want = stock(text)
        assert mx.allclose(first[row, :kept], want[0, :kept], atol=1e-5)
        assert mx.allclose(second[row], want[0, kept:], atol=1e-5)
