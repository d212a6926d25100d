"""After every round, and after a stop inside one, the caches equal a fresh prefill."""

import mlx.core as mx
import pytest
from checks import (
    assert_head_state,
    assert_target_state,
    engine_of,
    loop_of,
    stock_state,
    stop_after,
    wrong_at,
)

import mlx_mtp

PROMPT = [ord(c) for c in "states and caches"]
PROMPTS = [PROMPT, PROMPT[:3], PROMPT[5:14]]


@pytest.fixture(scope="module", params=["random", "mixed"])
def path(request, make_model_dir, text_chain, random_dir):
    if request.param == "random":
        return random_dir
    draft_succ = wrong_at(text_chain, range(0, len(text_chain), 3))
    return make_model_dir(
        "mixed drafts", kind="noisy", succ=text_chain, draft_succ=draft_succ
    )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [1, 3])
def test_every_round(path, k, depth):
    model, _ = mlx_mtp.load(path)
    for rounds in (1, 2, 3, 5, 9):
        engine = engine_of(model)
        loop = loop_of(engine, [PROMPT], k, 60, depth=depth)
        (tokens,) = stop_after(loop, rounds)
        loop.stop([len(loop.last.tokens[0])])
        kept = PROMPT + tokens[:-1]  # the last token is pending
        assert_target_state(engine, stock_state(path, kept))
        assert_head_state(engine, PROMPT + tokens)


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_inside_an_accepted_block(noisy_dir, depth):
    """Nothing is run again, and nothing past the stop is left in the caches."""
    model, _ = mlx_mtp.load(noisy_dir)
    for count in (1, 2, 3, 4):
        engine = engine_of(model)
        loop = loop_of(engine, [PROMPT], 3, 60, depth=depth)
        (tokens,) = stop_after(loop, 4)
        assert len(loop.last.tokens[0]) == 4  # all three drafts were right
        loop.stop([count])
        kept = PROMPT + tokens[: len(tokens) - 4 + count]
        assert_target_state(engine, stock_state(noisy_dir, kept[:-1]))
        assert_head_state(engine, kept)


@pytest.mark.parametrize("step_size", [4, 2048])
def test_rows_of_different_length(path, step_size):
    """Each row of a batch has the state and the tokens of its solo run."""
    model, _ = mlx_mtp.load(path)
    engine = engine_of(model, batch_size=3)
    loop = loop_of(engine, PROMPTS, 3, 60, prefill_step_size=step_size)
    rows = stop_after(loop, 6)
    loop.stop([len(tokens) for tokens in loop.last.tokens])
    for b, (prompt, tokens) in enumerate(zip(PROMPTS, rows)):
        assert_target_state(engine, stock_state(path, prompt + tokens[:-1]), b)
        assert_head_state(engine, prompt + tokens, b)
        solo = loop_of(engine_of(model), [prompt], 3, 60)
        (alone,) = stop_after(solo, 6)
        assert tokens == alone


def test_recurrent_state_stays_float32(make_model_dir):
    path = make_model_dir("bfloat16 states", dtype=mx.bfloat16)
    model, _ = mlx_mtp.load(path)
    engine = engine_of(model)
    loop = loop_of(engine, [PROMPT], 2, 20)
    stop_after(loop, 6)
    loop.stop([1])
    assert engine.cache[0][1].dtype == mx.float32


def test_continue_after_a_stop(noisy_dir):
    """Caches cut inside a block go on in stock mlx-lm as a cold run would."""
    model, _ = mlx_mtp.load(noisy_dir)
    engine = engine_of(model)
    loop = loop_of(engine, [PROMPT], 4, 60)
    (tokens,) = stop_after(loop, 4)
    loop.stop([2])
    text = PROMPT + tokens[: len(tokens) - len(loop.last.tokens[0]) + 2]
    more = [97, 98]
    got = model(mx.array([[text[-1], *more]]), cache=engine.cache)
    want = model(mx.array([[*text, *more]]))
    assert mx.array_equal(got, want[:, -3:])
