"""How tokens are chosen: parameters -> a rule for target and drafter alike.

Filters are mlx-lm's own functions in its order: top-p, min-p, XTC and top-k on
log-probabilities, temperature last.
"""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_logits_processors,
)

from .speculative import noise
from .speculative.noise import Purpose
from .speculative.processors import LogitsProcessor, Stateless
from .speculative.rules import Called, Coupled, Greedy, Rejection, Rule

ACCEPTANCE = ("rejection", "block", "coupled")
MAX_XTC_THRESHOLD = 0.5
# Beyond these, weights or their inverse leave float32.
MIN_TEMP, MAX_TEMP = 1e-30, 1e30


@dataclass(frozen=True)
class SamplingParams:
    """mlx-lm's sampling parameters, and the acceptance rule.

    Args:
        temp: temperature; 0 takes the most likely token and draws nothing.
        top_p: keep the most likely tokens up to this mass; 0 or 1 keeps all.
        top_k: keep this many; 0 keeps all.
        min_p: drop tokens below this share of the most likely one's probability.
        min_tokens_to_keep: tokens that min-p always keeps.
        xtc_probability: chance, per token, of dropping all but the least likely of the
            tokens above ``xtc_threshold``.
        xtc_threshold: 0 to 0.5.
        xtc_special_tokens: token ids that XTC never drops.
        seed: of all random numbers; ``None`` draws one from ``mx.random``.
        acceptance: ``"rejection"``, ``"block"`` or ``"coupled"``.
    """

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] = ()
    seed: int | None = None
    acceptance: str = "rejection"

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        checks = (
            (
                "temp",
                self.temp == 0 or MIN_TEMP <= self.temp <= MAX_TEMP,
                f"0, or {MIN_TEMP:g} to {MAX_TEMP:g}",
            ),
            ("top_p", 0 <= self.top_p <= 1, "0 to 1"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("min_tokens_to_keep", self.min_tokens_to_keep >= 1, "1 or more"),
            ("xtc_probability", 0 <= self.xtc_probability <= 1, "0 to 1"),
            (
                "xtc_threshold",
                0 <= self.xtc_threshold <= MAX_XTC_THRESHOLD,
                f"0 to {MAX_XTC_THRESHOLD}",
            ),
            (
                "seed",
                self.seed is None
                or (isinstance(self.seed, numbers.Integral) and self.seed >= 0),
                "a whole number, 0 or more",
            ),
            ("acceptance", self.acceptance in ACCEPTANCE, " or ".join(ACCEPTANCE)),
        )
        for name, right, allowed in checks:
            if not right:
                value = getattr(self, name)
                raise ValueError(f"{name} must be {allowed}, not {value}")

    def rule(self, seeds: Sequence[int] | None = None) -> Rule:
        """The decoding rule for these parameters; ``seeds`` gives every row its own."""
        if self.temp == 0:
            return Greedy()
        seed = self.seed if seeds is None else seeds
        if seed is None:
            seed = mx.random.randint(0, 1 << 31, shape=()).item()
        shape = self.shape_with(seed)
        if self.acceptance == "coupled":
            return Coupled(shape, seed)
        return Rejection(shape, seed, by_block=self.acceptance == "block")

    def shape_with(self, seed: noise.Seeds) -> Callable[[mx.array, mx.array], mx.array]:
        """Filters and temperature: (log-probs [B, T, V], positions [B, T]) -> float32.

        The filters see the log-probabilities in the model's dtype, as in mlx-lm.
        """
        xtc_stream = noise.stream(seed, Purpose.XTC)

        def shape(logprobs: mx.array, at: mx.array) -> mx.array:
            if 0 < self.top_p < 1:
                logprobs = apply_top_p(logprobs, self.top_p)
            if self.min_p > 0:
                keep = min(self.min_tokens_to_keep, logprobs.shape[-1])
                logprobs = apply_min_p(logprobs, self.min_p, keep)
            if self.xtc_probability > 0:
                coin = noise.uniform(noise.keys(xtc_stream, at))
                logprobs = self.apply_xtc(logprobs, coin)
            if 0 < self.top_k < logprobs.shape[-1]:
                logprobs = apply_top_k(logprobs, self.top_k)
            return logprobs.astype(mx.float32) * (1 / self.temp)

        return shape

    def apply_xtc(self, logprobs: mx.array, coin: mx.array) -> mx.array:
        """XTC with the coin [B, T] given; follows mlx-lm's ``apply_xtc``, which draws
        it.

        Of the tokens above the threshold all but the least likely are dropped.
        """
        probs = mx.softmax(logprobs, axis=-1)
        above = mx.where(probs > self.xtc_threshold, probs, mx.inf)
        drop = probs > above.min(axis=-1, keepdims=True)
        if self.xtc_special_tokens:
            drop[..., list(self.xtc_special_tokens)] = False
        drop = drop & (coin <= self.xtc_probability)[..., None]
        return mx.where(drop, -mx.inf, logprobs)


class ChoiceOptions(TypedDict, total=False):
    """How tokens are chosen: keywords of the generating functions.

    Sampling is described at :class:`SamplingParams`. ``sampler`` is a caller's own, as
    mlx-lm's: log-probabilities [B, V] -> tokens [B]; drafts are then greedy and
    accepted when equal to its token. ``logits_processors`` are callables ``(tokens [n],
    logits [1, V]) -> logits``, see :mod:`mlx_mtp.speculative.processors`. Penalties and
    ``logit_bias`` (token id -> added to its logit) are mlx-lm's.
    """

    temp: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Sequence[int]
    seed: int | None
    acceptance: str
    sampler: Callable[[mx.array], mx.array] | None
    logits_processors: Sequence[LogitsProcessor] | None
    logit_bias: dict[int, float] | None
    repetition_penalty: float | None
    repetition_context_size: int
    presence_penalty: float | None
    presence_context_size: int
    frequency_penalty: float | None
    frequency_context_size: int


PENALTIES = ("repetition", "presence", "frequency")


def choice(
    vocab_size: int, **options: Unpack[ChoiceOptions]
) -> tuple[Rule, list[LogitsProcessor]]:
    """The rule and the logits processors for some options.

    Raises:
        ValueError: for a value out of range.
        TypeError: for an unknown option.
    """
    if unknown := sorted(options.keys() - ChoiceOptions.__annotations__.keys()):
        raise TypeError(f"unknown option(s): {', '.join(unknown)}")
    sampler = options.pop("sampler", None)
    processors = [*(options.pop("logits_processors", None) or ())]
    names = [f"{p}_{kind}" for p in PENALTIES for kind in ("penalty", "context_size")]
    chosen = {name: options.pop(name) for name in names if name in options}
    bias = options.pop("logit_bias", None) or {}
    special = options.get("xtc_special_tokens", ())
    for name, tokens in (("logit_bias", bias), ("xtc_special_tokens", special)):
        for token in tokens:  # mlx would write outside the array
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} names token {token}, outside the vocabulary of "
                    f"{vocab_size}"
                )
    penalties = make_logits_processors(logit_bias=bias, **chosen)
    params = SamplingParams(**options)
    if sampler is not None and params.temp > 0:
        raise ValueError(f"give a sampler or temp ({params.temp}), not both")
    rule = params.rule() if sampler is None else Called(sampler)
    return rule, [*map(Stateless, penalties), *processors]
