"""Several prompts at once: rows draft, are judged and end each on its own.

A row that ends leaves the batch and a waiting prompt takes its place; the others go on
undisturbed. Each row gives what it would give alone.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchResponse as BaseResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.generate_utils import BatchStats
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from .draft_memory import AUTO, NumDraftTokens, memory_of
from .generate_step import (
    NUM_DRAFT_TOKENS,
    PREFILL_STEP_SIZE,
    check_num_draft_tokens,
    needs_repeating,
    prompt_ids,
    target_of,
)
from .prompt_cache import PromptCache, adopt
from .sampling import choice
from .speculative.controller import Controller
from .speculative.loop import Loop, ReadRound
from .speculative.prefill import prefill
from .speculative.processors import Processors
from .speculative.round import Engine
from .speculative.rows import Joining
from .speculative.rules import Called
from .speculative.stats import SpeculationStats
from .speculative.vocabulary import draft_vocabulary
from .stop import StopStrings, check_stop

BATCH_MAX_TOKENS = 128
COMPLETION_BATCH_SIZE = 32
# Options whose single value is a list itself: a list of lists gives every row its own.
LIST_OPTIONS = ("logits_processors", "xtc_special_tokens", "stop")


@dataclass
class BatchResponse(BaseResponse):
    """mlx-lm's response and, for all rows together, the speculation counters."""

    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass
class _Row:
    """One prompt on its way."""

    index: int
    ids: list[int]
    limit: int
    options: dict[str, Any]
    matcher: StopStrings
    detokenizer: Any
    cache: PromptCache | None = None
    shown: str = ""
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[Sequence[int]],
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = BATCH_MAX_TOKENS,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    mtp: bool = True,
    num_draft_tokens: NumDraftTokens = NUM_DRAFT_TOKENS,
    completion_batch_size: int = COMPLETION_BATCH_SIZE,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    **options: Any,
) -> BatchResponse:
    """Generate responses for a batch of prompts.

    Args:
        model: from :func:`mlx_mtp.load`.
        tokenizer: from :func:`mlx_mtp.load`.
        prompts: token ids of each prompt.
        prompt_caches: one for each prompt, from :func:`mlx_mtp.make_prompt_cache`; they
            are not changed.
        max_tokens: for all prompts or for each. Default: 128.
        verbose: show progress and speed. Default: ``False``.
        return_prompt_caches: return each row's cache, prompt and output in it.
        return_token_ids: return the token ids, without the end token.
        return_logprobs: return each token's log-probability.
        mtp: draft with the model's MTP head. Default: ``True``.
        num_draft_tokens: drafts per round and row, 0 to 8; ``"auto"`` chooses round by
            round, for all rows together. Default: ``"auto"``.
        completion_batch_size: rows at most at a time. Default: 32.
        prefill_step_size: prompt tokens per prefill chunk. Default: 2048.
        options: those of :func:`mlx_mtp.stream_generate` that choose tokens, and
            ``stop``; a list gives each prompt its own (for ``stop`` and
            ``logits_processors`` a list of lists).

    Raises:
        ValueError: as ``stream_generate``, or lists that do not fit the prompts.
    """
    check_num_draft_tokens(num_draft_tokens)
    if completion_batch_size < 1:
        raise ValueError(
            f"completion_batch_size must be 1 or more, not {completion_batch_size}"
        )
    if mtp and getattr(model, "mtp", None) is None:
        raise ValueError("the model has no MTP head; give mtp=False")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    target = target_of(model)
    per_row = [{} for _ in prompts]
    for name, value in {"max_tokens": max_tokens, **options}.items():
        for row, item in zip(per_row, _spread(name, value, len(prompts)), strict=True):
            row[name] = item
    if prompt_caches is not None and len(prompt_caches) != len(prompts):
        raise ValueError(
            f"{len(prompt_caches)} prompt_caches for {len(prompts)} prompts"
        )
    rows, repeatable = [], False
    for index, (prompt, row_options) in enumerate(zip(prompts, per_row, strict=True)):
        limit = row_options.pop("max_tokens")
        if limit == 0 or limit < -1:
            raise ValueError(f"max_tokens must be 1 or more, or -1, not {limit}")
        stop = check_stop(row_options.pop("stop", None))
        rows.append(
            _Row(
                index,
                prompt_ids(prompt, target.vocab_size),
                limit,
                row_options,
                StopStrings(stop),
                tokenizer.detokenizer,
                adopt(prompt_caches[index]) if prompt_caches else None,
            )
        )
        rule, _ = choice(target.vocab_size, **row_options)  # complain before it runs
        repeatable = repeatable or needs_repeating(rule, row_options)
    head = model.mtp if mtp and num_draft_tokens != 0 else None
    memory = memory_of(model) if head and num_draft_tokens == AUTO else None
    if memory is not None:
        num_draft_tokens = memory.begin(repeatable=repeatable)
    batch = _Batch(
        target,
        head,
        tokenizer,
        num_draft_tokens if head is not None else 0,
        prefill_step_size,
        return_prompt_caches,
        return_logprobs,
    )
    with wired_limit(model, [generation_stream]):
        stats = batch.run(rows, completion_batch_size, verbose)
    if memory is not None:
        memory.end(num_draft_tokens)
    if verbose:
        print(
            f"[batch_generate] Prompt: {stats.prompt_tokens} tokens, "
            f"{stats.prompt_tps:.3f} tokens-per-sec\n"
            f"[batch_generate] Generation: {stats.generation_tokens} tokens, "
            f"{stats.generation_tps:.3f} tokens-per-sec\n"
            f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB"
        )
    return BatchResponse(
        [r.shown if r.stopped else tokenizer.decode(r.tokens) for r in rows],
        stats,
        [r.cache for r in rows] if return_prompt_caches else None,
        [r.tokens for r in rows] if return_token_ids else None,
        [r.logprobs for r in rows] if return_logprobs else None,
        batch.speculation,
    )


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """An option's value for each prompt."""
    many = isinstance(value, list | tuple)
    if many and name in LIST_OPTIONS:
        many = any(item is None or isinstance(item, list | tuple) for item in value)
    if not many:
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} prompts")
    return list(value)


class _Batch:
    """Rows through a running loop."""

    def __init__(
        self,
        target: Any,
        head: nn.Module | None,
        tokenizer: TokenizerWrapper,
        num_draft_tokens: int | Controller,
        prefill_step_size: int,
        keep_caches: bool,
        keep_logprobs: bool,
    ):
        self.target, self.head, self.tokenizer = target, head, tokenizer
        self.num_draft_tokens = num_draft_tokens
        self.prefill_step_size = prefill_step_size
        self.keep_caches, self.keep_logprobs = keep_caches, keep_logprobs
        self.speculation = SpeculationStats()
        self.prefill_seconds = 0.0

    def run(self, rows: Sequence[_Row], size: int, verbose: bool) -> BatchStats:
        """Run all rows, at most ``size`` at a time; fills them in place."""
        started, rounds = time.perf_counter(), 0
        waiting = deque(rows)
        bar = tqdm(total=len(rows), desc="Prompts", disable=None if verbose else True)
        with bar:
            if waiting:
                for ended in self._rounds(waiting, size):
                    rounds += 1
                    bar.update(ended)
        wall = time.perf_counter() - started
        tokens = sum(len(row.tokens) for row in rows)
        return BatchStats(
            prompt_tokens=sum(len(row.ids) for row in rows),
            prompt_time=self.prefill_seconds,
            generation_tokens=tokens,
            generation_steps=rounds,
            decode_time=wall - self.prefill_seconds,
            wall_time=wall,
            peak_memory=mx.get_peak_memory() / 1e9,
        )

    def _rounds(self, waiting: deque[_Row], size: int) -> Iterator[int]:
        """Yield, per round, how many rows it has ended."""
        first = waiting.popleft()
        start = time.perf_counter()
        loop = Loop(
            self._engine(first),
            [first.ids],
            num_draft_tokens=self.num_draft_tokens,
            max_tokens=-1,
            prefill_step_size=self.prefill_step_size,
            stream=generation_stream,
        )
        loop.rows.members = (first.index,)
        running = {first.index: first}
        self._fill(loop, running, waiting, size)
        for number, result in enumerate(loop):
            if number == 0:  # the first round holds the first prompts' prefill
                self.prefill_seconds = time.perf_counter() - start
            ended = [r for r in running.values() if self._take(loop, r, result)]
            for row in ended:
                del running[row.index]
            loop.change_rows([row.index for row in ended])
            self._fill(loop, running, waiting, size)
            yield len(ended)
            if not running:
                return

    def _engine(self, row: _Row) -> Engine:
        rule, processors = choice(self.target.vocab_size, **row.options)
        ends = set(self.tokenizer.eos_token_ids)
        wrapped = None
        if processors or isinstance(rule, Called):
            wrapped = [Processors(processors, row.ids, ends, row.limit)]
        history = None if row.cache is None else row.cache.copied().history
        part = draft_vocabulary(self.head, self.target, ends)
        return Engine(
            *(self.target, self.head, 1, rule, wrapped, history), vocabulary=part
        )

    def _fill(
        self, loop: Loop, running: dict[int, _Row], waiting: deque[_Row], size: int
    ) -> None:
        """Give free places to waiting prompts."""
        while waiting and len(running) < size:
            row, start = waiting.popleft(), time.perf_counter()
            engine = self._engine(row)
            with mx.stream(generation_stream):
                block = prefill(engine, [row.ids], self.prefill_step_size)
                mx.eval(block)
            length = engine.length + len(row.ids)
            joining = Joining(row.index, engine, block, length, row.ids)
            loop.change_rows(joining=[joining])
            running[row.index] = row
            self.prefill_seconds += time.perf_counter() - start

    def _take(self, loop: Loop, row: _Row, result: ReadRound) -> bool:
        """Give a row its tokens of a round; True if it ends with them."""
        if row.index not in result.members:
            return False  # it joins with the next round
        b = result.members.index(row.index)
        tokens = result.tokens[b]
        self.speculation = self.speculation.after(
            result.num_draft_tokens if len(row.tokens) else 0,
            len(tokens) - 1,
            result.outside[b],
        )
        for i, token in enumerate(tokens):
            ended = token in self.tokenizer.eos_token_ids
            if not ended:
                row.tokens.append(token)
                if self.keep_logprobs:
                    row.logprobs.append(result.logprobs[b, i, token].item())
            if self._shows_stop(row, token, ended) or ended:
                self._keep(loop, row, i + 1, ended)
                return True
            if len(row.tokens) == row.limit:
                self._keep(loop, row, i + 1, ended)
                return True
        return False

    def _shows_stop(self, row: _Row, token: int, ended: bool) -> bool:
        if not row.matcher.strings:
            return False
        if ended:
            row.detokenizer.finalize()
        else:
            row.detokenizer.add_token(token)
        shown, row.stopped = row.matcher.feed(row.detokenizer.last_segment)
        row.shown += shown
        return row.stopped

    def _keep(self, loop: Loop, row: _Row, count: int, ended: bool) -> None:
        if not self.keep_caches:
            return
        engine = loop.extract(row.index, count)
        end = [loop_token(loop, row.index, count)] if ended else []
        before = row.cache.tokens if row.cache else []
        cache = PromptCache(engine.cache)
        cache.tokens = [*before, *row.ids, *row.tokens, *end]
        if engine.drafter:
            cache.head, cache.carry = engine.drafter.cache, engine.carry
        row.cache = cache


def loop_token(loop: Loop, member: int, count: int) -> int:
    """The ``count``-th token a row has got in the last round."""
    return loop.last.tokens[loop.last.members.index(member)][count - 1]
