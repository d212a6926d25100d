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


class RecordingEngine(Engine):
    """An engine that remembers the head's logits it has chosen drafts from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made: list[mx.array] = []

    def choose(self, start, logits, index):
        self.made.append(logits)
        return super().choose(start, logits, index)


def draft_logits(
    model, prompt: Sequence[int], k: int, rounds: int, step_size: int
) -> list[tuple[list[int], np.ndarray]]:
    """Of every round: the tokens known before it, and its draft logits [K, V]."""
    engine = RecordingEngine(FAMILIES[model.model_type].target(model), model.mtp)
    loop = loop_of(engine, [prompt], k, 100, prefill_step_size=step_size, depth=0)
    tokens, results = list(prompt), []
    for count, result in zip(range(rounds + 1), loop):
        tokens += result.tokens[0]
        # The round behind this one is built already.
        made = engine.made[count * k : (count + 1) * k]
        results.append((list(tokens), np.stack([np.array(x[0, 0]) for x in made])))
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
