"""MTP gives plain decoding's tokens and log-probabilities, bit for bit (CPU)."""

import mlx.core as mx
import numpy as np
import pytest
from checks import assert_same_stream, mtp_stream, plain_stream, wrong_at

import mlx_mtp

PRECISIONS = {
    "float32": ({"dtype": mx.float32}, {}),
    "bfloat16": ({"dtype": mx.bfloat16}, {}),
    "4bit": (
        {"dtype": mx.float32},
        {"quantize": True, "q_bits": 4, "q_group_size": 32},
    ),
}
PROMPT = [ord(c) for c in "the quick brown fox jump"]


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request):
    return request.param


@pytest.fixture(scope="module", params=["random", "accept all", "reject all", "mixed"])
def case(request, precision, make_model_dir, text_chain):
    """Model, prompt, reference stream, and the share of drafts that are right."""
    build_args, convert_args = PRECISIONS[precision]
    if request.param == "random":
        path = make_model_dir(f"random {precision}", convert_args, **build_args)
        prompt, share = PROMPT, None
    else:
        everything = range(len(text_chain))
        wrong, share = {
            "accept all": ([], 1.0),
            "reject all": (everything, 0.0),
            "mixed": (list(everything)[::3], None),
        }[request.param]
        path = make_model_dir(
            f"{request.param} {precision}",
            convert_args,
            kind="noisy",
            succ=text_chain,
            draft_succ=wrong_at(text_chain, wrong),
            **build_args,
        )
        prompt = [ord("Q")]
    model, _ = mlx_mtp.load(path)
    return model, prompt, plain_stream(path, prompt, 40), share


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_stream_equals_plain(case, k):
    model, prompt, want, share = case
    got = mtp_stream(model, prompt, 40, k)
    assert_same_stream(got, want)
    drafted = np.mean([from_draft for *_, from_draft in got])
    if share == 1.0:
        assert drafted == pytest.approx(k / (k + 1), abs=0.05)
    if share == 0.0:
        assert drafted == 0.0


def test_no_drafts_equals_plain(case):
    model, prompt, want, _ = case
    assert_same_stream(mtp_stream(model, prompt, 40, 0), want)


@pytest.mark.parametrize("step_size", [1, 2, 3, 7])
@pytest.mark.parametrize("k", [0, 2])
def test_chunked_prefill(random_dir, k, step_size):
    model, _ = mlx_mtp.load(random_dir)
    want = plain_stream(random_dir, PROMPT, 12)
    got = mtp_stream(model, PROMPT, 12, k, prefill_step_size=step_size)
    assert_same_stream(got, want)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10])
def test_short_prompts(random_dir, length):
    model, _ = mlx_mtp.load(random_dir)
    prompt = PROMPT[:length]
    got = mtp_stream(model, prompt, 10, 3)
    assert_same_stream(got, plain_stream(random_dir, prompt, 10))


def test_past_the_growth_step_of_the_buffers(noisy_dir):
    """600 tokens cross two growths of the KV buffers, with drafts in flight."""
    model, _ = mlx_mtp.load(noisy_dir)
    want = plain_stream(noisy_dir, [ord("Q")], 600)
    assert_same_stream(mtp_stream(model, [ord("Q")], 600, 3), want)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    "shape", [{"dk": 32, "dv": 16}, {"hk": 4, "hv": 4}, {"interval": 3, "layers": 6}]
)
def test_odd_shapes(make_model_dir, shape, tie):
    path = make_model_dir(f"odd {shape} {tie}", tie=tie, **shape)
    model, _ = mlx_mtp.load(path)
    want = plain_stream(path, PROMPT, 20)
    assert_same_stream(mtp_stream(model, PROMPT, 20, 3), want)


def test_model_works_in_stock_generate_step(random_dir):
    """A model from mlx_mtp.load, in mlx-lm's own loop with mlx-lm's own caches."""
    from mlx_lm.generate import generate_step

    model, _ = mlx_mtp.load(random_dir)
    got = list(generate_step(mx.array(PROMPT), model, max_tokens=12))
    assert_same_stream(got, plain_stream(random_dir, PROMPT, 12))
