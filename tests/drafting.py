"""The drafts a running engine makes, against the torch reference on the raw files."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from checks import loop_of
from torch_oracle import TorchOracle

from mlx_mtp.models import FAMILIES
from mlx_mtp.speculative.round import Engine

TOLERANCE = 1e-4


class RecordingTarget:
    """A target that remembers what its output layer has made."""

    def __init__(self, target):
        self._target, self.made = target, []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def logits(self, hidden: mx.array) -> mx.array:
        self.made.append(self._target.logits(hidden))
        return self.made[-1]

    def output(self, x: mx.array) -> mx.array:
        self.made.append(self._target.output(x))
        return self.made[-1]


def draft_logits(
    model, prompt: Sequence[int], k: int, rounds: int, step_size: int
) -> list[tuple[list[int], np.ndarray]]:
    """Of every round: the tokens known before it, and its draft logits [K, V]."""
    target = RecordingTarget(FAMILIES[model.model_type].target(model))
    loop = loop_of(
        Engine(target, model.mtp),
        [prompt],
        k,
        100,
        prefill_step_size=step_size,
        depth=0,
    )
    tokens, results = list(prompt), []
    for count, result in zip(range(rounds + 1), loop):
        tokens += result.tokens[0]
        # Logits so far: the prefill's, then K drafts and a verification per round;
        # the round behind this one is built already.
        start = 1 + count * (k + 1)
        drafts = [np.array(x[0, 0]) for x in target.made[start : start + k]]
        results.append((list(tokens), np.stack(drafts)))
    return results


def assert_drafts_equal_oracle(
    model, raw: Path, prompt: Sequence[int], *, k: int, rounds: int, step_size: int
) -> None:
    """Relative error below 1e-4 at every depth of every round."""
    oracle = TorchOracle(raw)
    for tokens, got in draft_logits(model, prompt, k, rounds, step_size):
        drafted = got.argmax(axis=-1).tolist()
        want, _ = oracle.drafts(tokens, k, drafted)
        error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
        assert (error < TOLERANCE).all(), f"after {len(tokens)} tokens: {error}"
