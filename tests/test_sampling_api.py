"""Sampling, samplers, penalties and stops through the public functions."""

import json

import mlx.core as mx
import numpy as np
import pytest
from checks import assert_same_stream
from conftest import TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_mtp
from mlx_mtp.generate_cli import main

PROMPT = [ord(c) for c in "sampling"]
COUPLED = {"temp": 0.8, "top_p": 0.95, "seed": 7, "acceptance": "coupled"}


@pytest.fixture(scope="module")
def random_loaded(random_dir):
    return mlx_mtp.load(random_dir)


@pytest.fixture(scope="module")
def oracle_loaded(oracle_dir):
    return mlx_mtp.load(oracle_dir)


def tokens_of(loaded, prompt=PROMPT, **options):
    options = {"max_tokens": 16} | options
    return [r.token for r in mlx_mtp.stream_generate(*loaded, prompt, **options)]


@pytest.mark.parametrize("k", range(7))
def test_coupled_with_and_without_mtp(random_loaded, k):
    want = tokens_of(random_loaded, mtp=False, **COUPLED)
    assert tokens_of(random_loaded, num_draft_tokens=k, **COUPLED) == want
    model, _ = random_loaded
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=k, max_tokens=16, **COUPLED
    )
    assert [token for token, *_ in steps][: len(want)] == want


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_seeds(random_loaded, acceptance, mtp):
    options = {"temp": 1.0, "acceptance": acceptance, "mtp": mtp}
    first = tokens_of(random_loaded, seed=1, **options)
    assert tokens_of(random_loaded, seed=1, **options) == first
    assert tokens_of(random_loaded, seed=2, **options) != first


def test_no_seed_follows_the_global_one(random_loaded):
    options = {"temp": 1.0, "num_draft_tokens": 2}
    mx.random.seed(4)
    first, second = (tokens_of(random_loaded, **options) for _ in range(2))
    assert first != second
    mx.random.seed(4)
    assert tokens_of(random_loaded, **options) == first


def test_greedy_draws_nothing(random_loaded):
    before = mx.array(mx.random.state[0])
    tokens_of(random_loaded, temp=0.0)
    assert mx.array_equal(mx.random.state[0], before)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_callers_sampler(random_loaded, random_dir, k):
    """Any function of the log-probabilities; here the second most likely token."""

    def second(logprobs):
        return mx.argsort(logprobs, axis=-1)[:, -2]

    model, _ = random_loaded
    want = list(generate_step(mx.array(PROMPT), model, max_tokens=12, sampler=second))
    got = mlx_mtp.mtp_generate_step(
        PROMPT, model, max_tokens=12, num_draft_tokens=k, sampler=second
    )
    assert_same_stream(list(got), want)


def test_a_callers_random_sampler_has_its_law(oracle_loaded):
    """Peaked: nearly every greedy draft equals the sample, and is accepted."""
    mx.random.seed(0)
    sampler = make_sampler(temp=0.7, top_p=0.9)
    responses = list(
        mlx_mtp.stream_generate(*oracle_loaded, "Q", max_tokens=40, sampler=sampler)
    )
    assert "".join(r.text for r in responses) == TEXT
    assert responses[-1].stats.acceptance_rate > 0.6


def test_sampler_and_temperature_exclude_each_other(random_loaded):
    with pytest.raises(ValueError, match="not both"):
        tokens_of(random_loaded, sampler=lambda x: x, temp=0.5)


@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_penalties(random_loaded, k):
    options = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {66: 4.0},
    }
    model, _ = random_loaded
    want = list(
        generate_step(
            mx.array(PROMPT),
            model,
            max_tokens=12,
            logits_processors=make_logits_processors(**options),
        )
    )
    got = mlx_mtp.mtp_generate_step(
        PROMPT, model, max_tokens=12, num_draft_tokens=k, **options
    )
    assert_same_stream(list(got), want)


def test_a_bias_outside_the_vocabulary(random_loaded):
    with pytest.raises(ValueError, match="token 288, outside the vocabulary of 288"):
        tokens_of(random_loaded, logit_bias={288: 1.0})


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("🙂", "aé"),
        (["é🙂"], "a"),
        (["zz", "b"], "aé🙂"),
        ("a", ""),
        (["🙂b", "é"], "a"),
        ("nowhere", TEXT),
    ],
)
def test_stop_strings(oracle_loaded, stop, shown, k):
    """They straddle tokens and blocks; the text is cut before them."""
    responses = list(
        mlx_mtp.stream_generate(
            *oracle_loaded, "Q", max_tokens=30, stop=stop, num_draft_tokens=k
        )
    )
    assert "".join(r.text for r in responses) == shown
    assert responses[-1].finish_reason == "stop"
    assert all(r.finish_reason is None for r in responses[:-1])


def test_text_held_back_is_shown_at_the_limit(oracle_loaded):
    responses = list(
        mlx_mtp.stream_generate(*oracle_loaded, "Q", max_tokens=3, stop="aéx")
    )
    assert [r.text for r in responses] == ["", "", "aé"]
    assert responses[-1].finish_reason == "length"


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_mixtures_equal_plain_decoding(random_loaded, data):
    """Prompts, K, stops, penalties and the coupled rule in any combination."""
    prompt = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=12))
    options = {"max_tokens": data.draw(st.integers(1, 14))}
    if data.draw(st.booleans(), "sampled"):
        options |= COUPLED | {"seed": data.draw(st.integers(0, 99))}
        options["temp"] = data.draw(st.sampled_from([0.3, 1.0, 1.5]))
    if data.draw(st.booleans(), "penalty"):
        options["repetition_penalty"] = 1.5
    if data.draw(st.booleans(), "stop"):
        options["stop"] = data.draw(st.text("abcé1", min_size=1, max_size=2))
    k = data.draw(st.integers(1, 8))

    def run(**more):
        responses = mlx_mtp.stream_generate(*random_loaded, prompt, **options, **more)
        return [
            (r.token, r.text, r.finish_reason, r.generation_tokens) for r in responses
        ]

    assert run(num_draft_tokens=k) == run(mtp=False)


class TestCommandLine:
    def run(self, capsys, path, *flags):
        fixed = ("--model", path, "--prompt", "Q", "--ignore-chat-template", "--json")
        main([*map(str, (*fixed, *flags))])
        return json.loads(capsys.readouterr().out)

    def test_coupled(self, capsys, random_dir):
        flags = ("--temp", 0.8, "--top-p", 0.95, "--seed", 7, "--acceptance", "coupled")
        flags = (*flags, "--max-tokens", 12)
        plain = self.run(capsys, random_dir, *flags)
        assert self.run(capsys, random_dir, "--mtp", *flags)["text"] == plain["text"]
        other = self.run(capsys, random_dir, *flags, "--seed", 8)
        assert other["tokens"] != plain["tokens"]

    def test_stops(self, capsys, oracle_dir):
        got = self.run(capsys, oracle_dir, "--mtp", "--stop", "🙂", "--stop", "b")
        assert (got["text"], got["finish_reason"]) == ("aé", "stop")
        got = self.run(capsys, oracle_dir, "--mtp", "--extra-eos-token", "b")
        assert (got["text"], got["finish_reason"]) == ("aé🙂", "stop")

    def test_penalty(self, capsys, random_dir):
        flags = ("--max-tokens", 40)
        plain = self.run(capsys, random_dir, *flags)
        flags = (*flags, "--presence-penalty=-50", "--repetition-penalty", 1.1)
        bent = self.run(capsys, random_dir, *flags)
        assert bent["tokens"] != plain["tokens"]
        assert self.run(capsys, random_dir, "--mtp", *flags)["tokens"] == bent["tokens"]

    @pytest.mark.parametrize(
        "flags",
        [("--temp", "-1"), ("--top-p", "1.5"), ("--seed", "-3")],
    )
    def test_values_out_of_range(self, capsys, random_dir, flags):
        with pytest.raises(SystemExit) as ended:
            self.run(capsys, random_dir, *flags)
        assert ended.value.code in (1, 2)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert flags[0].strip("-").replace("-", "_") in error


def test_logprobs_are_before_the_filters(random_loaded):
    model, _ = random_loaded
    steps = mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=4, **COUPLED)
    for _, logprobs, _ in steps:
        assert np.isfinite(np.array(logprobs)).all()
        assert mx.logsumexp(logprobs).item() == pytest.approx(0.0, abs=1e-4)
