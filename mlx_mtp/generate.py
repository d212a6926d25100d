"""Prompt -> responses: tokenise, drive the engine, detokenise, stop, count.

Functions and keywords are mlx-lm's; the defaults here are the command line's as well.
"""

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .draft_memory import NumDraftTokens
from .generate_step import (
    KV_GROUP_SIZE,
    MAX_TOKENS,
    NUM_DRAFT_TOKENS,
    PREFILL_STEP_SIZE,
    QUANTIZED_KV_START,
    Progress,
    Step,
    steps,
    target_of,
)
from .response import GenerationResponse, print_stream
from .sampling import ChoiceOptions
from .stop import StopStrings, check_stop

Prompt = str | Sequence[int] | mx.array


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
    num_draft_tokens: NumDraftTokens = NUM_DRAFT_TOKENS,
    stop: str | Sequence[str] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
    prompt_cache: list[Any] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = KV_GROUP_SIZE,
    quantized_kv_start: int = QUANTIZED_KV_START,
    **options: Unpack[ChoiceOptions],
) -> Iterator[GenerationResponse]:
    """Generate text, one response per token, the end token included.

    Args:
        model: from :func:`mlx_mtp.load`.
        tokenizer: from :func:`mlx_mtp.load`, or any transformers tokenizer.
        prompt: text, or token ids as a list or 1-D array.
        max_tokens: tokens to generate; -1 for no limit. Default: 256.
        mtp: draft with the model's MTP head. Default: ``True``.
        num_draft_tokens: drafts per round, 0 to 8; ``"auto"`` chooses round by round.
            Default: ``"auto"``.
        stop: strings that end the text; neither they nor what follows is shown.
        prefill_step_size: prompt tokens per prefill chunk. Default: 2048.
        prompt_progress_callback: called with the prompt tokens done and in all.
        prompt_cache: from :func:`mlx_mtp.make_prompt_cache` or mlx-lm's function of
            that name. It holds the text before ``prompt``; in the end it holds prompt
            and output as well, the end token included.
        kv_bits: quantise the model's KV caches to 2, 3, 4, 5, 6 or 8 bits, as mlx-lm
            does. Default: no.
        kv_group_size: values that share a scale: 32, 64 or 128. Default: 64.
        quantized_kv_start: positions from which on they are quantised. Default: 5000.
        options: how tokens are chosen, with and without MTP, see
            :class:`mlx_mtp.sampling.ChoiceOptions`. Default: the most likely token.

    Yields:
        :class:`GenerationResponse`; the last has a ``finish_reason``, ``"stop"`` at an
        end token or stop string, else ``"length"``.

    Raises:
        ValueError: ``mtp`` on a model without head; an empty prompt; an id outside the
            vocabulary; an argument out of range.
        TypeError: for an unknown option.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens must not be 0 (use -1 for no limit)")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt)
    end_tokens = set(tokenizer.eos_token_ids)
    if options.get("xtc_probability"):  # as mlx-lm's command line
        newline = tokenizer.encode("\n", add_special_tokens=False)
        size = target_of(model).vocab_size  # a tokenizer may know more ids
        special = [token for token in (*newline, *end_tokens) if token < size]
        options.setdefault("xtc_special_tokens", special)
    matcher = StopStrings(check_stop(stop))
    iterator = steps(
        ids,
        model,
        mtp=mtp,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=prompt_progress_callback,
        end_tokens=end_tokens,
        special_tokens=tokenizer.get_added_vocab().values(),
        prompt_cache=prompt_cache,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        **options,
    )
    return _respond(iterator, model, tokenizer, matcher, len(ids), max_tokens)


def _respond(
    iterator: Generator[Step, None, None],
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    matcher: StopStrings,
    prompt_tokens: int,
    max_tokens: int,
) -> Generator[GenerationResponse, None, None]:
    """Detokenise, stop where the text ends, and time both phases."""
    detokenizer = tokenizer.detokenizer
    with wired_limit(model, [generation_stream]), contextlib.closing(iterator):
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
            text, stopped = matcher.feed(detokenizer.last_segment)
            if last and not stopped:
                text += matcher.flush()
            reason = "stop" if ended or stopped else "length" if last else None
            if reason:  # a caller may use its prompt cache from here on
                iterator.close()
            yield GenerationResponse(
                text=text,
                token=step.token,
                logprobs=step.logprobs,
                from_draft=step.from_draft,
                prompt_tokens=prompt_tokens,
                prompt_tps=prompt_tokens / prompt_seconds,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - start),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
                stats=step.stats,
            )
            if reason:
                return


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """Generate text and return it whole.

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
