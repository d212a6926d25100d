"""Target and head against the torch reference, and proof that the comparison has teeth.

Everything runs in float32 on tiny random checkpoints. A right forward differs from the
reference by rounding; each planted fault must differ by far more. Faults are planted in
inputs and weights, never in the package.
"""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, build
from mlx_side import HeadRun, change_weight, load_raw, run_target
from torch_oracle import TorchOracle

RIGHT = 1e-4  # upper bound of the relative error of a right forward
WRONG = 1e-2  # lower bound of that of a planted fault
LENGTH = 70  # more than one chunk of 64 of the reference's chunked delta rule
DEPTH = 3

SHAPES = {
    "base": {},
    "wide_keys": {"dk": 32, "dv": 16},
    "wide_values": {"dk": 16, "dv": 32},
    "equal_heads": {"hk": 4, "hv": 4},
    "one_key_head": {"hk": 1, "hv": 4},
    "tied": {"tie": True},
    "interval_3": {"interval": 3, "layers": 6},
}
HEAD_NORMS = (
    "norm",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "layers.0.input_layernorm",
    "layers.0.post_attention_layernorm",
    "layers.0.self_attn.q_norm",
    "layers.0.self_attn.k_norm",
)
TARGET_NORMS = (
    "norm",
    "layers.0.input_layernorm",
    "layers.0.post_attention_layernorm",
    "layers.3.self_attn.q_norm",
    "layers.3.self_attn.k_norm",
)
wrong_shifts = pytest.mark.parametrize(
    "extra", [-1, 1], ids=["missing_shift", "doubled_shift"]
)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the error relative to the norm of the reference, over all rows.

    Not the largest of the rows' errors: in a badly conditioned row the reference itself
    is 1e-4 away from its float64 result.
    """
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


class Pair:
    """One checkpoint on both sides, with the reference's results."""

    def __init__(self, path, shape, seed):
        self.path = build(path, "random", seed=seed, **shape)
        self.ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, LENGTH).tolist()
        self.oracle = TorchOracle(self.path)
        self.want_logits, self.want_hidden = self.oracle.target(self.ids)
        self.want_head = self.oracle.teacher_forced(self.ids)
        self.want_drafts, self.tokens = self.oracle.drafts(self.ids, DEPTH)
        _, self.target, self.head = load_raw(self.path)
        _, self.hidden = run_target(self.target, self.ids)

    def run(self, *, head=None, hidden=None) -> HeadRun:
        """The head on the target's hidden states, or on what a fault puts there."""
        hidden = self.hidden if hidden is None else hidden
        return HeadRun(self.target, head or self.head, self.ids, hidden)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    @cache
    def make(name):
        seed = list(SHAPES).index(name)
        return Pair(tmp_path_factory.mktemp(name), SHAPES[name], seed)

    return make


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, pairs):
    return pairs(request.param)


@pytest.fixture(scope="module")
def base(pairs):
    return pairs("base")


@pytest.mark.parametrize(
    "blocks", [[LENGTH], [37, 1, 2, 3, 9, 10, 8]], ids=["one_block", "uneven_blocks"]
)
def test_target(pair, blocks):
    logits, hidden = run_target(pair.target, pair.ids, blocks)
    assert relative_error(logits, pair.want_logits) < RIGHT
    assert relative_error(hidden, pair.want_hidden) < RIGHT


@pytest.mark.parametrize("use_cache", [False, True], ids=["no_cache", "cache"])
def test_head_teacher_forced(pair, use_cache):
    got = pair.run().teacher_forced(use_cache=use_cache)
    assert relative_error(got, pair.want_head) < RIGHT


def test_head_step_by_step(pair):
    want = pair.oracle.step_by_step(pair.ids)
    assert relative_error(want, pair.want_head) < RIGHT
    assert relative_error(pair.run().step_by_step(), want) < RIGHT


@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_chained_drafts(pair, depth):
    got = pair.run().drafts(pair.tokens)
    assert relative_error(got[depth - 1], pair.want_drafts[depth - 1]) < RIGHT


def test_chained_drafts_of_given_tokens(pair):
    tokens = [7, 200, 31]
    want, _ = pair.oracle.drafts(pair.ids, DEPTH, tokens)
    assert relative_error(pair.run().drafts(tokens), want) < RIGHT


class TestPlantedFaults:
    """Each fault is one that a draft head was seen to have elsewhere."""

    def test_hidden_before_the_final_norm(self, base):
        # Without the norm's weight. The rest of the norm, a factor per row, makes no
        # difference: the head's own norm removes it.
        hidden = base.hidden / np.array(base.target.model.model.norm.weight)
        got = base.run(hidden=hidden).teacher_forced()
        assert relative_error(got, base.want_head) > WRONG

    def test_concat_order(self, base):
        _, _, head = load_raw(base.path)
        size = base.hidden.shape[1]
        change_weight(head, "fc.weight", lambda w: mx.roll(w, size, axis=1))
        got = base.run(head=head).teacher_forced()
        assert relative_error(got, base.want_head) > WRONG

    def test_embedding_and_hidden_swapped(self, base):
        run = base.run()
        run.embedding, run.hidden = run.hidden, run.embedding
        assert relative_error(run.teacher_forced(), base.want_head) > WRONG

    def test_hidden_of_the_same_position(self, base):
        got = base.run(hidden=np.roll(base.hidden, -1, axis=0)).teacher_forced()
        assert relative_error(got, base.want_head) > WRONG

    @wrong_shifts
    @pytest.mark.parametrize("name", HEAD_NORMS)
    def test_shift_of_a_head_norm(self, base, name, extra):
        _, _, head = load_raw(base.path)
        change_weight(head, f"{name}.weight", lambda w: w + extra)
        got = base.run(head=head).teacher_forced()
        assert relative_error(got, base.want_head) > WRONG

    @wrong_shifts
    @pytest.mark.parametrize("name", TARGET_NORMS)
    def test_shift_of_a_target_norm(self, base, name, extra):
        model, target, _ = load_raw(base.path)
        key = f"language_model.model.{name}.weight"
        change_weight(model, key, lambda w: w + extra)
        logits, hidden = run_target(target, base.ids)
        assert relative_error(logits, base.want_logits) > WRONG
        assert relative_error(hidden, base.want_hidden) > WRONG

    def test_head_cache_without_the_prompt(self, base):
        run = HeadRun(base.target, base.head, base.ids[-2:], base.hidden[-2:])
        error = relative_error(run.teacher_forced()[-1], base.want_head[-1])
        assert error > WRONG

    def test_chained_hidden_before_the_last_norm(self, base):
        run = base.run()
        run.chain = lambda out: out / base.head.norm.weight
        got = run.drafts(base.tokens)
        assert relative_error(got[0], base.want_drafts[0]) < RIGHT
        assert relative_error(got[1], base.want_drafts[1]) > WRONG
        assert relative_error(got[2], base.want_drafts[2]) > WRONG

    def test_chained_hidden_of_the_target(self, base):
        run = base.run()
        run.chain = lambda out: run.hidden[:, -1:]
        got = run.drafts(base.tokens)
        assert relative_error(got[1], base.want_drafts[1]) > WRONG
