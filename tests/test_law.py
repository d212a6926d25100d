"""The law of each rule's output, by exact enumeration in float64 (V = 3, K = 3)."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.speculative import accept

V, K = 3, 3
ROWS = np.array(list(product(range(V), repeat=K)))  # all draft sequences


def conditionals(rng: np.random.Generator, kind: str) -> dict[tuple, np.ndarray]:
    """A next-token distribution for every prefix of at most K tokens."""
    table = {}
    for length in range(K + 1):
        for prefix in product(range(V), repeat=length):
            probs = rng.dirichlet(np.full(V, 0.7))
            if kind == "truncated" and rng.random() < 0.7:
                probs[rng.integers(V)] = 0.0
            if kind == "one-hot":
                probs = np.eye(V)[rng.integers(V)]
            table[prefix] = probs / probs.sum()
    return table


def along(table: dict[tuple, np.ndarray], count: int) -> np.ndarray:
    """Distributions met along each draft sequence: [rows, count, V]."""
    return np.array([[table[tuple(row[:i])] for i in range(count)] for row in ROWS])


def accepted_law(rule: str, thresholds: np.ndarray) -> np.ndarray:
    """Probability of accepting n = 0..K drafts, [rows, K + 1]."""
    law = np.zeros((len(ROWS), K + 1))
    for passed in product((0, 1), repeat=K):
        chance = np.where(passed, thresholds, 1 - thresholds).prod(axis=1)
        uniforms = np.where(passed, 0.0, 1.0)[None]
        count = accept.count_prefix if rule == "rejection" else accept.count_last
        n = count(mx.full((1, K), 0.5), mx.array(uniforms)).item()
        law[:, n] += chance
    return law


def enumerate_rule(rule: str, target: dict, draft: dict):
    """Law over all sequences of K + 1 tokens, and the expected number accepted."""
    q, p = along(draft, K), along(target, K + 1)
    chance = np.array(
        [np.prod([q[r, i, row[i]] for i in range(K)]) for r, row in enumerate(ROWS)]
    )
    with mx.stream(mx.cpu):
        arrays = [mx.array(ROWS), mx.array(q, mx.float64), mx.array(p, mx.float64)]
        thresholds, scales = getattr(accept, rule)(*arrays)
        n_law = accepted_law(rule, np.array(thresholds))
        law, expected = dict.fromkeys(product(range(V), repeat=K + 1), 0.0), 0.0
        for n in range(K + 1):
            count = mx.full((len(ROWS),), n, mx.int32)
            weights = accept.recovered_weights(count, scales, *arrays[1:])
            weights = np.array(weights)
            weights /= weights.sum(axis=1, keepdims=True)
            expected += n * (chance * n_law[:, n]).sum()
            for r, row in enumerate(ROWS):
                for token in range(V):
                    start = (*row[:n].tolist(), token)
                    mass = chance[r] * n_law[r, n] * weights[r, token]
                    if mass > 0:
                        spread(law, start, mass, target)
    return law, expected


def spread(law: dict, start: tuple, mass: float, target: dict) -> None:
    """The rest of the K + 1 tokens follows the target."""
    if len(start) == K + 1:
        law[start] += mass
        return
    for token in range(V):
        spread(law, (*start, token), mass * target[start][token], target)


def target_law(target: dict) -> dict[tuple, float]:
    law = dict.fromkeys(product(range(V), repeat=K + 1), 0.0)
    spread(law, (), 1.0, target)
    return law


@pytest.mark.parametrize("draft_kind", ["full", "truncated", "one-hot", "the target"])
@pytest.mark.parametrize("target_kind", ["full", "truncated"])
@pytest.mark.parametrize("seed", range(4))
def test_law_is_the_targets(target_kind, draft_kind, seed):
    rng = np.random.default_rng(seed)
    target = conditionals(rng, target_kind)
    draft = target if draft_kind == "the target" else conditionals(rng, draft_kind)
    want = target_law(target)
    expected = {}
    for rule in ("rejection", "block"):
        law, expected[rule] = enumerate_rule(rule, target, draft)
        assert max(abs(law[s] - want[s]) for s in want) < 1e-12, rule
    assert expected["block"] >= expected["rejection"] - 1e-12
    if draft_kind == "the target":
        assert expected["rejection"] == pytest.approx(K, abs=1e-12)
    if draft_kind == "one-hot":
        assert expected["block"] == pytest.approx(expected["rejection"], abs=1e-12)


def test_block_accepts_more_somewhere():
    rng = np.random.default_rng(0)
    target, draft = conditionals(rng, "full"), conditionals(rng, "full")
    (_, one), (_, all_) = (
        enumerate_rule(rule, target, draft) for rule in ("rejection", "block")
    )
    assert all_ > one + 1e-3


@pytest.mark.parametrize(
    "fault", ["ratio clipped low", "no residual", "residual of the wrong row"]
)
def test_a_wrong_rule_is_seen(monkeypatch, fault):
    """The enumeration has teeth."""
    if fault == "ratio clipped low":
        right = accept.ratio
        monkeypatch.setattr(accept, "ratio", lambda *arrays: right(*arrays) * 0.9)
    if fault == "no residual":
        monkeypatch.setattr(
            accept,
            "recovered_weights",
            lambda n, scales, draft, target: accept.pick(target, n)[:, 0],
        )
    if fault == "residual of the wrong row":
        right = accept.recovered_weights
        monkeypatch.setattr(
            accept,
            "recovered_weights",
            lambda n, *arrays: right(mx.maximum(n - 1, 0), *arrays),
        )
    rng = np.random.default_rng(1)
    target, draft = conditionals(rng, "full"), conditionals(rng, "full")
    want = target_law(target)
    for rule in ("rejection", "block"):
        law, _ = enumerate_rule(rule, target, draft)
        assert max(abs(law[s] - want[s]) for s in want) > 1e-3


def test_a_draft_the_target_forbids_is_rejected():
    draft_probs, target_probs = mx.array([[[0.5, 0.5]]]), mx.array([[[0.0, 1.0]] * 2])
    for rule in (accept.rejection, accept.block):
        thresholds, _ = rule(mx.array([[0]]), draft_probs, target_probs)
        assert thresholds.item() == 0.0
        # Even the smallest uniform number does not let it pass.
        for count in (accept.count_prefix, accept.count_last):
            assert count(thresholds, mx.zeros((1, 1))).item() == 0


def test_an_empty_residual_falls_back_to_the_target():
    same = mx.array([[[0.25, 0.75]] * 2])
    weights = accept.recovered_weights(
        mx.array([0]), mx.ones((1, 2)), same[:, :1], same
    )
    assert weights.tolist() == [[0.25, 0.75]]
