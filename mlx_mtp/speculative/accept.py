"""Acceptance rules: how many drafts stand and which token follows them.

Pure functions on arrays, batch-first; nothing is read on the host. Terms: an *accepted*
draft passed the test, the *recovered* token replaces the first draft that did not, the
*bonus* token follows when all passed. Row i of the target judges draft i.

Greedy, coupled and caller-sampled decoding accept a draft while it equals the target's
own token (``match``). ``rejection`` and ``block`` judge by probabilities; both leave
the output exactly the target's distribution, whatever the drafter's.
"""

from typing import NamedTuple

import mlx.core as mx

from .ranges import arange


class Accepted(NamedTuple):
    """Outcome of a verification.

    Shapes:
        tokens: [B, K + 1] int32, of which the first ``kept[b]`` are row b's: the
            accepted drafts and the recovered or bonus token; the rest is left over
        kept: [B] int32, 1 to K + 1
    """

    tokens: mx.array
    kept: mx.array


class Verdict(NamedTuple):
    """What a probabilistic rule says of the drafts, before any random number.

    Args:
        thresholds: [B, K]; draft i passes if a uniform number in [0, 1) is below its.
        scales: [B, K + 1]; behind n accepted drafts the recovered token has weights
            ``max(scales[n] * target_probs[n] - draft_probs[n], 0)``.
    """

    thresholds: mx.array
    scales: mx.array


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


def match(drafts: mx.array, tokens: mx.array) -> Accepted:
    """Accept a draft while it is the target's own token.

    Shapes:
        drafts: [B, K]; tokens: [B, K + 1], the target's
    """
    right = (tokens[:, :-1] == drafts).astype(mx.int32)
    return Accepted(tokens, mx.cumprod(right, axis=1).sum(axis=1) + 1)


def greedy(drafts: mx.array, target_logprobs: mx.array) -> Accepted:
    """Accept a draft while it is the target's most likely token.

    Shapes:
        drafts: [B, K]; target_logprobs: [B, K + 1, V]
    """
    return match(drafts, greedy_tokens(target_logprobs))


def ratio(drafts: mx.array, draft_probs: mx.array, target_probs: mx.array) -> mx.array:
    """Target over draft probability of each draft, [B, K]; 0 where the target has 0."""
    at = drafts[..., None]
    q = mx.take_along_axis(draft_probs, at, axis=-1)[..., 0]
    p = mx.take_along_axis(target_probs[:, :-1], at, axis=-1)[..., 0]
    # A probability too small for its dtype can round to 0 even though it was drawn.
    return mx.where(p > 0, p / mx.maximum(q, mx.finfo(q.dtype).smallest_normal), 0)


def rejection(
    drafts: mx.array, draft_probs: mx.array, target_probs: mx.array
) -> Verdict:
    """Token by token (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192).

    Shapes:
        drafts: [B, K]; draft_probs: [B, K, V], which each draft was drawn from;
        target_probs: [B, K + 1, V]
    """
    thresholds = mx.minimum(ratio(drafts, draft_probs, target_probs), 1)
    return Verdict(thresholds, mx.ones_like(target_probs[..., 0]))


def block(drafts: mx.array, draft_probs: mx.array, target_probs: mx.array) -> Verdict:
    """All drafts together (Sun et al., 2024, https://arxiv.org/abs/2403.10444).

    Never accepts fewer on average than ``rejection``. The last draft to pass counts.

    Shapes:
        as in :func:`rejection`
    """
    ratios = ratio(drafts, draft_probs, target_probs)
    num_drafts = drafts.shape[1]
    scales = [mx.ones_like(target_probs[:, 0, 0])]
    for i in range(num_drafts):
        scales.append(mx.minimum(scales[-1] * ratios[:, i], 1))
    thresholds = []
    for i in range(1, num_drafts):
        scale = scales[i][:, None]
        rest = mx.maximum(scale * target_probs[:, i] - draft_probs[:, i], 0).sum(-1)
        total = rest + 1 - scales[i]
        # 0 / 0 where target and draft agree: a later draft decides.
        thresholds.append(mx.where(total > 0, rest / mx.where(total > 0, total, 1), 0))
    thresholds += scales[num_drafts:] if num_drafts else []
    empty = mx.zeros_like(ratios)
    thresholds = mx.stack(thresholds, axis=1) if thresholds else empty
    return Verdict(thresholds, mx.stack(scales, axis=1))


def count_prefix(thresholds: mx.array, uniforms: mx.array) -> mx.array:
    """Drafts before the first that fails, [B]; for ``rejection``."""
    passed = (uniforms < thresholds).astype(mx.int32)
    return mx.cumprod(passed, axis=1).sum(axis=1)


def count_last(thresholds: mx.array, uniforms: mx.array) -> mx.array:
    """Drafts up to the last that passes, [B]; for ``block``."""
    numbers = mx.arange(1, thresholds.shape[1] + 1)
    passed = mx.where(uniforms < thresholds, numbers, 0)
    nothing = mx.zeros((thresholds.shape[0], 1), passed.dtype)
    return mx.concatenate([nothing, passed], axis=1).max(axis=1).astype(mx.int32)


def recovered_weights(
    accepted: mx.array, scales: mx.array, draft_probs: mx.array, target_probs: mx.array
) -> mx.array:
    """Unnormalised weights [B, V] of the token behind ``accepted`` [B] drafts.

    Behind the last draft there is no draft distribution, so the bonus token follows the
    target. A residual that rounds to nothing falls back to the target as well.
    """
    draft_probs = mx.pad(draft_probs, [(0, 0), (0, 1), (0, 0)])
    target = pick(target_probs, accepted)[:, 0]
    residual = pick(scales, accepted) * target - pick(draft_probs, accepted)[:, 0]
    residual = mx.maximum(residual, 0)
    return mx.where(residual.sum(-1, keepdims=True) > 0, residual, target)


def join(drafts: mx.array, accepted: mx.array, token: mx.array) -> Accepted:
    """The first ``accepted`` [B] drafts and ``token`` [B] behind them."""
    places = arange(drafts.shape[1] + 1)
    padded = mx.pad(drafts, [(0, 0), (0, 1)])
    tokens = mx.where(places == accepted[:, None], token[:, None], padded)
    return Accepted(tokens.astype(mx.int32), accepted + 1)
