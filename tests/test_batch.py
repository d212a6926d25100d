"""Batches: every row gives what it gives alone, whoever leaves and joins."""

import pytest
from checks import plain_stream, wrong_at
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prompt_cache import assert_whole

import mlx_mtp

WORDS = [
    "a",
    "several",
    "prompts of different length",
    "at",
    "once",
    "through few rows",
]
PROMPTS = [[ord(c) for c in word] for word in WORDS]


@pytest.fixture(scope="module", params=["random", "mixed"])
def path(request, random_dir, make_model_dir, text_chain):
    if request.param == "random":
        return random_dir
    draft_succ = wrong_at(text_chain, range(0, len(text_chain), 3))
    return make_model_dir(
        "mixed batch", kind="noisy", succ=text_chain, draft_succ=draft_succ
    )


@pytest.fixture(scope="module")
def loaded(path):
    return mlx_mtp.load(path)


def alone(loaded, prompt, **options):
    """Token ids without the end token, and the text, of a solo run."""
    responses = list(mlx_mtp.stream_generate(*loaded, prompt, **options))
    ends = loaded[1].eos_token_ids
    tokens = [r.token for r in responses if r.token not in ends]
    return tokens, "".join(r.text for r in responses)


@pytest.mark.parametrize("size", [1, 2, 4, 32])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_rows_equal_their_solo_runs(loaded, k, size):
    limits = [3, 20, 7, 12, 1, 9]
    got = mlx_mtp.batch_generate(
        *loaded,
        PROMPTS,
        max_tokens=limits,
        num_draft_tokens=k,
        completion_batch_size=size,
        return_token_ids=True,
    )
    for b, (prompt, limit) in enumerate(zip(PROMPTS, limits)):
        tokens, _ = alone(loaded, prompt, max_tokens=limit, num_draft_tokens=k)
        assert got.token_ids[b] == tokens
        assert got.texts[b] == loaded[1].decode(tokens)
    assert got.stats.generation_tokens == sum(map(len, got.token_ids))
    assert got.stats.prompt_tokens == sum(map(len, PROMPTS))
    assert (got.speculation.num_draft_tokens > 0) == (k > 0)


def test_logprobs_equal_the_solo_runs(loaded, path):
    got = mlx_mtp.batch_generate(
        *loaded,
        PROMPTS,
        max_tokens=10,
        completion_batch_size=3,
        return_token_ids=True,
        return_logprobs=True,
    )
    for b, prompt in enumerate(PROMPTS):
        want = plain_stream(path, prompt, 10)
        rows = zip(got.token_ids[b], got.logprobs[b], want)
        for token, logprob, (plain_token, plain_row) in rows:
            assert token == plain_token
            assert logprob == plain_row[token].item()


def test_each_row_its_own_choices(loaded):
    """Temperatures, seeds, rules, penalties, stops and limits."""
    options = {
        "temp": [0.0, 1.0, 0.7, 1.3, 1.0, 0.0],
        "seed": [0, 1, 2, 3, 4, 5],
        "acceptance": [
            *("rejection", "rejection", "block", "coupled", "coupled", "block")
        ],
        "top_p": [1.0, 0.9, 1.0, 0.8, 1.0, 1.0],
        "repetition_penalty": [None, None, None, None, None, 1.4],
        "stop": [None, ["e"], ["a", "x"], None, ["🙂"], ["zz"]],
        "max_tokens": [4, 15, 15, 9, 15, 15],
    }
    got = mlx_mtp.batch_generate(
        *loaded, PROMPTS, completion_batch_size=4, return_token_ids=True, **options
    )
    for b, prompt in enumerate(PROMPTS):
        own = {name: values[b] for name, values in options.items()}
        tokens, text = alone(loaded, prompt, **own)
        if own["acceptance"] != "block" or own["temp"] == 0:
            assert got.token_ids[b] == tokens
            if own["stop"]:
                assert got.texts[b] == text
        else:  # beside a row with processors it is judged one by one
            assert len(got.token_ids[b]) <= own["max_tokens"]


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_any_batch(loaded, data):
    count = data.draw(st.integers(1, 6), "prompts")
    ids = st.lists(st.integers(0, 255), min_size=1, max_size=9)
    prompts = [data.draw(ids) for _ in range(count)]
    limits = [data.draw(st.integers(1, 9)) for _ in range(count)]
    k, size = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    got = mlx_mtp.batch_generate(
        *loaded,
        prompts,
        max_tokens=limits,
        num_draft_tokens=k,
        completion_batch_size=size,
        return_token_ids=True,
        temp=1.0,
        acceptance="coupled",
        seed=list(range(count)),
    )
    for b, prompt in enumerate(prompts):
        tokens, _ = alone(
            loaded,
            prompt,
            max_tokens=limits[b],
            num_draft_tokens=k,
            temp=1.0,
            acceptance="coupled",
            seed=b,
        )
        assert got.token_ids[b] == tokens


@pytest.mark.parametrize("k", [1, 3])
def test_prompt_caches_go_in_and_out(loaded, path, k):
    model, _ = loaded
    first = mlx_mtp.batch_generate(
        *loaded,
        PROMPTS,
        max_tokens=[5, 2, 9, 4, 3, 6],
        num_draft_tokens=k,
        completion_batch_size=3,
        return_prompt_caches=True,
        return_token_ids=True,
    )
    for prompt, tokens, cache in zip(PROMPTS, first.token_ids, first.caches):
        text = [*prompt, *tokens]
        assert cache.tokens[: len(text)] == text  # and an end token, if there was one
        assert_whole(model, path, cache, cache.tokens)
    held = [list(cache.tokens) for cache in first.caches]
    more = [[65], [66, 67], [68], [69], [70], [71, 72, 73]]
    second = mlx_mtp.batch_generate(
        *loaded,
        more,
        first.caches,
        max_tokens=5,
        num_draft_tokens=k,
        completion_batch_size=4,
        return_token_ids=True,
    )
    for text, prompt, tokens in zip(held, more, second.token_ids):
        want = plain_stream(path, text + prompt, 5)
        assert tokens == [token for token, _ in want][: len(tokens)]
    assert [cache.tokens for cache in first.caches] == held  # not changed


def test_one_row_is_as_stream_generate(loaded, path):
    got = mlx_mtp.batch_generate(
        *loaded, [PROMPTS[2]], max_tokens=8, return_token_ids=True
    )
    want = plain_stream(path, PROMPTS[2], 8)
    assert got.token_ids[0] == [token for token, _ in want][: len(got.token_ids[0])]


def test_no_prompts(loaded):
    assert mlx_mtp.batch_generate(*loaded, []).texts == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_tokens": [1, 2]}, "max_tokens has 2 values for 6"),
        ({"seed": [1]}, "seed has 1 values for 6"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"completion_batch_size": 0}, "completion_batch_size"),
        ({"num_draft_tokens": 9}, "num_draft_tokens"),
        ({"temp": -1.0}, "temp"),
        ({"stop": [[""]] * 6}, "stop string"),
        ({"prompt_caches": []}, "0 prompt_caches for 6"),
    ],
)
def test_wrong_arguments(loaded, arguments, match):
    with pytest.raises(ValueError, match=match):
        mlx_mtp.batch_generate(*loaded, PROMPTS, **arguments)
