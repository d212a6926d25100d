"""Whether generation with MTP gives what plain decoding gives, on a loaded model.

On MLX's CPU backend it does, bit for bit. On Metal, kernels round differently for
different numbers of rows, and near ties of the two likeliest tokens the texts can part;
from there on they are different texts, so the comparison ends.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from .generate_step import steps


@dataclass(frozen=True)
class Comparison:
    """One prompt at one K.

    Args:
        num_draft_tokens: K.
        tokens: compared, up to the first that differs.
        diverged_at: index of that token, or None.
        top2_gap: difference of plain decoding's two likeliest log-probabilities there.
        max_difference: of log-probabilities, over the tokens before it.
    """

    num_draft_tokens: int
    tokens: int
    diverged_at: int | None
    top2_gap: float | None
    max_difference: float

    @property
    def exact(self) -> bool:
        return self.diverged_at is None and self.max_difference == 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"exact": self.exact}


def compare(
    model: nn.Module, prompt: Sequence[int], ks: Sequence[int], count: int
) -> list[Comparison]:
    """Compare tokens and log-probabilities with mlx-lm's plain decoding."""
    plain = list(generate_step(mx.array(prompt), model, max_tokens=count))
    return [_compare(model, prompt, k, plain) for k in ks]


def _compare(
    model: nn.Module, prompt: Sequence[int], k: int, plain: list[tuple[int, mx.array]]
) -> Comparison:
    differences = [0.0]
    run = steps(prompt, model, mtp=True, num_draft_tokens=k, max_tokens=len(plain))
    for i, (step, (token, logprobs)) in enumerate(zip(run, plain, strict=True)):
        if step.token != token:
            first, second = mx.topk(logprobs.astype(mx.float32), 2).tolist()
            return Comparison(k, i, i, abs(first - second), max(differences))
        difference = step.logprobs.astype(mx.float32) - logprobs.astype(mx.float32)
        differences.append(mx.abs(difference).max().item())
    return Comparison(k, len(plain), None, None, max(differences))
