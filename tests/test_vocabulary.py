"""Drafts from a part of the vocabulary: what is drafted changes, what comes out not."""

from collections import deque

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checks import assert_same_stream, mtp_stream, plain_stream
from conftest import QUESTION

import mlx_mtp
from mlx_mtp.speculative import accept, vocabulary
from mlx_mtp.speculative.rules import Coupled, Rejection
from mlx_mtp.speculative.vocabulary import DraftVocabulary, draft_vocabulary

PROMPT = [ord(c) for c in "some of them"]
SIZE, SLOTS = 100, 6


def layers():
    """Every kind of output layer, 200 rows."""
    mx.random.seed(3)
    linear, embedding = nn.Linear(64, 200, bias=False), nn.Embedding(200, 64)
    return {
        "linear": linear,
        "embedding": embedding,
        "linear, 4 bits": nn.QuantizedLinear.from_linear(linear, 32, 4),
        "embedding, 8 bits": nn.QuantizedEmbedding.from_embedding(embedding, 32, 8),
        "linear, mxfp4": nn.QuantizedLinear.from_linear(linear, 32, 4, mode="mxfp4"),
    }


def whole_logits(layer, x):
    return layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)


@pytest.mark.parametrize("kind", layers())
def test_logits_are_the_output_layers(kind):
    layer = layers()[kind]
    part = DraftVocabulary(layer, SIZE, SLOTS)
    part.see([150, 199, 3])
    x = mx.random.normal((2, 1, 64))
    logits = part.logits(x)
    assert logits.shape == (2, 1, SIZE + SLOTS)
    ids = part.ids.tolist()
    assert ids[:SIZE] == list(range(SIZE))
    assert {150, 199} <= set(ids)
    assert len(set(ids)) == len(ids)
    want = whole_logits(layer, x)
    assert mx.allclose(logits, want[..., part.ids], rtol=1e-5, atol=1e-5)
    spread = part.spread(logits)
    assert spread.shape == want.shape
    inside = mx.zeros(200, mx.bool_)
    inside[part.ids] = True
    assert mx.allclose(
        mx.where(inside, spread, 0), mx.where(inside, want, 0), atol=1e-5
    )
    assert mx.all(mx.where(inside, True, spread == -mx.inf))
    top = part.tokens(mx.argmax(logits, axis=-1))
    assert mx.array_equal(top, mx.argmax(spread, axis=-1))


def test_a_prefix_is_no_copy():
    layer = nn.Linear(1024, 20_000, bias=False)
    x = mx.zeros((1, 1, 1024))
    mx.eval(layer.parameters(), x)
    part = DraftVocabulary(layer, 15_000, 4)
    mx.eval(part.logits(x))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(part.logits(x))
    assert mx.get_peak_memory() - before < layer.weight.nbytes / 10


def test_slots():
    part = DraftVocabulary(nn.Embedding(200, 8), SIZE, 3)
    assert [t for t in range(200) if t in part] == [*range(SIZE), 100, 101, 102]
    part.see([150, 5, 160])
    assert [t for t in range(SIZE, 200) if t in part] == [102, 150, 160]
    part.see([150, 170, 180])  # the longest unseen makes room
    assert [t for t in range(SIZE, 200) if t in part] == [150, 170, 180]
    part.keep([400])  # a tokenizer may know more ids than the model
    assert 400 not in part


def test_left_where_it_does_not_pay():
    part = DraftVocabulary(nn.Embedding(2000, 8), SIZE, SLOTS)
    part.see(range(90))
    assert part.active
    part.see(range(1000, 1030))  # a text of other tokens
    assert not part.active
    part.see([*range(90)] * 3)
    assert part.active


def test_where_there_is_one(noisy_dir):
    model, _ = mlx_mtp.load(noisy_dir)
    target = mlx_mtp.generate_step.target_of(model)
    assert draft_vocabulary(model.mtp, target) is None  # small anyway
    model.mtp.draft_vocab_size = 40
    part = draft_vocabulary(model.mtp, target, [285])
    assert 285 in part
    model.mtp.draft_vocab_size = 0
    assert draft_vocabulary(model.mtp, target) is None
    assert draft_vocabulary(None, target) is None


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr(vocabulary, "SLOTS", SLOTS)


@pytest.mark.parametrize("kind", ["noisy_dir", "random_dir"])
def test_greedy_output_is_plain_decodings(request, few_slots, kind):
    path = request.getfixturevalue(kind)
    model, _ = mlx_mtp.load(path)
    model.mtp.draft_vocab_size = 60
    assert_same_stream(mtp_stream(model, PROMPT, 60, 3), plain_stream(path, PROMPT, 60))


@pytest.mark.parametrize("options", [{}, {"temp": 0.7, "seed": 3}], ids=str)
def test_counters_and_slots(oracle_dir, few_slots, options):
    """The text aé🙂b has bytes past 128: unseen ones are not drafted."""
    loaded = mlx_mtp.load(oracle_dir)
    loaded[0].mtp.draft_vocab_size = 128
    run = {"max_tokens": 40, "num_draft_tokens": 2} | options
    (last,) = deque(mlx_mtp.stream_generate(*loaded, "Q", **run), maxlen=1)
    stats = last.stats
    assert 0 < stats.num_outside_draft_vocabulary <= stats.num_drafts
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    loaded[0].mtp.draft_vocab_size = 0
    (whole,) = deque(mlx_mtp.stream_generate(*loaded, "Q", **run), maxlen=1)
    assert whole.stats.num_outside_draft_vocabulary == 0
    assert whole.stats.num_accepted_tokens > stats.num_accepted_tokens


def test_batch(noisy_dir, few_slots):
    loaded = mlx_mtp.load(noisy_dir)
    loaded[0].mtp.draft_vocab_size = 60
    prompts = [PROMPT, [QUESTION], PROMPT[3:]]
    options = {"max_tokens": [20, 8, 15], "return_token_ids": True}
    options["completion_batch_size"] = 2
    got = mlx_mtp.batch_generate(*loaded, prompts, num_draft_tokens=2, **options)
    want = mlx_mtp.batch_generate(*loaded, prompts, mtp=False, **options)
    assert got.token_ids == want.token_ids


ROWS, V = 30_000, 7
TARGET = np.array([0.3, 0.05, 0.2, 0.1, 0.15, 0.15, 0.05])


def plain_shape(logprobs, at):
    return logprobs.astype(mx.float32)


RULES = {
    "rejection": lambda seeds: Rejection(plain_shape, seeds),
    "block": lambda seeds: Rejection(plain_shape, seeds, by_block=True),
    "coupled": lambda seeds: Coupled(plain_shape, seeds),
}


def chi_square(rule: str, part: DraftVocabulary, spread) -> float:
    """Of the first token of many rounds with one draft each, 6 degrees of freedom."""
    chosen = RULES[rule](list(range(ROWS)))
    start = mx.zeros(ROWS, mx.int32)
    state = mx.broadcast_to(mx.array([1.0, -0.5]), (ROWS, 1, 2))
    logits = spread(part.logits(state))
    drafts, probs = chosen.draft(logits, start, 0)
    target = mx.broadcast_to(mx.log(mx.array(TARGET)), (ROWS, 2, V))
    tokens, _ = chosen.accept(drafts, probs, accept.log_probs(target), start)
    counts = np.bincount(np.array(tokens[:, 0]), minlength=V)
    return float((((counts - ROWS * TARGET) ** 2) / (ROWS * TARGET)).sum())


@pytest.fixture
def part():
    mx.random.seed(11)
    part = DraftVocabulary(nn.Embedding(V, 2), 3, 1)
    part.see([5])
    return part


@pytest.mark.parametrize("rule", RULES)
def test_law(part, rule):
    """The output has the target's distribution, tokens outside the part included."""
    assert chi_square(rule, part, part.spread) < 25  # p = 0.0003


def test_law_can_fail(part, monkeypatch):
    """Probabilities recorded for other tokens than were drafted."""
    right = Rejection.draft

    def wrong(self, logits, start, index):
        tokens, probs = right(self, logits, start, index)
        return tokens, mx.roll(probs, 1, axis=-1)

    monkeypatch.setattr(Rejection, "draft", wrong)
    assert chi_square("rejection", part, part.spread) > 100
