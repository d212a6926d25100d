"""Prefill, then rounds; the host reads a round while the next one exists already.

A round's graph needs no value of the round before it on the host. So it is built while
that round runs, and handed to the device before the round is read (``depth`` 1) or the
moment it has been read (``depth`` 0). Logits processors need each round's tokens on the
host before the next can be built: then the loop waits.

The loop times the rounds and tells the controller, if there is one, what each has
brought; it knows nothing of what the controller makes of it.
"""

import contextlib
import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from .cache import MAX_BLOCK
from .controller import Controller, FixedLength
from .costs import Place
from .prefill import Progress, prefill
from .ranges import arange
from .round import Block, Engine
from .rows import Joining, Rows

# A round in flight keeps the KV buffers from being written in place, so a second one
# copies them. Above this size the copy costs more than the launch latency it hides.
PIPELINE_KV_BYTES = 8 << 20
CLEAR_CACHE_ROUNDS = 256
# A caller that holds a round for longer than this share of it hides the device's time.
MOST_HELD = 0.5


class ReadRound(NamedTuple):
    """A round on the host.

    Args:
        tokens: per row, the tokens it emits: accepted drafts, then one of the target's.
        num_draft_tokens: drafts per row in this round.
        logprobs: [B, T, V], lazy; row i belongs to the i-th token.
        outside: per row, whether the token that took the place of a draft was none that
            could be drafted.
        members: the name of each row; they change when rows leave and join.
    """

    tokens: list[list[int]]
    num_draft_tokens: int
    logprobs: mx.array
    members: tuple[int, ...]
    outside: tuple[bool, ...] = ()


def read(packed: mx.array) -> list[list[int]]:
    """The loop's one host read per round: kept count and tokens of every row."""
    return packed.tolist()


def pack(block: Block) -> mx.array:
    """Everything the host wants of a block as one array [B, 1 + T].

    The kept count is negative where a kept row of the target is not a number: then no
    token means anything, though the argmax would give one.
    """
    wrong = mx.isnan(block.logprobs[..., 0])  # one NaN makes the whole row NaN
    wrong = (wrong & (arange(block.width) < block.kept[:, None])).any(axis=1)
    kept = mx.where(wrong, -block.kept, block.kept)
    return mx.concatenate([kept[:, None], block.tokens], axis=1)


@dataclass
class Given:
    """The last round yielded, and what it takes to cut inside it.

    Args:
        snapshot: behind the round.
        start: tokens emitted before it, of a single row.
        taken: of its tokens, how many the caller has got.
    """

    result: ReadRound
    block: Block
    snapshot: list
    start: int
    taken: int = 0


class Prefilled(NamedTuple):
    """The caches when ``done`` tokens of the prompt are in them."""

    cache: list
    snapshot: list
    carry: mx.array | None
    done: int


class Clock:
    """Seconds from round to round, as far as the device's time shows in them."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._held = 0.0

    def tick(self) -> float | None:
        """A round has been read: seconds since the one before, None if not known."""
        now = time.perf_counter()
        start, held = self._start, self._held
        self._start, self._held = now, 0.0
        if start is None or held > MOST_HELD * (now - start):
            return None
        return now - start

    def forget(self) -> None:
        """The round in flight was not begun behind the one read last."""
        self._start = None

    @contextlib.contextmanager
    def held(self, idle: bool) -> Iterator[None]:
        """The caller has the round; with ``idle`` nothing runs meanwhile."""
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        if idle and self._start is not None:
            self._start += spent
        else:
            self._held = spent


class Loop:
    """Iterate over the rounds of a batch of prompts.

    Args:
        engine: whose caches hold the same number of positions in every row.
        prompts: token ids per row.
        num_draft_tokens: K of every round, 0 to 8, or who chooses it.
        max_tokens: no round is started that could only emit tokens past this many per
            row; -1 for no limit. The last round may pass it.
        prefill_step_size: prompt tokens per chunk.
        stream: where the work runs.
        depth: 0 or 1, see above; None picks by the size of the KV caches.
        progress: called during prefill with tokens done and tokens in all.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        num_draft_tokens: int | Controller,
        max_tokens: int,
        prefill_step_size: int,
        stream: mx.Stream | mx.ThreadLocalStream,
        depth: int | None = None,
        progress: Progress | None = None,
    ):
        self.engine, self.prompts = engine, prompts
        self.controller, self.max_tokens = num_draft_tokens, max_tokens
        if not isinstance(num_draft_tokens, Controller):
            self.controller = FixedLength(num_draft_tokens)
        self.prefill_step_size, self.progress = prefill_step_size, progress
        self.stream, self.depth = stream, depth
        self.rows = Rows(engine, list(map(len, prompts)))
        self._given: Given | None = None
        self._ids: list[int] = []  # emitted, of a single row
        self._prefilled: Prefilled | None = None

    def __iter__(self) -> Iterator[ReadRound]:
        with mx.stream(self.stream):
            block = prefill(
                self.engine,
                self.prompts,
                self.prefill_step_size,
                self.progress,
                self._checkpoint,
            )
            packed = self._enqueue(block)
        for prompt in self.prompts:
            self.engine.see(prompt)
        clock, whole = Clock(), True
        for count in itertools.count(1):
            waits = self.engine.processors is not None
            with mx.stream(self.stream):
                if self.rows.changing:
                    block = self.rows.join(self.rows.leave(block))
                    waits = self.engine.processors is not None
                    packed = self._enqueue(block)
                    clock.forget()
                # Exact where it matters, see ``KVQuantization.drafts_within``.
                self.engine.quantize(max(self.rows.known) + block.width)
                snapshot = self.engine.snapshot()
                before = max(self.rows.known)
                following = None if waits else self._build(block, before)
                next_whole = self.engine.vocabulary is None
                ahead = self._runs_ahead()
                next_packed = self._enqueue(following) if ahead else None
                values = read(packed)
                seconds = clock.tick()
                if not ahead:
                    next_packed = self._enqueue(following)
            if count == 1:
                self._report_prompt()
                seconds = None  # the prompt's time
            self._observe(values, block, whole, seconds)
            result = self._account(values, block, snapshot)
            with clock.held(waits):
                yield result
            if waits:  # the caller wants more, so processors may see more
                with mx.stream(self.stream):
                    block = self.rows.leave(block)
                    following = block and self._build(block, before, in_flight=0)
                    next_whole = self.engine.vocabulary is None
                    next_packed = self._enqueue(following)
            if following is None and not self.rows.joining:
                return
            block, packed, whole = following, next_packed, next_whole
            if count % CLEAR_CACHE_ROUNDS == 0:
                mx.clear_cache()

    def change_rows(
        self, leaving: Collection[int] = (), joining: Sequence[Joining] = ()
    ) -> None:
        """Before the next round is yielded, let rows leave and join.

        A round that is in flight goes on for the rows that stay.
        """
        self.rows.change(leaving, joining)

    def extract(self, member: int, count: int) -> Engine:
        """A row of the last round yielded, left at ``count`` tokens of that round.

        As :meth:`finish`, for one row of a batch that goes on.
        """
        given = self._given
        row = given.result.members.index(member)
        pending = count == len(given.result.tokens[row])
        with mx.stream(self.stream):
            return self.engine.extract(given.snapshot, given.block, row, count, pending)

    def prefill(self) -> None:
        """Run the prompts and nothing else; ``finish`` leaves them in the caches."""
        with mx.stream(self.stream):
            prefill(
                self.engine,
                self.prompts,
                self.prefill_step_size,
                self.progress,
                self._checkpoint,
            )

    def finish(self) -> list[int]:
        """Leave a single row's caches at what has been taken, nothing pending.

        For any end of the iteration, an exception included. After an interrupted
        prefill the caches hold the chunks that were done.

        Returns:
            The ids that this run has added to the caches.
        """
        given = self._given
        if self._prefilled is None:
            return []
        with mx.stream(self.stream):
            if given is None or (given.start == 0 and given.taken == 0):
                return self._finish_prefill()
            self.engine.restore(given.snapshot)
            ids = self._ids[: given.start + given.taken]
            size = self.engine.length + len(self.prompts[0]) + len(ids)
            if given.taken:
                pending = given.taken == len(given.result.tokens[0])
                self.engine.settle(given.block, given.taken, pending, size)
            else:
                self.engine.take_back(given.block, size)
        return [*self.prompts[0], *ids]

    def take(self) -> None:
        """The caller gets one more token of the last round."""
        self._given.taken += 1

    def _finish_prefill(self) -> list[int]:
        prompt, engine = list(self.prompts[0]), self.engine
        engine.cache, snapshot, carry, done = self._prefilled
        engine.restore(snapshot)
        last = mx.array([prompt[-1:]], mx.int32)
        if done == len(prompt) - 1:
            if done == 0:
                engine.prime_carry(last)
            engine.feed(last)
            done += 1
            engine.quantize(engine.length + done)
        else:
            engine.carry = carry
            if done and engine.drafter:  # this row has seen the token after the chunk
                cache = engine.drafter.cache
                cache.rewind(cache.offset - 1, cache.limit)
        engine.commit()
        return prompt[:done]

    def _checkpoint(self, done: int, carry: mx.array | None) -> None:
        snapshot = self.engine.snapshot()
        self._prefilled = Prefilled(self.engine.cache, snapshot, carry, done)

    def stop(self, counts: Sequence[int]) -> None:
        """Leave the caches at the first ``counts[b]`` tokens of the round last yielded.

        A round in flight is discarded. The last of those tokens is pending: it is not
        in the caches. No token is run again.
        """
        with mx.stream(self.stream):
            self.engine.restore(self._given.snapshot)
            if self._given.block.width > 1:
                for cache in self.engine.cache:
                    cache.keep(mx.array(counts, mx.int32))
            self.engine.commit()

    def _build(self, block: Block, before: int, in_flight: int = 1) -> Block | None:
        """The round behind ``block``, unless no row needs it.

        Args:
            before: positions in the longest row's caches without ``block``.
            in_flight: 1 if ``block`` has not been read: it emits one token at least.
        """
        enough = self.max_tokens - in_flight
        needed = enough - min(self.rows.emitted)
        if self.max_tokens >= 0 and needed <= 0:
            return None
        limit = before + block.width
        self.engine.bound(limit, block.width)
        most = self.engine.quantization.drafts_within(
            self.engine.cache, limit, MAX_BLOCK - 1
        )
        useful = most if self.max_tokens < 0 else min(most, needed - 1)
        rows = len(self.rows.members)
        place = Place(rows, before, self.engine.vocabulary is None)
        chosen = self.controller.choose(place, useful)
        return self.engine.round(block, min(chosen, most))

    def _observe(
        self,
        values: list[list[int]],
        block: Block,
        whole: bool,
        seconds: float | None,
    ) -> None:
        """Tell the controller what a round has brought; rows that just joined apart.

        ``whole`` says that the drafts came from the whole vocabulary.
        """
        pairs = zip(values, self.rows.emitted, strict=True)
        accepted = [row[0] - 1 for row, emitted in pairs if emitted]
        if accepted:
            place = Place(len(accepted), max(self.rows.known), whole)
            self.controller.observe(block.num_draft_tokens, accepted, place, seconds)

    def _runs_ahead(self) -> bool:
        if self.depth is not None:
            return self.depth == 1
        return self.engine.kv_nbytes <= PIPELINE_KV_BYTES

    def _report_prompt(self) -> None:
        if self.progress:
            longest = max(map(len, self.prompts))
            self.progress(longest, longest)

    def _enqueue(self, block: Block | None) -> mx.array | None:
        if block is None:
            return None
        packed = pack(block)
        mx.async_eval(packed, block.logprobs, *self.engine.due())
        return packed

    def _account(
        self, rows: list[list[int]], block: Block, snapshot: list
    ) -> ReadRound:
        if any(row[0] < 0 for row in rows):
            raise ValueError(
                "the model's output is not a number (NaN or infinite); its weights are "
                "damaged or too large for their dtype (convert with --dtype float32), "
                "or a logits processor has banned every token"
            )
        tokens = [row[1 : 1 + row[0]] for row in rows]
        vocab_size = block.logprobs.shape[-1]
        wrong = {t for row in tokens for t in row if not 0 <= t < vocab_size}
        if wrong:  # a sampler's: as an index it would read past the embedding
            raise ValueError(
                f"the sampler returned {min(wrong)}, which is no token id of the "
                f"model's {vocab_size}"
            )
        self.rows.count(tokens)
        members = self.rows.members
        result = ReadRound(
            tokens,
            block.num_draft_tokens,
            block.logprobs,
            members,
            self._outside(tokens, block.num_draft_tokens),
        )
        self.engine.see(itertools.chain.from_iterable(tokens))
        start = 0
        if self._given is not None and len(self.prompts) == 1:
            start = self._given.start + len(self._given.result.tokens[0])
        self._ids[start:] = tokens[0]
        # One assignment: an interrupt sees either the round before or this one.
        self._given = Given(result, block, snapshot, start)
        return result

    def _outside(self, tokens: list[list[int]], k: int) -> tuple[bool, ...]:
        part = self.engine.vocabulary
        if part is None:
            return (False,) * len(tokens)
        return tuple(len(row) <= k and row[-1] not in part for row in tokens)

    @property
    def last(self) -> ReadRound | None:
        """The last round yielded."""
        return None if self._given is None else self._given.result
