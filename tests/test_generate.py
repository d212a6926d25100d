"""Generation's contract: mlx-lm's responses, the limits, the text and the counters."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from byte_tokenizer import END, END_THINK, THINK, VOCAB_SIZE
from checkpoints import chain
from checks import wrong_at
from conftest import QUESTION, TEXT

import mlx_mtp
from mlx_mtp import SpeculationStats

# Directory, prompt: after Q the end token follows the text, after c it is far away.
CASES = {
    "random": ("random_dir", "the quick brown fox"),
    "oracle, end token": ("oracle_dir", "Q"),
    "noisy, end token": ("noisy_dir", "Q"),
    "noisy, limit": ("noisy_dir", "c"),
}
COUNT = 30


@pytest.fixture(scope="module")
def oracle(oracle_dir):
    return mlx_mtp.load(oracle_dir)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Model, tokenizer, prompt and stock mlx-lm's responses on the same directory."""
    directory, prompt = CASES[request.param]
    path = request.getfixturevalue(directory)
    stock = mlx_lm.load(str(path))
    want = list(mlx_lm.stream_generate(*stock, prompt, max_tokens=COUNT))
    return *mlx_mtp.load(path), prompt, want


def from_draft_pattern(count: int, k: int) -> list[bool]:
    """Of ``count`` tokens when every draft is right: the first token has no round."""
    return [i > 0 and (i - 1) % (k + 1) != k for i in range(count)]


def assert_same_responses(got, want) -> None:
    assert len(got) == len(want)
    for ours, stock in zip(got, want):
        for name in ("text", "token", "finish_reason", "generation_tokens"):
            assert getattr(ours, name) == getattr(stock, name), name
        assert ours.prompt_tokens == stock.prompt_tokens
        assert type(ours.token) is int
        assert type(ours.from_draft) is bool
        assert mx.array_equal(ours.logprobs, stock.logprobs)
        assert ours.prompt_tps > 0
        assert ours.generation_tps > 0
        assert ours.peak_memory > 0
        assert isinstance(ours, type(stock))


@pytest.mark.parametrize("k", range(9))
def test_responses_are_mlx_lms(case, k):
    model, tokenizer, prompt, want = case
    got = mlx_mtp.stream_generate(
        model, tokenizer, prompt, max_tokens=COUNT, num_draft_tokens=k
    )
    assert_same_responses(list(got), want)
    got = mlx_mtp.generate(
        model, tokenizer, prompt, max_tokens=COUNT, num_draft_tokens=k
    )
    assert got == "".join(response.text for response in want)


def test_responses_without_mtp(case):
    model, tokenizer, prompt, want = case
    got = list(
        mlx_mtp.stream_generate(model, tokenizer, prompt, max_tokens=COUNT, mtp=False)
    )
    assert_same_responses(got, want)
    assert not any(response.from_draft for response in got)
    assert {response.stats for response in got} == {SpeculationStats()}


@pytest.mark.parametrize("k", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("count", range(1, 10))
def test_limit_is_exact(noisy_dir, k, count):
    model, tokenizer = mlx_mtp.load(noisy_dir)
    got = list(
        mlx_mtp.stream_generate(
            model, tokenizer, "c", max_tokens=count, num_draft_tokens=k
        )
    )
    assert [r.token for r in got] == list(range(100, 100 + count))
    assert [r.finish_reason for r in got] == [None] * (count - 1) + ["length"]
    tokens = mlx_mtp.mtp_generate_step(
        [ord("c")], model, max_tokens=count, num_draft_tokens=k
    )
    assert [token for token, *_ in tokens] == list(range(100, 100 + count))


@pytest.mark.parametrize("k", range(1, 9))
def test_end_token_inside_an_accepted_block(oracle, k):
    """It is a draft for every K but 1, 3 and 7; nothing follows it."""
    got = list(mlx_mtp.stream_generate(*oracle, "Q", num_draft_tokens=k))
    assert [r.token for r in got] == [*TEXT.encode(), END]
    assert [r.finish_reason for r in got] == [None] * 8 + ["stop"]
    assert [r.from_draft for r in got] == from_draft_pattern(9, k)
    assert got[-1].generation_tokens == 9
    stats, rounds = got[-1].stats, -(-8 // (k + 1))
    assert stats.num_accepted_tokens_per_pos == (rounds,) * k  # the cut round is whole


def test_no_limit(oracle):
    got = list(mlx_mtp.stream_generate(*oracle, "Q", max_tokens=-1))
    assert got[-1].finish_reason == "stop"
    assert len(got) == 9


@pytest.mark.parametrize("k", range(9))
def test_text_is_whole(oracle, k):
    chunks = [r.text for r in mlx_mtp.stream_generate(*oracle, "Q", num_draft_tokens=k)]
    assert "".join(chunks) == TEXT
    assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("count", [2, 4, 5, 6])
def test_limit_inside_a_character(oracle, oracle_dir, count, k):
    got = mlx_mtp.generate(*oracle, "Q", max_tokens=count, num_draft_tokens=k)
    stock = mlx_lm.load(str(oracle_dir))
    assert got == mlx_lm.generate(*stock, "Q", max_tokens=count)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 8])
def test_special_tokens_lose_nothing(make_model_dir, k):
    walk = [QUESTION, ord("a"), THINK, ord("b"), ord("c"), END_THINK, ord("d"), END]
    path = make_model_dir("thinking", kind="oracle", succ=chain(walk))
    loaded = mlx_mtp.load(path)
    got = mlx_mtp.generate(*loaded, "Q", num_draft_tokens=k)
    assert got == "a<think>bc</think>d"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_steps(make_model_dir, text_chain, k, dtype):
    """They pass the end token, and say which tokens were drafts."""
    path = make_model_dir(f"{dtype} steps", kind="oracle", succ=text_chain, dtype=dtype)
    model, _ = mlx_mtp.load(path)
    got = list(
        mlx_mtp.mtp_generate_step([QUESTION], model, num_draft_tokens=k, max_tokens=20)
    )
    walk = [text_chain[QUESTION]]
    while len(walk) < 20:
        walk.append(text_chain[walk[-1]])
    tokens, logprobs, from_draft = zip(*got)
    assert list(tokens) == walk
    assert END in tokens[:-1]
    assert list(from_draft) == from_draft_pattern(20, k)
    assert {type(token) for token in tokens} == {int}
    assert {type(drafted) for drafted in from_draft} == {bool}
    assert {(row.shape, row.dtype) for row in logprobs} == {((VOCAB_SIZE,), dtype)}


def test_defaults_are_mlx_lms(case):
    model, tokenizer, prompt, _ = case
    got = list(mlx_mtp.stream_generate(model, tokenizer, prompt))
    assert len(got) == 256 or got[-1].finish_reason == "stop"
    assert model.draft_memory.costs.by_place  # K is chosen


def test_progress_is_mlx_lms(oracle, oracle_dir):
    reports = []
    for package, loaded in ((mlx_mtp, oracle), (mlx_lm, mlx_lm.load(str(oracle_dir)))):
        seen = []
        package.generate(
            *loaded,
            "seven t",
            max_tokens=3,
            prefill_step_size=4,
            prompt_progress_callback=lambda *now, seen=seen: seen.append(now),
        )
        reports.append(seen)
    assert reports[0] == reports[1]
    assert reports[0][-1] == (7, 7)


ALL_RIGHT, ALL_WRONG = [], range(VOCAB_SIZE)
MIXED = [0xC3, 0x9F]  # wrong after these two bytes of the text
# Wrong drafts, K, max_tokens -> rounds, drafts, accepted by position.
COUNTERS = {
    "accept all": (ALL_RIGHT, 3, 20, 2, 6, (2, 2, 2)),
    "no round yet": (ALL_RIGHT, 3, 1, 0, 0, (0, 0, 0)),
    "limit behind a round": (ALL_RIGHT, 3, 5, 1, 3, (1, 1, 1)),
    "limit in a round": (ALL_RIGHT, 3, 7, 2, 6, (2, 2, 2)),
    "limit in a long round": (ALL_RIGHT, 8, 2, 1, 8, (1,) * 8),
    "reject all": (ALL_WRONG, 3, 5, 4, 12, (0, 0, 0)),
    "mixed": (MIXED, 3, 20, 3, 9, (3, 2, 1)),
    "mixed, limit": (MIXED, 3, 4, 2, 6, (2, 1, 0)),
    "no drafts": (ALL_RIGHT, 0, 20, 0, 0, ()),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(make_model_dir, text_chain, name):
    wrong, k, count, rounds, drafts, per_position = COUNTERS[name]
    path = make_model_dir(
        f"counters {len(wrong)}",
        kind="oracle",
        succ=text_chain,
        draft_succ=wrong_at(text_chain, wrong),
    )
    loaded = mlx_mtp.load(path)
    for _ in range(2):  # the second run starts at zero
        *_, last = mlx_mtp.stream_generate(
            *loaded, "Q", max_tokens=count, num_draft_tokens=k
        )
        accepted = sum(per_position)
        assert last.stats == SpeculationStats(
            rounds, drafts, accepted, per_position, (rounds,) * k
        )
        rate, length = last.stats.acceptance_rate, last.stats.mean_acceptance_length
        assert rate == pytest.approx(accepted / drafts if drafts else 0)
        assert length == pytest.approx(1 + accepted / rounds if rounds else 0)


def test_counters_of_every_response(make_model_dir, text_chain):
    path = make_model_dir(
        f"counters {len(MIXED)}",
        kind="oracle",
        succ=text_chain,
        draft_succ=wrong_at(text_chain, MIXED),
    )
    got = list(mlx_mtp.stream_generate(*mlx_mtp.load(path), "Q", num_draft_tokens=3))
    assert [r.stats.num_drafts for r in got] == [0, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [r.stats.num_accepted_tokens for r in got] == [0, 1, 1, 3, 3, 3, 6, 6, 6]
    drafted = np.cumsum([r.from_draft for r in got])
    assert drafted[-1] == 6  # of the last round, the end token is the third draft
