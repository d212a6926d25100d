"""Acceptance rules: how many drafts stand and which token follows them.

Pure functions on arrays, batch-first; nothing is read on the host. Terms: an *accepted*
draft passed the test, the *recovered* token replaces the first draft that did not, the
*bonus* token follows when all passed. Row i of the target judges draft i.
"""

from typing import NamedTuple

import mlx.core as mx


class Accepted(NamedTuple):
    """Outcome of a verification.

    Shapes:
        tokens: [B, K + 1] int32, of which the first ``kept[b]`` are row b's: the
            accepted drafts and the recovered or bonus token; the rest is left over
        kept: [B] int32, 1 to K + 1
    """

    tokens: mx.array
    kept: mx.array


def pick(x: mx.array, index: mx.array) -> mx.array:
    """``x[b, index[b]]`` of x [B, T, ...] as [B, 1, ...]."""
    return mx.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)


def log_probs(logits: mx.array) -> mx.array:
    """Log-probabilities over the last axis, in the dtype of ``logits`` as in mlx-lm."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def greedy_tokens(logprobs: mx.array) -> mx.array:
    """[..., V] -> [...] int32.

    Of log-probabilities, not logits: rounded to bfloat16 the former tie where the
    latter do not, and mlx-lm takes the first of those ties.
    """
    return mx.argmax(logprobs, axis=-1).astype(mx.int32)


def greedy(drafts: mx.array, target_logprobs: mx.array) -> Accepted:
    """Accept a draft while it is the target's own choice.

    Shapes:
        drafts: [B, K]; target_logprobs: [B, K + 1, V]
    """
    tokens = greedy_tokens(target_logprobs)
    right = (tokens[:, :-1] == drafts).astype(mx.int32)
    return Accepted(tokens, mx.cumprod(right, axis=1).sum(axis=1) + 1)
