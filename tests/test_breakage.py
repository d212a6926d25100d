"""Faults that an attack on the package has found, each with its right value."""

import copy
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from checks import plain_stream
from families import FAMILIES
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler
from test_prompt_cache import assert_next_turn, assert_whole

import mlx_mtp
from mlx_mtp.cli import terminable
from mlx_mtp.speculative.stats import SpeculationStats

ROOT = Path(__file__).parent.parent
PROMPT = [ord(c) for c in "break it"]


@pytest.fixture(scope="module")
def loaded(noisy_dir):
    return mlx_mtp.load(noisy_dir)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.mark.parametrize("token", [288, 1000, 10**6, -1])
def test_xtc_tokens_outside_the_vocabulary(model, token):
    """They would be written outside the array."""
    with pytest.raises(ValueError, match=f"xtc_special_tokens names token {token}"):
        mlx_mtp.mtp_generate_step(
            PROMPT, model, temp=1.0, xtc_probability=1.0, xtc_special_tokens=[token]
        )


@pytest.mark.parametrize("nth", range(1, 8))
def test_interrupt_between_a_round_and_its_first_token(
    model, noisy_dir, monkeypatch, nth
):
    """The cache holds what the caller has got, not what the round would have given."""
    calls, right = [], SpeculationStats.after

    def interrupted(self, *counts):
        calls.append(counts)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return right(self, *counts)

    monkeypatch.setattr(SpeculationStats, "after", interrupted)
    cache = mlx_mtp.make_prompt_cache(model)
    text = list(PROMPT)
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=3, prompt_cache=cache
    )
    try:
        for token, *_ in steps:
            text.append(token)
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    assert_whole(model, noisy_dir, cache, text)
    assert_next_turn(model, noisy_dir, cache, text, 3)


@pytest.mark.parametrize("saved", [False, True])
def test_a_cache_made_in_one_thread_and_used_in_another(model, saved, tmp_path):
    cache = mlx_mtp.make_prompt_cache(model)
    if saved:
        list(mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=3, prompt_cache=cache))
        mlx_mtp.save_prompt_cache(tmp_path / "c.safetensors", cache)
        cache = mlx_mtp.load_prompt_cache(tmp_path / "c.safetensors")
    got = []

    def use():
        steps = mlx_mtp.mtp_generate_step([65], model, max_tokens=4, prompt_cache=cache)
        got.extend(token for token, *_ in steps)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(got) == 4


@pytest.mark.parametrize("restorable", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_processors_are_not_called_past_the_limit(model, restorable, count):
    """One that forces a text of a known length would run off its end."""
    forced = [66, 67, 68, 69, 70, 71][:count]

    def force(tokens, logits):
        wanted = forced[len(tokens) - len(PROMPT)]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits, -mx.inf)

    if restorable:
        from mlx_mtp.speculative.processors import Stateless

        force = Stateless(force)
    for k in (0, 1, 3, 5):
        steps = mlx_mtp.mtp_generate_step(
            PROMPT,
            model,
            num_draft_tokens=k,
            max_tokens=count,
            logits_processors=[force],
        )
        assert [token for token, *_ in steps] == forced


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_sampler_with_a_state(random_dir, k):
    """It is called once per token, in order."""
    model, _ = mlx_mtp.load(random_dir)

    class Third:
        calls = 0

        def __call__(self, logprobs):
            self.calls += 1
            return mx.argsort(logprobs, axis=-1)[..., -1 - self.calls % 3]

    want = [
        token
        for token, _ in generate_step(
            mx.array(PROMPT), model, max_tokens=12, sampler=Third()
        )
    ]
    got = mlx_mtp.mtp_generate_step(
        PROMPT, model, num_draft_tokens=k, max_tokens=12, sampler=Third()
    )
    assert [token for token, *_ in got] == want


def test_a_random_sampler_gives_the_text_of_plain_decoding(random_dir):
    model, _ = mlx_mtp.load(random_dir)
    sampler = make_sampler(temp=1.0, top_p=0.9)
    mx.random.seed(3)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=12, sampler=sampler)
    want = [token for token, _ in steps]
    mx.random.seed(3)
    got = mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=12, sampler=sampler)
    assert [token for token, *_ in got] == want


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_copies_of_a_prompt_cache(model, noisy_dir, how):
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=9, prompt_cache=cache)
    text = PROMPT + [next(steps)[0] for _ in range(3)]
    with pytest.raises(ValueError, match="in use"):
        how(cache)
    text += [token for token, *_ in steps]  # the run is still whole
    assert len(text) == len(PROMPT) + 9
    other = how(cache)
    assert_next_turn(model, noisy_dir, other, text, 2)
    assert_whole(model, noisy_dir, cache, text)


@pytest.mark.parametrize("temp", [float("inf"), float("nan"), 1e-39, 1e39])
def test_temperatures_that_leave_float32(model, temp):
    with pytest.raises(ValueError, match="temp must be 0, or"):
        mlx_mtp.mtp_generate_step(PROMPT, model, temp=temp, top_k=3)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("options", [{}, {"temp": 1.0}])
def test_a_model_that_gives_nan(random_dir, k, options):
    """Never tokens 0 without end and without a word."""
    model, _ = mlx_mtp.load(random_dir)
    norm = model.language_model.model.norm
    norm.weight = norm.weight * mx.nan
    steps = mlx_mtp.mtp_generate_step(PROMPT, model, num_draft_tokens=k, **options)
    with pytest.raises(ValueError, match="not a number"):
        next(steps)


def test_a_processor_that_bans_everything(model):
    def ban(tokens, logits):
        return mx.full(logits.shape, -mx.inf)

    steps = mlx_mtp.mtp_generate_step(PROMPT, model, logits_processors=[ban])
    with pytest.raises(ValueError, match="banned every token"):
        next(steps)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_tokens": 2.5}, ValueError, "max_tokens"),
        ({"max_tokens": "5"}, ValueError, "max_tokens"),
        ({"prefill_step_size": 2.5}, ValueError, "prefill_step_size"),
        ({"seed": 5.5, "temp": 1.0}, ValueError, "seed"),
        ({"temperature": 0.7}, TypeError, r"unknown option\(s\): temperature"),
    ],
)
def test_arguments_of_the_wrong_kind(model, options, error, match):
    with pytest.raises(error, match=match):
        mlx_mtp.mtp_generate_step(PROMPT, model, **options)


def test_min_tokens_to_keep_above_the_vocabulary(model):
    steps = mlx_mtp.mtp_generate_step(
        PROMPT, model, max_tokens=3, temp=1.0, min_p=0.5, min_tokens_to_keep=10**6
    )
    assert len(list(steps)) == 3


def run_cli(*flags, **kwargs):
    return subprocess.run(
        [sys.executable, str(ROOT / "generate.py"), *flags],
        capture_output=True,
        check=False,
        **kwargs,
    )


def test_command_line(oracle_dir):
    model = ("--model", str(oracle_dir), "-m", "3")
    bad = run_cli("-p", "-", *model, input=b"ab\xff\xfe")
    assert bad.returncode == 1
    assert b"Traceback" not in bad.stderr
    assert b"not valid UTF-8" in bad.stderr
    odd = run_cli("-p", "Q", *model, "--extra-eos-token", "no such token")
    assert odd.returncode == 1
    assert b"--stop" in odd.stderr
    closed = subprocess.run(
        f"{sys.executable} {ROOT / 'generate.py'} -p Q -m 2 --model '{oracle_dir}' >&-",
        shell=True,
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in closed.stderr


def test_plain_stream_is_what_these_compare_with(noisy_dir):
    assert len(plain_stream(noisy_dir, PROMPT, 3)) == 3
    assert dataclasses.is_dataclass(SpeculationStats)


@pytest.mark.parametrize("mtp", [True, False])
def test_a_sampler_that_leaves_the_vocabulary(random_dir, mtp):
    """As an index it would read past the embedding, which can end the process."""
    model, tokenizer = mlx_mtp.load(random_dir)
    for token in (99999, -1):
        with pytest.raises(ValueError, match=f"the sampler returned {token}"):
            mlx_mtp.generate(
                model,
                tokenizer,
                PROMPT,
                mtp=mtp,
                max_tokens=4,
                sampler=lambda logprobs, token=token: mx.array([token]),
            )


def test_experts_in_bfloat16_on_the_cpu(tmp_path):
    """MLX cannot; quantised experts and float32 it can."""
    family = next(f for f in FAMILIES if f.name == "glm4_moe")
    family.write(tmp_path / "raw", seed=0)
    for name, options in {
        "bf16": {"dtype": "bfloat16"},
        "q": {"quantize": True},
    }.items():
        mlx_mtp.convert(
            str(tmp_path / "raw"), str(tmp_path / name), q_group_size=32, **options
        )
    model, tokenizer = mlx_mtp.load(tmp_path / "bf16")
    with pytest.raises(ValueError, match="--dtype float32 or -q"):
        mlx_mtp.generate(model, tokenizer, [1, 2], max_tokens=2)
    model, tokenizer = mlx_mtp.load(tmp_path / "q")
    assert mlx_mtp.generate(model, tokenizer, [1, 2], max_tokens=2) is not None


def test_a_terminated_conversion_unwinds():
    """SIGTERM ends in the same clean-up as Ctrl-C."""

    def command():
        with terminable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 128 + signal.SIGTERM
