"""The law of sampled tokens, end to end through engine and loop, by chi-square."""

import mlx.core as mx
import numpy as np
import pytest
from checks import engine_of, loop_of, wrong_at
from markov import MarkovHead, MarkovTarget

import mlx_mtp
from mlx_mtp.sampling import ACCEPTANCE, SamplingParams
from mlx_mtp.speculative import rules
from mlx_mtp.speculative.round import Engine

V, START, RUNS = 6, 2, 6000
TEMP = 1.3
FILTERS = {
    "none": {},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.3},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "all": {
        "top_p": 0.9,
        "min_p": 0.05,
        "top_k": 4,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.2,
    },
}
TABLE = np.random.default_rng(0).normal(size=(V, V)) * 1.5


def next_law(params: SamplingParams, token: int) -> np.ndarray:
    """Exact probabilities behind a token; XTC's coin averaged out."""
    logits = mx.array(TABLE[token].astype(np.float32))[None, None]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def law(chance: float) -> np.ndarray:
        fixed = SamplingParams(**{**vars(params), "xtc_probability": chance})
        weights = fixed.shape_with(0)(logprobs, mx.array([[0]]))
        return np.array(mx.softmax(weights, axis=-1), np.float64)[0, 0]

    chance = params.xtc_probability
    return (1 - chance) * law(0.0) + chance * law(1.0) if chance else law(0.0)


def draw_pairs(params: SamplingParams, k: int, rows: np.ndarray) -> np.ndarray:
    """The first two tokens of RUNS runs with a seed each: counts [V, V]."""
    engine = Engine(MarkovTarget(TABLE), MarkovHead(rows), RUNS)
    engine.rule = params.rule(range(RUNS))
    runs = [[] for _ in range(RUNS)]
    for result in loop_of(engine, [[START]] * RUNS, k, 3):
        for run, tokens in zip(runs, result.tokens):
            run += tokens
    pairs = np.array([run[1:3] for run in runs])
    firsts = np.array([run[0] for run in runs])
    counts = np.zeros((V, V, V))
    np.add.at(counts, (firsts, pairs[:, 0], pairs[:, 1]), 1)
    return counts


def chi_square(params: SamplingParams, counts: np.ndarray) -> tuple[float, int, float]:
    """Statistic and degrees of freedom over three tokens, and runs outside the law.

    Cells that are expected less than 5 times are taken together.
    """
    step = np.stack([next_law(params, token) for token in range(V)])
    law = step[START][:, None, None] * step[:, :, None] * step[None]
    expected = RUNS * law
    outside = counts[law == 0].sum()
    large = expected >= 5
    seen = np.append(counts[large], counts[~large].sum())
    want = np.append(expected[large], expected[~large].sum())
    keep = want > 1e-9
    statistic = ((seen - want)[keep] ** 2 / want[keep]).sum()
    return statistic, int(keep.sum()) - 1, outside


def limit(degrees: int) -> float:
    """Five standard deviations and a little: not met by chance."""
    return degrees + 5 * np.sqrt(2 * degrees) + 10


@pytest.mark.parametrize("drafts", ["right", "wrong"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_law(acceptance, filters, k, drafts):
    rows = np.arange(V) if drafts == "right" else (np.arange(V) + 1) % V
    params = SamplingParams(temp=TEMP, acceptance=acceptance, **FILTERS[filters])
    statistic, degrees, outside = chi_square(params, draw_pairs(params, k, rows))
    assert outside == 0
    assert statistic < limit(degrees)


@pytest.mark.parametrize("fault", ["independent match", "no residual", "greedy draft"])
def test_a_wrong_law_is_seen(monkeypatch, fault):
    """Draft, uniform and residual faults that users of other engines have met."""
    acceptance, k = "rejection", 1
    if fault == "independent match":  # accept where two draws happen to be equal
        right = rules.Rejection.accept

        def accept_equal(self, drafts, draft_probs, logprobs, start, first=0):
            nothing = drafts[:, :0]
            rows = [
                right(self, nothing, None, logprobs[:, i : i + 1], start, i).tokens
                for i in range(logprobs.shape[1])
            ]
            tokens = mx.concatenate(rows, axis=1)
            accepted = rules.accept.match(drafts, tokens)
            recovered = mx.where(accepted.kept[:, None] > 1, tokens, 0)
            return accepted._replace(tokens=recovered)

        monkeypatch.setattr(rules.Rejection, "accept", accept_equal)
    if fault == "no residual":
        monkeypatch.setattr(
            rules.accept,
            "recovered_weights",
            lambda n, scales, draft, target: rules.accept.pick(target, n)[:, 0],
        )
    if fault == "greedy draft":  # judged as if it had been drawn
        right_draft = rules.Rejection.draft

        def draft_greedily(self, logits, start, index):
            _, probs = right_draft(self, logits, start, index)
            return mx.argmax(probs, axis=-1).astype(mx.int32), probs

        monkeypatch.setattr(rules.Rejection, "draft", draft_greedily)
    params = SamplingParams(temp=TEMP, acceptance=acceptance)
    rows = (np.arange(V) + 1) % V
    statistic, degrees, _ = chi_square(params, draw_pairs(params, k, rows))
    assert statistic > limit(degrees)


def test_block_accepts_no_less_than_rejection():
    """Measured over the same seeds with a head that is wrong."""
    rates = {}
    for acceptance in ("rejection", "block"):
        params = SamplingParams(temp=TEMP, acceptance=acceptance)
        engine = Engine(MarkovTarget(TABLE), MarkovHead((np.arange(V) + 1) % V), RUNS)
        engine.rule = params.rule(range(RUNS))
        results = list(loop_of(engine, [[START]] * RUNS, 4, 2))
        rates[acceptance] = np.mean([len(t) - 1 for t in results[1].tokens])
    assert rates["block"] > rates["rejection"]


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_law_on_a_real_checkpoint(make_model_dir, text_chain, acceptance):
    """Hybrid caches, half of the drafts wrong: 1,500 first pairs of tokens."""
    path = make_model_dir(
        "sampled law",
        kind="noisy",
        succ=text_chain,
        draft_succ=wrong_at(text_chain, range(0, len(text_chain), 2)),
    )
    model, _ = mlx_mtp.load(path)
    # Temperature 8 softens the margin of 11 logits.
    params = SamplingParams(temp=8.0, top_k=4, acceptance=acceptance)
    runs, start = 1500, ord("Q")
    engine = engine_of(model, batch_size=runs)
    engine.rule = params.rule(range(runs))
    rows = [[] for _ in range(runs)]
    for result in loop_of(engine, [[start]] * runs, 1, 2):
        for row, tokens in zip(rows, result.tokens):
            row += tokens
    pairs = np.array([row[:2] for row in rows])

    def law(tokens):
        logits = model(mx.array([tokens]))[:, -1:]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        weights = params.shape_with(0)(logprobs, mx.array([[0]]))
        return np.array(mx.softmax(weights, axis=-1))[0, 0]

    statistic, outside = 0.0, runs
    first = law([start])
    for a in np.flatnonzero(first):
        second = law([start, int(a)])
        for b in np.flatnonzero(second):
            seen = ((pairs[:, 0] == a) & (pairs[:, 1] == b)).sum()
            want = runs * first[a] * second[b]
            outside -= seen
            statistic += (seen - want) ** 2 / want
    assert outside == 0
    assert statistic < limit(15)
