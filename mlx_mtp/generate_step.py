"""Token ids -> token ids: check the arguments, set up an engine, emit its rounds."""

import contextlib
import numbers
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.switch_layers import SwitchLinear

from .draft_memory import AUTO, MAX_DRAFT_TOKENS, NumDraftTokens, memory_of
from .models import family_of
from .models.target import Target
from .prompt_cache import PromptCache, adopt, give_back
from .sampling import ChoiceOptions, choice
from .speculative.controller import Controller, FixedLength
from .speculative.loop import Loop
from .speculative.processors import Processors
from .speculative.quantized_cache import kv_quantization
from .speculative.round import Engine
from .speculative.rules import Called, Rejection, Rule
from .speculative.stats import SpeculationStats
from .speculative.vocabulary import draft_vocabulary

MAX_TOKENS = 256
NUM_DRAFT_TOKENS: NumDraftTokens = AUTO
PREFILL_STEP_SIZE = 2048
KV_GROUP_SIZE = 64
QUANTIZED_KV_START = 5000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Step:
    """One emitted token, as the engine's caller sees it."""

    token: int
    logprobs: mx.array
    from_draft: bool
    stats: SpeculationStats


def check_num_draft_tokens(value: NumDraftTokens) -> NumDraftTokens:
    if value == AUTO:
        return value
    if not isinstance(value, numbers.Integral) or not 0 <= value <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"num_draft_tokens must be 0 to {MAX_DRAFT_TOKENS} or {AUTO!r}, not "
            f"{value!r}"
        )
    return value


def prompt_ids(prompt: Sequence[int] | mx.array, vocab_size: int) -> list[int]:
    """Checked token ids: an id past the vocabulary would read foreign memory."""
    if hasattr(prompt, "tolist"):  # mlx's arrays, numpy's, torch's
        if prompt.ndim != 1:
            raise ValueError(
                f"the prompt must be one row of token ids, not {prompt.ndim}-D"
            )
        prompt = prompt.tolist()
    ids = list(prompt)
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    for token in ids:
        if not isinstance(token, numbers.Integral):
            raise ValueError(
                f"the prompt must be one row of token ids, but it holds {token!r}"
            )
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token id {token} is outside the model's vocabulary of {vocab_size}"
            )
    return [int(token) for token in ids]


def target_of(model: nn.Module) -> Target:
    """The model in the parts the engine uses.

    Raises:
        ValueError: the model's layers do not run on the present device.
    """
    check_experts(model)
    family = family_of({"model_type": getattr(model, "model_type", None)})
    return family.target(model)


def check_experts(model: nn.Module) -> None:
    """MLX's CPU backend multiplies by experts in float32 or quantised only."""
    if mx.default_device() != mx.cpu:
        return
    kinds = {m.weight.dtype for m in model.modules() if type(m) is SwitchLinear}
    if kinds - {mx.float32}:
        raise ValueError(
            "experts that are not quantised run on MLX's CPU backend in float32 only; "
            "convert with --dtype float32 or -q"
        )


def steps(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    *,
    mtp: bool,
    num_draft_tokens: NumDraftTokens = NUM_DRAFT_TOKENS,
    max_tokens: int = MAX_TOKENS,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
    end_tokens: Collection[int] = (),
    special_tokens: Collection[int] = (),
    prompt_cache: list[Any] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = KV_GROUP_SIZE,
    quantized_kv_start: int = QUANTIZED_KV_START,
    **options: Unpack[ChoiceOptions],
) -> Generator[Step, None, None]:
    """Check everything at once, then return the iterator over the emitted tokens.

    Args:
        end_tokens: no logits processor is called behind one of them.
        special_tokens: that can be drafted whatever the text has shown.
        prompt_cache: holds the text before ``prompt``, and all of it in the end.
    """
    check_num_draft_tokens(num_draft_tokens)
    if not isinstance(max_tokens, numbers.Integral) or max_tokens < -1:
        raise ValueError(
            f"max_tokens must be -1 (no limit) or a whole number, not {max_tokens!r}"
        )
    if not isinstance(prefill_step_size, numbers.Integral) or prefill_step_size < 1:
        raise ValueError(
            f"prefill_step_size must be 1 or more, not {prefill_step_size}"
        )
    if mtp and getattr(model, "mtp", None) is None:
        raise ValueError(
            "the model has no MTP head; convert a checkpoint that ships one with "
            "convert.py, or generate without MTP"
        )
    target = target_of(model)
    ids = prompt_ids(prompt, target.vocab_size)
    rule, processors = choice(target.vocab_size, **options)
    quantization = kv_quantization(
        kv_bits, kv_group_size, quantized_kv_start, target.head_dim
    )
    drafting = mtp and num_draft_tokens != 0
    memory = memory_of(model) if drafting and num_draft_tokens == AUTO else None
    if memory is not None:
        num_draft_tokens = memory.begin(repeatable=needs_repeating(rule, options))
    cache = None if prompt_cache is None else adopt(prompt_cache)
    if cache is not None and len(cache) != target.num_caches:
        raise ValueError(
            f"the prompt cache has {len(cache)} layers, the model {target.num_caches}"
        )
    rows = None
    if processors or isinstance(rule, Called):  # both must be called in order
        rows = [Processors(processors, ids, end_tokens, max_tokens)]
    history = None if cache is None else cache.history
    head = model.mtp if drafting else None
    vocabulary = draft_vocabulary(head, target, [*end_tokens, *special_tokens])
    loop = Loop(
        Engine(target, head, 1, rule, rows, history, quantization, vocabulary),
        [ids],
        num_draft_tokens=num_draft_tokens if drafting else 0,
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        stream=generation_stream,
        progress=prompt_progress_callback,
    )
    ends = []
    if memory is not None:
        ends.append(partial(memory.end, num_draft_tokens))
    if cache is None:
        return _emit(loop, max_tokens, ends)
    ends.append(partial(_keep, loop, cache, prompt_cache))
    iterator = _emit(loop, max_tokens, ends)
    cache.lend(iterator)
    return iterator


def extend_prompt_cache(
    prompt: Sequence[int],
    model: nn.Module,
    prompt_cache: PromptCache,
    *,
    mtp: bool = True,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
) -> None:
    """Run a prompt behind a prompt cache without generating anything.

    Raises:
        ValueError: as :func:`mtp_generate_step`.
    """
    target = target_of(model)
    ids = prompt_ids(prompt, target.vocab_size)
    head = model.mtp if mtp else None
    history = adopt(prompt_cache).history
    loop = Loop(
        Engine(target, head, history=history),
        [ids],
        num_draft_tokens=0,
        max_tokens=0,
        prefill_step_size=prefill_step_size,
        stream=generation_stream,
        progress=prompt_progress_callback,
    )
    try:
        loop.prefill()
    finally:
        _keep(loop, prompt_cache, prompt_cache)


def needs_repeating(rule: Rule, options: Mapping[str, Any]) -> bool:
    """Whether a seed was given and the text for it depends on the numbers of drafts."""
    return isinstance(rule, Rejection) and options.get("seed") is not None


def stats_for(controller: Controller | FixedLength) -> SpeculationStats:
    """Counters before the first round; those of a fixed K show its positions."""
    zeros = ()
    if isinstance(controller, FixedLength):
        zeros = (0,) * controller.num_draft_tokens
    return SpeculationStats(
        num_accepted_tokens_per_pos=zeros, num_draft_tokens_per_pos=zeros
    )


def _keep(loop: Loop, cache: PromptCache, given: list[Any]) -> None:
    """Leave prompt and output in the caller's cache."""
    cache.tokens += loop.finish()
    cache[:] = loop.engine.cache
    drafter = loop.engine.drafter
    # A head that has missed a part of the text starts afresh.
    cache.head = drafter.cache if drafter else None
    cache.carry = loop.engine.carry if drafter else None
    if given is not cache:
        give_back(given, cache)


def _emit(
    loop: Loop, max_tokens: int, ends: Sequence[Callable[[], None]]
) -> Generator[Step, None, None]:
    """The rounds of a single row, token by token, cut at ``max_tokens``.

    However it ends, ``ends`` are called.
    """
    stats, count = stats_for(loop.controller), 0
    if max_tokens == 0:
        return
    try:
        for result in loop:
            (tokens,) = result.tokens
            if count == 0:
                stats = replace(stats, notes=loop.engine.target.notes())
            stats = stats.after(
                result.num_draft_tokens, len(tokens) - 1, result.outside[0]
            )
            with mx.stream(loop.stream):
                logprobs = [result.logprobs[0, i] for i in range(len(tokens))]
            # Only then can another thread read them.
            mx.async_eval(logprobs)
            for i, token in enumerate(tokens):
                count += 1
                loop.take()
                yield Step(token, logprobs[i], i < len(tokens) - 1, stats)
                if count == max_tokens:
                    return
    finally:
        for end in ends:
            end()


def mtp_generate_step(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    *,
    num_draft_tokens: NumDraftTokens = NUM_DRAFT_TOKENS,
    max_tokens: int = MAX_TOKENS,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
    prompt_cache: list[Any] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = KV_GROUP_SIZE,
    quantized_kv_start: int = QUANTIZED_KV_START,
    **options: Unpack[ChoiceOptions],
) -> Iterator[tuple[int, mx.array, bool]]:
    """Generate token ids with the model's MTP head.

    The tokens have the distribution of plain decoding; greedy ones, and ``coupled``
    ones for a seed, are plain decoding's own. It does not stop at an end token.

    Args:
        prompt: token ids, a list or a 1-D array.
        model: from :func:`mlx_mtp.load`, with a head.
        num_draft_tokens: drafts per round, 0 to 8; 0 decodes plainly. ``"auto"``
            chooses, round by round, what is expected to be fastest. With ``seed`` and
            the rules under which the text for it depends on K, it goes by acceptance
            alone, so that the text does not depend on the machine's speed. Default:
            ``"auto"``.
        max_tokens: tokens to yield; -1 for no limit. Default: 256.
        prefill_step_size: prompt tokens per prefill chunk. Default: 2048.
        prompt_progress_callback: called with the prompt tokens done and in all.
        prompt_cache: from :func:`mlx_mtp.make_prompt_cache` or mlx-lm's function of
            that name; updated in place. ``prompt`` goes on behind it.
        kv_bits: quantise the model's KV caches to 2, 3, 4, 5, 6 or 8 bits. Default: no.
        kv_group_size: values that share a scale: 32, 64 or 128. Default: 64.
        quantized_kv_start: positions from which on they are quantised. Default: 5000.
        options: how tokens are chosen, see :class:`mlx_mtp.sampling.ChoiceOptions`.
            Default: the most likely token.

    Yields:
        token id; the target's log-probabilities [V] for it, in the model's dtype, after
        logits processors and before filters; whether the head had drafted it.

    Raises:
        ValueError: the model has no head, the prompt is empty or holds an id outside
            the vocabulary, or an argument is out of range.
        TypeError: for an unknown option.
    """
    iterator = steps(
        prompt,
        model,
        mtp=True,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=prompt_progress_callback,
        prompt_cache=prompt_cache,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        **options,
    )
    return _triples(iterator)


def _triples(
    iterator: Generator[Step, None, None],
) -> Generator[tuple[int, mx.array, bool], None, None]:
    with contextlib.closing(iterator):
        for step in iterator:
            yield step.token, step.logprobs, step.from_draft
