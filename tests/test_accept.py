"""Greedy acceptance against a loop over rows and drafts."""

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.speculative.accept import greedy, greedy_tokens, log_probs, pick


def greedy_by_hand(drafts: list[int], choices: list[int]) -> list[int]:
    """The tokens a row emits."""
    emitted = []
    for draft, choice in zip(drafts, choices):
        emitted.append(choice)
        if draft != choice:
            return emitted
    return [*emitted, choices[-1]]


@given(st.data())
def test_greedy(data):
    rows = data.draw(st.integers(1, 4))
    k = data.draw(st.integers(0, 8))
    small = st.integers(0, 2)  # few values, so that matches happen
    row = st.lists(small, min_size=k, max_size=k)
    drafts = data.draw(st.lists(row, min_size=rows, max_size=rows))
    choices = [
        data.draw(st.lists(small, min_size=k + 1, max_size=k + 1)) for _ in range(rows)
    ]
    logprobs = mx.array(np.eye(3, dtype=np.float32)[np.array(choices)])
    accepted = greedy(mx.array(np.array(drafts, np.int32).reshape(rows, k)), logprobs)
    for b in range(rows):
        kept = accepted.kept[b].item()
        assert accepted.tokens[b, :kept].tolist() == greedy_by_hand(
            drafts[b], choices[b]
        )
    assert accepted.tokens.dtype == accepted.kept.dtype == mx.int32


def test_all_drafts_right_and_none():
    logprobs = mx.array(np.eye(5, dtype=np.float32)[[[1, 2, 3], [1, 2, 3]]])
    accepted = greedy(mx.array([[1, 2], [0, 2]]), logprobs)
    assert accepted.kept.tolist() == [3, 1]
    assert accepted.tokens[0].tolist() == [1, 2, 3]
    assert accepted.tokens[1, 0].item() == 1


def test_ties_fall_as_in_mlx_lm():
    """In bfloat16 these logits differ and their log-probabilities tie."""
    logits = mx.array([[19.875, 20.0, 20.0, 19.875]], mx.bfloat16)
    logits = mx.concatenate([logits, mx.full((1, 4000), 19.0, mx.bfloat16)], axis=1)
    logprobs = log_probs(logits)
    stock = logits - mx.logsumexp(logits, keepdims=True)
    assert mx.array_equal(logprobs, stock)
    assert greedy_tokens(logprobs).item() == mx.argmax(stock, axis=-1).item()


def test_pick():
    x = mx.arange(24).reshape(2, 3, 4)
    got = pick(x, mx.array([2, 0]))
    assert got.shape == (2, 1, 4)
    assert got[:, 0].tolist() == [x[0, 2].tolist(), x[1, 0].tolist()]
