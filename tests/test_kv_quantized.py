"""Quantised KV caches: stock mlx-lm's bits with ``kv_bits``, whatever is drafted."""

import mlx.core as mx
import mlx_lm
import pytest
from checks import assert_same_stream, engine_of, loop_of, wrong_at
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_mtp
from mlx_mtp.speculative import loop as loop_module
from mlx_mtp.speculative.quantized_cache import (
    KVQuantization,
    QuantizedRewindableKVCache,
)

PROMPT = [ord(c) for c in "few bits"]
MORE = [ord(c) for c in " more"]
COUNT = 14
FORM = {"kv_bits": 4, "kv_group_size": 32}
# In the prompt's chunks of three: from the first on, inside the second, at its end, at
# the prompt's end; then in the output, and past it.
STARTS = [0, 5, 6, 8, 9, 12, 13, 16, 21, 22, 23]
KINDS = {
    "random": {"kind": "random"},
    "mixed": {"kind": "noisy"},
}


@pytest.fixture(scope="module", params=KINDS)
def path(request, make_model_dir, text_chain):
    """Two attention layers, so that a wrong cache in one shows in the other's."""
    args = dict(KINDS[request.param])
    if request.param == "mixed":
        args["succ"] = text_chain
        args["draft_succ"] = wrong_at(text_chain, range(0, len(text_chain), 5))
    return make_model_dir(
        f"kv {request.param}", layers=4, interval=2, head_dim=32, **args
    )


@pytest.fixture(scope="module")
def model(path):
    return mlx_mtp.load(path)[0]


@pytest.fixture(scope="module")
def stock(path):
    return mlx_lm.load(str(path))[0]


def stock_run(stock, prompt, count, cache=None, **options):
    """Stock mlx-lm's stream, and its caches when all of it is in them."""
    cache = stock_prompt_cache(stock) if cache is None else cache
    steps = generate_step(
        mx.array(prompt), stock, max_tokens=count, prompt_cache=cache, **options
    )
    return list(steps), cache


def our_run(model, prompt, count, k, cache, **options):
    options |= {"num_draft_tokens": k, "max_tokens": count, "prompt_cache": cache}
    return list(mlx_mtp.mtp_generate_step(prompt, model, **options))


def assert_same_caches(ours, theirs):
    """Kinds, positions and arrays, the packed ones included, to the last bit."""
    for layer, (a, b) in enumerate(zip(ours, theirs)):
        if not hasattr(b, "keys"):
            assert all(mx.array_equal(x, y) for x, y in zip(a.cache, b.cache)), layer
            continue
        assert hasattr(a, "bits") == hasattr(b, "bits"), f"layer {layer}: kind"
        if hasattr(b, "bits"):
            assert (a.bits, a.group_size) == (b.bits, b.group_size)
        size = b.offset
        assert mx.array(a.offset).item() == size
        pairs = zip(tree_flatten([a.keys, a.values]), tree_flatten([b.keys, b.values]))
        for (_, x), (name, y) in pairs:
            same = mx.array_equal(x[:, :, :size], y[:, :, :size])
            assert same, f"layer {layer}: array {name}"


@pytest.mark.parametrize("start", STARTS)
def test_equals_stock(model, stock, start):
    assert_equals_stock(model, stock, start, range(5))


def assert_equals_stock(model, stock, start, drafts):
    """Tokens, log-probabilities and the states behind them."""
    options = {"quantized_kv_start": start, "prefill_step_size": 3, **FORM}
    want, theirs = stock_run(stock, PROMPT, COUNT, **options)
    for k in drafts:
        cache = mlx_mtp.make_prompt_cache(model)
        got = our_run(model, PROMPT, COUNT, k, cache, **options)
        assert_same_stream(got, want)
        assert_same_caches(cache, theirs)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_bits(model, stock, bits):
    options = {"quantized_kv_start": 10, "kv_bits": bits, "kv_group_size": 32}
    want, theirs = stock_run(stock, PROMPT, COUNT, **options)
    cache = mlx_mtp.make_prompt_cache(model)
    assert_same_stream(our_run(model, PROMPT, COUNT, 3, cache, **options), want)
    assert_same_caches(cache, theirs)


@pytest.mark.parametrize("start", [0, 11])
@pytest.mark.parametrize("count", range(1, 7))
def test_stops_inside_a_block(model, stock, start, count):
    options = {"quantized_kv_start": start, **FORM}
    _, theirs = stock_run(stock, PROMPT, count, **options)
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=4, prompt_cache=cache, **options
    )
    for _ in range(count):
        next(steps)
    steps.close()
    assert_same_caches(cache, theirs)


def test_interrupted_when_the_prompt_is_done(model, stock):
    """The first round has switched already; the last token runs again, as in stock."""

    def interrupt(done, total):
        if done == total:
            raise KeyboardInterrupt

    options = {"quantized_kv_start": len(PROMPT), **FORM}
    cache = mlx_mtp.make_prompt_cache(model)
    with pytest.raises(KeyboardInterrupt):
        our_run(
            model, PROMPT, 9, 2, cache, prompt_progress_callback=interrupt, **options
        )
    _, theirs = stock_run(stock, PROMPT, 0, **options)
    assert_same_caches(cache, theirs)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("start", [0, 10, 24])
def test_turns_and_files(model, stock, tmp_path, k, start):
    """Over turns, through a file, and then in stock mlx-lm."""
    options = {"quantized_kv_start": start, **FORM}
    cache, theirs = mlx_mtp.make_prompt_cache(model), None
    for turn in range(3):
        prompt = [65 + turn, *MORE]
        want, theirs = stock_run(stock, prompt, 5, theirs, **options)
        assert_same_stream(our_run(model, prompt, 5, k, cache, **options), want)
        assert_same_caches(cache, theirs)
        file = str(tmp_path / "cache.safetensors")
        mlx_mtp.save_prompt_cache(file, cache)
        cache = mlx_mtp.load_prompt_cache(file)
        assert_same_caches(cache, theirs)
        assert (cache.head is None) == (k == 0)
    want, theirs = stock_run(stock, MORE, 4, theirs)
    got = list(generate_step(mx.array(MORE), model, max_tokens=4, prompt_cache=cache))
    assert_same_stream(got, want)
    assert_same_caches(cache, theirs)


@pytest.mark.parametrize("start", [0, 18])
def test_stock_lists(model, stock, start):
    """mlx-lm's own list: taken plain or quantised, given back quantised."""
    options = {"quantized_kv_start": start, **FORM}
    _, ours = stock_run(stock, PROMPT, 5, **options)
    _, theirs = stock_run(stock, PROMPT, 5, **options)
    want, theirs = stock_run(stock, MORE, 6, theirs, **options)
    assert_same_stream(our_run(model, MORE, 6, 3, ours, **options), want)
    assert sum(type(c) is QuantizedKVCache for c in ours) == 2
    assert_same_caches(ours, theirs)
    again, _ = stock_run(stock, MORE, 4, ours, **options)
    assert_same_stream(again, stock_run(stock, MORE, 4, theirs, **options)[0])


def test_stock_quantises_a_cache_of_ours(model, stock):
    options = {"quantized_kv_start": 10, **FORM}
    want, theirs = stock_run(stock, PROMPT, 6, **options)
    got, ours = stock_run(model, PROMPT, 6, mlx_mtp.make_prompt_cache(model), **options)
    assert_same_stream(got, want)
    assert_same_caches(ours, theirs)


def test_quantised_for_good(model, stock):
    """A later turn leaves the form of what has been quantised, as mlx-lm does."""
    cache = mlx_mtp.make_prompt_cache(model)
    _, theirs = stock_run(stock, PROMPT, 3, quantized_kv_start=0, **FORM)
    our_run(model, PROMPT, 3, 2, cache, quantized_kv_start=0, **FORM)
    other = {"quantized_kv_start": 0, "kv_bits": 8, "kv_group_size": 32}
    want, theirs = stock_run(stock, MORE, 5, theirs, **other)
    assert_same_stream(our_run(model, MORE, 5, 2, cache, **other), want)
    assert_same_caches(cache, theirs)


@pytest.mark.parametrize("start", [0, 11])
def test_processors_see_the_same(model, stock, start):
    """With processors a round is read before the next is built."""
    options = {"quantized_kv_start": start, "logits_processors": [shift], **FORM}
    want, theirs = stock_run(stock, PROMPT, COUNT, **options)
    cache = mlx_mtp.make_prompt_cache(model)
    assert_same_stream(our_run(model, PROMPT, COUNT, 3, cache, **options), want)
    assert_same_caches(cache, theirs)


def shift(tokens, logits):
    return logits + mx.arange(logits.shape[-1]) * (tokens.size % 3) / 64


def test_one_read_per_round_and_depths_agree(model, monkeypatch):
    """The switch is found without a host read; only rounds near it are narrowed."""
    reads = []
    right = loop_module.read
    monkeypatch.setattr(loop_module, "read", lambda x: reads.append(1) or right(x))
    seen = []
    for depth in (0, 1):
        engine = engine_of(model)
        engine.quantization = KVQuantization(4, 32, 20)
        rounds = list(loop_of(engine, [PROMPT], 3, 20, depth=depth))
        seen.append([token for r in rounds for token in r.tokens[0]][:20])
        widths = [r.num_draft_tokens for r in rounds]
        assert widths[1] == widths[-1] == 3
        assert 0 in widths[1:-1]
        assert len(reads) == len(rounds)
        reads.clear()
    assert seen[0] == seen[1]


def no_narrowing(monkeypatch):
    monkeypatch.setattr(KVQuantization, "drafts_within", lambda self, c, limit, k: k)


def one_position_late(monkeypatch):
    right = KVQuantization.apply
    monkeypatch.setattr(
        KVQuantization,
        "apply",
        lambda self, caches, size: right(self, caches, size - 1),
    )


def not_rewound(monkeypatch):
    monkeypatch.setattr(QuantizedRewindableKVCache, "keep", lambda self, n: None)


def scales_of_another_block(monkeypatch):
    right = QuantizedRewindableKVCache.stored

    def wrong(self, x):
        packed, scales, biases = right(self, x)
        return packed, mx.roll(scales, 1, axis=2), biases

    monkeypatch.setattr(QuantizedRewindableKVCache, "stored", wrong)


@pytest.mark.parametrize(
    "plant", [no_narrowing, one_position_late, not_rewound, scales_of_another_block]
)
def test_faults_show(model, stock, monkeypatch, plant):
    assert_equals_stock(model, stock, 10, [3])
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equals_stock(model, stock, 10, [3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bits": 7}, "kv_bits must be 2, 3, 4, 5, 6 or 8, not 7"),
        ({"kv_bits": 1}, "kv_bits"),
        ({"kv_bits": 4.0}, "kv_bits must be a whole number"),
        (
            {"kv_bits": 4},
            "kv_group_size 64 does not divide the model's head size of 32",
        ),
        ({"kv_bits": 4, "kv_group_size": 16}, "kv_group_size must be 32, 64 or 128"),
        ({"kv_bits": 4, "kv_group_size": 0}, "kv_group_size"),
        ({**FORM, "quantized_kv_start": -1}, "quantized_kv_start must be 0 or more"),
        ({**FORM, "quantized_kv_start": 1.5}, "quantized_kv_start must be a whole"),
    ],
)
def test_refusals(model, options, words):
    """At the call, on one line."""
    with pytest.raises(ValueError, match=words) as error:
        mlx_mtp.mtp_generate_step(PROMPT, model, **options)
    assert "\n" not in str(error.value)


def test_text_functions(model, path):
    _, tokenizer = mlx_mtp.load(path)
    options = {"quantized_kv_start": 4, "max_tokens": 8, **FORM}
    texts = {
        mlx_mtp.generate(model, tokenizer, "text", num_draft_tokens=k, **options)
        for k in (0, 2)
    }
    assert texts == {mlx_mtp.generate(model, tokenizer, "text", mtp=False, **options)}
    with pytest.raises(ValueError, match="kv_bits"):
        mlx_mtp.stream_generate(model, tokenizer, "text", kv_bits=9)
