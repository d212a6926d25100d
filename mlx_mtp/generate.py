"""Prompt -> responses: tokenise, drive the engine, detokenise, stop, count.

Functions and keywords are mlx-lm's; the defaults here are the command line's as well.
"""

import numbers
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .models import family_of
from .response import GenerationResponse, print_stream
from .speculative.cache import MAX_BLOCK
from .speculative.loop import Loop
from .speculative.round import Engine
from .speculative.stats import SpeculationStats

MAX_TOKENS = 256
NUM_DRAFT_TOKENS = 2
MAX_DRAFT_TOKENS = MAX_BLOCK - 1
PREFILL_STEP_SIZE = 2048

Prompt = str | Sequence[int] | mx.array
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Step:
    """One emitted token, as the engine's caller sees it."""

    token: int
    logprobs: mx.array
    from_draft: bool
    stats: SpeculationStats


def check_num_draft_tokens(value: int) -> int:
    if not isinstance(value, numbers.Integral) or not 0 <= value <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"num_draft_tokens must be 0 to {MAX_DRAFT_TOKENS}, not {value!r}"
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


def steps(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    *,
    mtp: bool,
    num_draft_tokens: int,
    max_tokens: int,
    prefill_step_size: int,
    prompt_progress_callback: Progress | None = None,
) -> Iterator[Step]:
    """Check everything at once, then return the iterator over the emitted tokens."""
    check_num_draft_tokens(num_draft_tokens)
    if max_tokens < -1:
        raise ValueError(f"max_tokens must be -1 (no limit) or more, not {max_tokens}")
    if prefill_step_size < 1:
        raise ValueError(
            f"prefill_step_size must be 1 or more, not {prefill_step_size}"
        )
    if mtp and getattr(model, "mtp", None) is None:
        raise ValueError(
            "the model has no MTP head; convert a checkpoint that ships one with "
            "convert.py, or generate without MTP"
        )
    family = family_of({"model_type": getattr(model, "model_type", None)})
    target = family.Target(model)
    ids = prompt_ids(prompt, target.vocab_size)
    drafting = mtp and num_draft_tokens > 0
    loop = Loop(
        Engine(target, model.mtp if drafting else None),
        [ids],
        num_draft_tokens=num_draft_tokens if drafting else 0,
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        stream=generation_stream,
        progress=prompt_progress_callback,
    )
    return _emit(loop, max_tokens)


def _emit(loop: Loop, max_tokens: int) -> Generator[Step, None, None]:
    """The rounds of a single row, token by token, cut at ``max_tokens``."""
    zeros = (0,) * loop.num_draft_tokens
    stats, count = SpeculationStats(num_accepted_tokens_per_pos=zeros), 0
    if max_tokens == 0:
        return
    for result in loop:
        (tokens,) = result.tokens
        stats = stats.after(result.num_draft_tokens, len(tokens) - 1)
        with mx.stream(loop.stream):
            logprobs = [result.logprobs[0, i] for i in range(len(tokens))]
        # Only then can another thread read them.
        mx.async_eval(logprobs)
        for i, token in enumerate(tokens):
            yield Step(token, logprobs[i], i < len(tokens) - 1, stats)
            count += 1
            if count == max_tokens:
                return


def mtp_generate_step(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    *,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    max_tokens: int = MAX_TOKENS,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Generate token ids with the model's MTP head, greedily.

    The tokens are those of plain decoding. It does not stop at an end token.

    Args:
        prompt: token ids, a list or a 1-D array.
        model: from :func:`mlx_mtp.load`, with a head.
        num_draft_tokens: drafts per round, 0 to 8; 0 decodes plainly. Default: 2.
        max_tokens: tokens to yield; -1 for no limit. Default: 256.
        prefill_step_size: prompt tokens per prefill chunk. Default: 2048.
        prompt_progress_callback: called with the prompt tokens done and in all.

    Yields:
        token id; the target's log-probabilities [V] for it, in the model's dtype;
        whether the head had drafted it.

    Raises:
        ValueError: the model has no head, the prompt is empty or holds an id outside
            the vocabulary, or an argument is out of range.
    """
    iterator = steps(
        prompt,
        model,
        mtp=True,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=prompt_progress_callback,
    )
    return ((step.token, step.logprobs, step.from_draft) for step in iterator)


def encode(tokenizer: TokenizerWrapper, prompt: Prompt) -> Sequence[int] | mx.array:
    """Text -> ids, with the start token unless the text brings it; ids pass through."""
    if not isinstance(prompt, str):
        return prompt
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=special)


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    *,
    max_tokens: int = MAX_TOKENS,
    mtp: bool = True,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
) -> Iterator[GenerationResponse]:
    """Generate text greedily, one response per token, the end token included.

    Args:
        model: from :func:`mlx_mtp.load`.
        tokenizer: from :func:`mlx_mtp.load`, or any transformers tokenizer.
        prompt: text, or token ids as a list or 1-D array.
        max_tokens: tokens to generate; -1 for no limit. Default: 256.
        mtp: draft with the model's MTP head. Default: ``True``.
        num_draft_tokens: drafts per round, 0 to 8. Default: 2.
        prefill_step_size: prompt tokens per prefill chunk. Default: 2048.
        prompt_progress_callback: called with the prompt tokens done and in all.

    Yields:
        :class:`GenerationResponse`; the last has a ``finish_reason``, ``"stop"`` at an
        end token, else ``"length"``.

    Raises:
        ValueError: ``mtp`` on a model without head; an empty prompt; an id outside the
            vocabulary; an argument out of range.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens must not be 0 (use -1 for no limit)")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt)
    iterator = steps(
        ids,
        model,
        mtp=mtp,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=prompt_progress_callback,
    )
    return _respond(iterator, model, tokenizer, len(ids), max_tokens)


def _respond(
    iterator: Iterator[Step],
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
) -> Generator[GenerationResponse, None, None]:
    """Detokenise, stop at an end token or the limit, and time both phases."""
    detokenizer = tokenizer.detokenizer
    with wired_limit(model, [generation_stream]):
        start = time.perf_counter()
        for count, step in enumerate(iterator, 1):
            if count == 1:
                prompt_seconds = time.perf_counter() - start
                start = time.perf_counter()
            ended = step.token in tokenizer.eos_token_ids
            if not ended:
                detokenizer.add_token(step.token)
            last = ended or count == max_tokens
            if last:
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                token=step.token,
                logprobs=step.logprobs,
                from_draft=step.from_draft,
                prompt_tokens=prompt_tokens,
                prompt_tps=prompt_tokens / prompt_seconds,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - start),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=("stop" if ended else "length") if last else None,
                stats=step.stats,
            )
            if last:
                return


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    verbose: bool = False,
    **kwargs: object,
) -> str:
    """Generate text greedily and return it whole.

    Args:
        verbose: print the text as it comes, then speed and acceptance.
        kwargs: of :func:`stream_generate`.
    """
    responses = stream_generate(model, tokenizer, prompt, **kwargs)
    if verbose:
        return print_stream(responses, mtp=bool(kwargs.get("mtp", True)))
    return "".join(response.text for response in responses)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see ``generate_cli``."""
    from .generate_cli import main as command_line

    command_line(argv)


if __name__ == "__main__":
    main()
