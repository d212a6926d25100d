"""Conversion, prefill and rounds together: the drafts are those of the torch head.

A wrong head, or a head cache with a wrong row, only costs acceptance; no test of the
output would see it.
"""

import mlx.core as mx
import pytest
from checkpoints import build
from drafting import assert_drafts_equal_oracle

import mlx_mtp
from mlx_mtp import convert

PROMPT = [ord(c) for c in "every prompt position counts"]


@pytest.fixture(scope="module")
def raw_and_model(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafts")
    build(root / "raw", "random", seed=3)
    convert(str(root / "raw"), str(root / "mlx"))
    return root / "raw", mlx_mtp.load(root / "mlx")[0]


@pytest.mark.parametrize("step_size", [1, 5, 2048])
def test_random(raw_and_model, step_size):
    """Reject-heavy: the rows of rejected drafts must be gone from the head's cache."""
    raw, model = raw_and_model
    assert_drafts_equal_oracle(model, raw, PROMPT, k=3, rounds=6, step_size=step_size)


def test_prompt_of_one_token(raw_and_model):
    raw, model = raw_and_model
    assert_drafts_equal_oracle(model, raw, [5], k=2, rounds=4, step_size=2048)


@pytest.fixture(scope="module")
def acceptable(tmp_path_factory):
    """A head that is right, on a target whose states depend on the whole history."""
    root = tmp_path_factory.mktemp("acceptable")
    build(root / "raw", "noisy", seed=4)
    convert(str(root / "raw"), str(root / "mlx"))
    return root / "raw", mlx_mtp.load(root / "mlx")[0]


def test_accepted_rows_are_made_from_the_targets_hidden_states(acceptable):
    raw, model = acceptable
    tokens = list(
        mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=12, num_draft_tokens=2)
    )
    assert sum(from_draft for *_, from_draft in tokens) >= 6
    assert_drafts_equal_oracle(model, raw, PROMPT, k=3, rounds=4, step_size=7)


def test_head_file_holds_float32(raw_and_model):
    _, model = raw_and_model
    assert model.mtp.fc.weight.dtype == mx.float32
