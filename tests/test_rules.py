"""Sampling rules in the engine: coupling, acceptance, filters and noise."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from checks import engine_of, loop_of
from mlx_lm.sample_utils import apply_xtc, make_sampler

import mlx_mtp
from mlx_mtp.sampling import ACCEPTANCE, SamplingParams
from mlx_mtp.speculative import noise
from mlx_mtp.speculative.noise import Purpose

START = ord("Q")


def batch_run(engine, params: SamplingParams, seeds, k: int, count: int) -> np.ndarray:
    """The first ``count`` tokens of one run per seed."""
    engine.rule = params.rule(seeds)
    rows = [[] for _ in seeds]
    for result in loop_of(engine, [[START]] * len(seeds), k, count):
        for row, tokens in zip(rows, result.tokens):
            row += tokens
    return np.array([row[:count] for row in rows])


@pytest.mark.parametrize("temp", [0.3, 0.8, 1.5])
def test_coupled_is_the_same_for_every_k(random_dir, temp):
    """Also under a random head: 50 seeds, K = 0..6."""
    model, _ = mlx_mtp.load(random_dir)
    params = SamplingParams(temp=temp, top_p=0.95, acceptance="coupled")
    plain = batch_run(
        engine_of(model, head=False, batch_size=50), params, range(50), 0, 12
    )
    assert len(np.unique(plain, axis=0)) > 40  # seeds differ
    for k in range(1, 7):
        engine = engine_of(model, batch_size=50)
        assert (batch_run(engine, params, range(50), k, 12) == plain).all()


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_a_row_does_not_depend_on_its_neighbours(random_dir, acceptance):
    model, _ = mlx_mtp.load(random_dir)
    params = SamplingParams(temp=1.0, acceptance=acceptance)
    together = batch_run(engine_of(model, batch_size=3), params, [3, 4, 5], 2, 10)
    for seed, row in zip([3, 4, 5], together):
        alone = batch_run(engine_of(model), params, [seed], 2, 10)
        assert (alone[0] == row).all()


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_a_perfect_head_is_accepted(oracle_dir, acceptance):
    model, _ = mlx_mtp.load(oracle_dir)
    params = SamplingParams(temp=0.7, top_p=0.95, top_k=20, acceptance=acceptance)
    engine = engine_of(model, batch_size=20)
    engine.rule = params.rule(range(20))
    accepted = drafted = 0
    for result in loop_of(engine, [[START]] * 20, 3, 60):
        drafted += result.num_draft_tokens * 20
        accepted += sum(len(tokens) - 1 for tokens in result.tokens)
    assert accepted / drafted > 0.95


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_p": 0.6},
        {"top_k": 5},
        {"min_p": 0.2},
        {"min_p": 0.9, "min_tokens_to_keep": 3},
        {"top_p": 0.9, "min_p": 0.05, "top_k": 7},
    ],
)
def test_filters_are_mlx_lms(filters, dtype):
    """The support and the weights of mlx-lm's sampler, by its own categorical draw."""
    logits = (mx.random.normal((4, 30), key=mx.random.key(1)) * 2).astype(dtype)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    shape = SamplingParams(temp=0.7, **filters).shape_with(0)
    weights = shape(logprobs[:, None], mx.zeros((4, 1), mx.int32))[:, 0]
    assert weights.dtype == mx.float32
    sampler = make_sampler(temp=0.7, **filters)
    mx.random.seed(0)
    draws = np.array([sampler(logprobs).tolist() for _ in range(3000)])
    probs = np.array(mx.softmax(weights, axis=-1))
    for row in range(4):
        counts = np.bincount(draws[:, row], minlength=30)
        assert counts[probs[row] == 0].sum() == 0
        expected = probs[row] * 3000
        large = expected > 5
        statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[large]
        assert statistic.sum() < 3 * large.sum() + 30


def test_xtc_is_mlx_lms():
    logits = mx.random.normal((5, 40), key=mx.random.key(2)) * 2
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    params = SamplingParams(
        temp=1.0, xtc_probability=1.0, xtc_threshold=0.05, xtc_special_tokens=(3, 7)
    )
    got = params.shape_with(0)(logprobs[:, None], mx.zeros((5, 1)))[:, 0]
    want = apply_xtc(logprobs, 1.0, 0.05, [3, 7])
    assert mx.array_equal(got, want)
    assert mx.isinf(got).any()


def test_xtc_tosses_a_coin_per_position_and_shares_it():
    logprobs = mx.log(mx.array([[[0.5, 0.3, 0.2]]] * 200))
    params = SamplingParams(temp=1.0, xtc_probability=0.5, xtc_threshold=0.1)
    shape = params.shape_with(4)
    at = mx.arange(200)[:, None]
    first, again = shape(logprobs, at), shape(logprobs, at)
    assert mx.array_equal(first, again)
    dropped = mx.isinf(first).any(axis=-1).sum().item()
    assert 70 < dropped < 130


def test_noise_is_a_function_of_seed_and_place():
    keys = noise.keys(noise.stream(7), mx.array([[3, 4], [5, 3]]))
    drawn = noise.gumbel(keys, 20)
    single = mx.random.gumbel(shape=(20,), key=mx.array([7, 4], mx.uint32))
    assert mx.array_equal(drawn[0, 1], single)
    assert mx.array_equal(drawn[0, 0], drawn[1, 1])
    assert not mx.array_equal(drawn[0, 0], drawn[0, 1])
    uniform = noise.uniform(keys)
    assert uniform.shape == (2, 2)
    assert ((uniform >= 0) & (uniform < 1)).all()


def test_streams_of_a_seed_differ():
    streams = [noise.stream(7, p).item() for p in (None, *Purpose)]
    assert len(set(streams)) == len(streams)


def test_places_of_different_rounds_differ():
    starts = [noise.place_in_round(mx.array(s), mx.arange(9)).tolist() for s in (4, 5)]
    for a, b in pairwise(starts):
        assert not set(a) & set(b)


def test_large_and_negative_seeds():
    assert noise.fold(5) == 5
    assert 0 <= noise.fold(1 << 70) <= noise.WORD
    with pytest.raises(ValueError, match="seed"):
        noise.fold(-1)


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_the_global_random_state_is_left_alone(random_dir, acceptance):
    model, _ = mlx_mtp.load(random_dir)
    before = mx.array(mx.random.state[0])
    params = SamplingParams(
        temp=1.0, top_p=0.9, xtc_probability=0.5, seed=3, acceptance=acceptance
    )
    engine = engine_of(model)
    engine.rule = params.rule()
    list(loop_of(engine, [[START]], 2, 8))
    assert mx.array_equal(mx.random.state[0], before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temp": -1.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"min_tokens_to_keep": 0},
        {"xtc_probability": 1.1},
        {"xtc_threshold": 0.6},
        {"seed": -1},
        {"acceptance": "typical"},
    ],
)
def test_parameters_out_of_range(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        SamplingParams(**wrong)
