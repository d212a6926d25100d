"""Prompt caches over turns: exact after every kind of stop, head included."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from checks import (
    assert_head_state,
    assert_same_stream,
    assert_target_state,
    engine_of,
    plain_stream,
    stock_state,
    wrong_at,
)
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import can_trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_mtp

PROMPT = [ord(c) for c in "first turn"]
MORE = [ord(c) for c in " and a second"]


@pytest.fixture(scope="module", params=["random", "noisy", "mixed"])
def path(request, random_dir, noisy_dir, make_model_dir, text_chain):
    if request.param == "mixed":
        draft_succ = wrong_at(text_chain, range(0, len(text_chain), 3))
        return make_model_dir(
            "mixed turns", kind="noisy", succ=text_chain, draft_succ=draft_succ
        )
    return {"random": random_dir, "noisy": noisy_dir}[request.param]


@pytest.fixture(scope="module")
def model(path):
    return mlx_mtp.load(path)[0]


def assert_whole(model, path, cache, text):
    """Target and head have seen the text exactly, but for the head's last pair."""
    assert cache.tokens == text
    holder = SimpleNamespace(cache=cache)
    assert_target_state(holder, stock_state(path, text))
    engine = engine_of(model)
    engine.drafter.cache = cache.head
    assert cache.head.offset.item() == len(text) - 1
    assert_head_state(engine, text)
    hidden = engine.target.hidden(mx.array([text]), engine.target.make_cache())
    assert mx.array_equal(cache.carry, hidden[:, -1:])


def assert_next_turn(model, path, cache, text, k):
    """The next turn's log-probabilities are those of a cold run."""
    got = list(
        mlx_mtp.mtp_generate_step(
            MORE, model, num_draft_tokens=k, max_tokens=10, prompt_cache=cache
        )
    )
    assert_same_stream(got, plain_stream(path, text + MORE, 10))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("count", range(1, 8))
def test_limit(model, path, k, count):
    """Every place in a block where a limit can cut it."""
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=k, max_tokens=count, prompt_cache=cache
    )
    text = PROMPT + [token for token, *_ in steps]
    assert_whole(model, path, cache, text)
    assert_next_turn(model, path, cache, text, k)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("how", ["close", "left alone", "dropped"])
def test_a_run_that_is_not_read_to_its_end(model, path, k, count, how):
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=k, max_tokens=40, prompt_cache=cache
    )
    text = PROMPT + [next(steps)[0] for _ in range(count)]
    if how == "close":
        steps.close()
        assert_whole(model, path, cache, text)
    if how == "dropped":
        del steps
        assert_whole(model, path, cache, text)
    assert_next_turn(model, path, cache, text, k)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_end_token(noisy_dir, k):
    """The end token is in the cache, as mlx-lm leaves it."""
    model, tokenizer = mlx_mtp.load(noisy_dir)
    cache = mlx_mtp.make_prompt_cache(model)
    responses = list(
        mlx_mtp.stream_generate(
            model, tokenizer, "Q", num_draft_tokens=k, prompt_cache=cache
        )
    )
    assert responses[-1].finish_reason == "stop"
    text = [ord("Q"), *[r.token for r in responses]]
    assert_whole(model, noisy_dir, cache, text)
    assert_next_turn(model, noisy_dir, cache, text, k)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_stop_string(noisy_dir, k):
    """The cache holds the tokens that went out, those of the stop string included."""
    model, tokenizer = mlx_mtp.load(noisy_dir)
    cache = mlx_mtp.make_prompt_cache(model)
    responses = mlx_mtp.stream_generate(
        model, tokenizer, "Q", num_draft_tokens=k, prompt_cache=cache, stop="é"
    )
    tokens = []
    for response in responses:  # not exhausted: the last response ends the run
        tokens.append(response.token)
        if response.finish_reason:
            break
    text = [ord("Q"), *tokens]
    assert_whole(model, noisy_dir, cache, text)
    assert_next_turn(model, noisy_dir, cache, text, k)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_exception_in_a_processor(model, path, k, calls):
    """What went out before the exception is in the cache, nothing else."""
    seen = []

    def fails(tokens, logits):
        seen.append(tokens.size)
        if len(seen) > calls:
            raise ArithmeticError("on purpose")
        return logits

    cache = mlx_mtp.make_prompt_cache(model)
    text = list(PROMPT)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT,
        model,
        num_draft_tokens=k,
        prompt_cache=cache,
        logits_processors=[fails],
    )
    with contextlib.suppress(ArithmeticError):
        for token, *_ in steps:
            text.append(token)
    assert len(seen) == calls + 1
    assert_whole(model, path, cache, text)
    assert_next_turn(model, path, cache, text, k)


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_interrupted_prefill(model, path, done):
    """The chunks that were done stay; the text can go on from there."""

    def interrupt(tokens, total):
        if tokens == 3 * done:
            raise KeyboardInterrupt

    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT,
        model,
        prefill_step_size=3,
        prompt_progress_callback=interrupt,
        prompt_cache=cache,
    )
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert cache.tokens == PROMPT[: len(cache.tokens)]
    assert len(cache.tokens) in (3 * done, len(PROMPT))
    assert_next_turn(model, path, cache, list(cache.tokens), 2)


def count_positions(model, monkeypatch):
    """Positions that the target runs, from now on."""
    from mlx_mtp.models.target import Target

    counted, right = [], Target.hidden

    def spy(self, tokens, cache):
        counted.append(tokens.shape[1])
        return right(self, tokens, cache)

    monkeypatch.setattr(Target, "hidden", spy)
    return counted


@pytest.mark.parametrize("k", [1, 3])
def test_a_turn_runs_its_new_tokens_only(model, monkeypatch, k):
    cache = mlx_mtp.make_prompt_cache(model)
    list(
        mlx_mtp.mtp_generate_step(
            PROMPT * 20, model, num_draft_tokens=k, max_tokens=6, prompt_cache=cache
        )
    )
    counted = count_positions(model, monkeypatch)
    steps = mlx_mtp.mtp_generate_step(
        MORE, model, num_draft_tokens=k, max_tokens=1, prompt_cache=cache
    )
    next(steps)
    assert sum(counted) == len(MORE)


def test_a_stop_inside_a_block_runs_nothing_again(noisy_dir, monkeypatch):
    model, _ = mlx_mtp.load(noisy_dir)
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=4, max_tokens=40, prompt_cache=cache
    )
    for _ in range(3):  # the first token, then two of a block of five
        next(steps)
    counted = count_positions(model, monkeypatch)
    steps.close()
    assert counted == []


@pytest.mark.parametrize("k", [1, 3])
def test_many_turns(model, path, k):
    cache, text = mlx_mtp.make_prompt_cache(model), []
    for turn in range(4):
        prompt = [65 + turn, *MORE[: turn + 1]]
        steps = mlx_mtp.mtp_generate_step(
            prompt, model, num_draft_tokens=k, max_tokens=5 + turn, prompt_cache=cache
        )
        text += prompt + [token for token, *_ in steps]
    assert_whole(model, path, cache, text)


def test_coupled_goes_on_as_one_run(model):
    """A stream that is cut and resumed is the same text."""
    options = {"temp": 1.0, "seed": 3, "acceptance": "coupled"}
    whole = [
        token
        for token, *_ in mlx_mtp.mtp_generate_step(
            PROMPT, model, max_tokens=12, **options
        )
    ]
    cache = mlx_mtp.make_prompt_cache(model)
    first = [
        token
        for token, *_ in mlx_mtp.mtp_generate_step(
            PROMPT, model, max_tokens=5, prompt_cache=cache, **options
        )
    ]
    # The text goes on with the token that comes next.
    rest = [
        token
        for token, *_ in mlx_mtp.mtp_generate_step(
            [whole[5]], model, max_tokens=6, prompt_cache=cache, **options
        )
    ]
    assert [*first, whole[5], *rest] == whole


@pytest.mark.parametrize("k", [1, 3])
def test_stock_caches(model, path, k):
    """mlx-lm's own list: filled by it, used here, used by it again."""
    stock_model, _ = mlx_lm.load(str(path))
    cache = stock_prompt_cache(stock_model)
    steps = generate_step(
        mx.array(PROMPT), stock_model, max_tokens=4, prompt_cache=cache
    )
    # mlx-lm works one step ahead, so its cache holds all that it has yielded.
    text = PROMPT + [token for token, _ in steps]
    got = list(
        mlx_mtp.mtp_generate_step(
            MORE, model, num_draft_tokens=k, max_tokens=7, prompt_cache=cache
        )
    )
    assert_same_stream(got, plain_stream(path, text + MORE, 7))
    text += MORE + [token for token, *_ in got]
    assert [type(c).__name__ for c in cache].count("KVCache") == 1
    assert_target_state_of_stock(cache, stock_state(path, text))
    again = list(
        generate_step(mx.array(MORE), stock_model, max_tokens=4, prompt_cache=cache)
    )
    assert_same_stream([(t, lp) for t, lp in again], plain_stream(path, text + MORE, 4))


def assert_target_state_of_stock(cache, stock):
    for ours, theirs in zip(cache, stock):
        if hasattr(theirs, "keys"):
            size = theirs.offset
            assert ours.offset == size
            assert mx.array_equal(ours.keys[..., :size, :], theirs.keys[..., :size, :])
        else:
            assert all(mx.array_equal(a, b) for a, b in zip(ours.cache, theirs.cache))


def test_a_cache_of_ours_in_stock_mlx_lm(model, path):
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=3, max_tokens=6, prompt_cache=cache
    )
    text = PROMPT + [token for token, *_ in steps]
    got = list(generate_step(mx.array(MORE), model, max_tokens=5, prompt_cache=cache))
    assert_same_stream(got, plain_stream(path, text + MORE, 5))
    # And here again: what others have added is in the states, not in the head.
    text += MORE + [token for token, _ in got]
    assert_next_turn(model, path, cache, text, 3)
    assert cache.tokens[len(text) :][: len(MORE)] == MORE


def test_plain_then_mtp_and_back(model, path):
    cache, text = mlx_mtp.make_prompt_cache(model), []
    for k in (0, 3, 0, 2):
        steps = mlx_mtp.mtp_generate_step(
            PROMPT, model, num_draft_tokens=k, max_tokens=5, prompt_cache=cache
        )
        text += PROMPT + [token for token, *_ in steps]
    assert cache.tokens == text
    assert_target_state(SimpleNamespace(cache=cache), stock_state(path, text))
    assert_next_turn(model, path, cache, text, 2)


def test_saved_here_loaded_in_another_process(model, path, tmp_path):
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=3, max_tokens=6, prompt_cache=cache
    )
    text = PROMPT + [token for token, *_ in steps]
    file = tmp_path / "cache.safetensors"
    mlx_mtp.save_prompt_cache(file, cache, {"model": "tiny"})
    script = (
        "import sys, mlx_mtp\n"
        "model, _ = mlx_mtp.load(sys.argv[1])\n"
        "cache, meta = mlx_mtp.load_prompt_cache(sys.argv[2], return_metadata=True)\n"
        "assert meta == {'model': 'tiny'}\n"
        f"steps = mlx_mtp.mtp_generate_step({MORE}, model, num_draft_tokens=3,\n"
        "    max_tokens=9, prompt_cache=cache)\n"
        "print([(t, d) for t, _, d in steps])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    got = mlx_mtp.mtp_generate_step(
        MORE, model, num_draft_tokens=3, max_tokens=9, prompt_cache=cache
    )
    assert done.stdout.strip() == str([(t, d) for t, _, d in got])
    loaded = mlx_mtp.load_prompt_cache(file)
    assert_whole(model, path, loaded, text)


def test_trimming_is_honest(model):
    cache = mlx_mtp.make_prompt_cache(model)
    list(mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=3, prompt_cache=cache))
    assert not can_trim_prompt_cache(cache)


def test_refusals(model, tmp_path):
    with pytest.raises(ValueError, match="max_kv_size 16 is not supported"):
        mlx_mtp.make_prompt_cache(model, max_kv_size=16)
    with pytest.raises(ValueError, match="empty"):
        mlx_mtp.save_prompt_cache(tmp_path / "x", mlx_mtp.make_prompt_cache(model))
    with pytest.raises(ValueError, match="make_prompt_cache"):
        mlx_mtp.save_prompt_cache(tmp_path / "x", stock_prompt_cache(model))
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"a": mx.zeros(1)})
    with pytest.raises(ValueError, match="no prompt cache"):
        mlx_mtp.load_prompt_cache(tmp_path / "other.safetensors")
    cache = mlx_mtp.make_prompt_cache(model)
    with pytest.raises(ValueError, match="layers"):
        mlx_mtp.mtp_generate_step(PROMPT, model, prompt_cache=cache[:2])
