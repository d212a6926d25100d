"""Prefill, then rounds; the host reads a round while the next one exists already.

A round's graph needs no value of the round before it on the host. So it is built while
that round runs, and handed to the device before the round is read (``depth`` 1) or the
moment it has been read (``depth`` 0). Logits processors need each round's tokens on the
host before the next can be built: then the loop waits.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from .prefill import Progress, prefill
from .processors import Processors
from .ranges import arange
from .round import Block, Engine
from .rules import PerRow, Rule, rule_of_row

# A round in flight keeps the KV buffers from being written in place, so a second one
# copies them. Above this size the copy costs more than the launch latency it hides.
PIPELINE_KV_BYTES = 8 << 20
CLEAR_CACHE_ROUNDS = 256


class ReadRound(NamedTuple):
    """A round on the host.

    Args:
        tokens: per row, the tokens it emits: accepted drafts, then one of the target's.
        num_draft_tokens: drafts per row in this round.
        logprobs: [B, T, V], lazy; row i belongs to the i-th token.
        members: the name of each row; they change when rows leave and join.
    """

    tokens: list[list[int]]
    num_draft_tokens: int
    logprobs: mx.array
    members: tuple[int, ...]


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


def choices_of(engine: Engine) -> list[tuple[Rule, Processors | None]]:
    """How the tokens of each row are chosen."""
    processors = engine.processors or [None] * engine.batch_size
    return [(rule_of_row(engine.rule, b), row) for b, row in enumerate(processors)]


class Joining(NamedTuple):
    """A row that has had its prefill and joins a running batch.

    Args:
        member: its name.
        engine: of this row alone; its caches are taken over.
        block: its first block.
        length: of its prompt.
    """

    member: int
    engine: Engine
    block: Block
    length: int


class Loop:
    """Iterate over the rounds of a batch of prompts.

    Args:
        engine: whose caches hold the same number of positions in every row.
        prompts: token ids per row.
        num_draft_tokens: K of every round, 0 to 8.
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
        num_draft_tokens: int,
        max_tokens: int,
        prefill_step_size: int,
        stream: mx.Stream | mx.ThreadLocalStream,
        depth: int | None = None,
        progress: Progress | None = None,
    ):
        self.engine, self.prompts = engine, prompts
        self.num_draft_tokens, self.max_tokens = num_draft_tokens, max_tokens
        self.prefill_step_size, self.progress = prefill_step_size, progress
        self.stream, self.depth = stream, depth
        # Per row: positions in the target's caches and tokens emitted, of rounds read.
        self.known = [engine.length + len(prompt) - 1 for prompt in prompts]
        self.emitted = [0] * len(prompts)
        self.members = tuple(range(len(prompts)))
        self._leaving: set[int] = set()
        self._joining: list[Joining] = []
        self._choices = choices_of(engine)
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
        for count in itertools.count(1):
            waits = self.engine.processors is not None
            with mx.stream(self.stream):
                if self._leaving or self._joining:
                    block = self._join(self._leave(block))
                    waits = self.engine.processors is not None
                    packed = self._enqueue(block)
                # Exact where it matters, see ``KVQuantization.drafts_within``.
                self.engine.quantize(max(self.known) + block.width)
                snapshot = self.engine.snapshot()
                following = None if waits else self._build(block, max(self.known))
                ahead = self._runs_ahead()
                next_packed = self._enqueue(following) if ahead else None
                rows = read(packed)
                if not ahead:
                    next_packed = self._enqueue(following)
            before = max(self.known)
            if count == 1:
                self._report_prompt()
            yield self._account(rows, block, snapshot)
            if waits:  # the caller wants more, so processors may see more
                with mx.stream(self.stream):
                    block = self._leave(block)
                    following = block and self._build(block, before, in_flight=0)
                    next_packed = self._enqueue(following)
            if following is None and not self._joining:
                return
            block, packed = following, next_packed
            if count % CLEAR_CACHE_ROUNDS == 0:
                mx.clear_cache()

    def change_rows(
        self, leaving: Collection[int] = (), joining: Sequence[Joining] = ()
    ) -> None:
        """Before the next round is yielded, let rows leave and join.

        A round that is in flight goes on for the rows that stay.
        """
        self._leaving |= set(leaving)
        self._joining += joining

    def _leave(self, block: Block | None) -> Block | None:
        """The block without the leaving rows; None if no row is left."""
        names, self._leaving, leaving = self.members, set(), self._leaving
        if block is None or not leaving & set(names):
            return block
        stay = [b for b, name in enumerate(names) if name not in leaving]
        self.members = tuple(names[b] for b in stay)
        self.known = [self.known[b] for b in stay]
        self.emitted = [self.emitted[b] for b in stay]
        if not stay:
            self._choices = []
            return None
        self._choices = [self._choices[b] for b in stay]
        self.engine.filter(stay)
        self._fit()
        return block.filter(mx.array(stay))

    def _join(self, block: Block | None) -> Block:
        """The block with the joining rows behind."""
        joining, self._joining = self._joining, []
        for row in joining:
            if self.members:
                self.engine.extend(row.engine)
                block = block.extend(row.block)
            else:
                self.engine.replace(row.engine)
                block = row.block
            self.members += (row.member,)
            self.known.append(row.length - 1)
            self.emitted.append(0)
            self._choices += choices_of(row.engine)
            self._fit()
        return block

    def _fit(self) -> None:
        """Give the engine the rules and processors of its present rows."""
        rules, processors = zip(*self._choices, strict=True)
        self.engine.rule = rules[0] if len(set(rules)) == 1 else PerRow(rules)
        nothing = Processors([], [0])
        some = any(row is not None for row in processors)
        self.engine.processors = (
            [row or nothing for row in processors] if some else None
        )

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
        if self.max_tokens >= 0 and min(self.emitted) >= enough:
            return None
        limit = before + block.width
        self.engine.bound(limit, block.width)
        num_drafts = self.engine.quantization.drafts_within(
            self.engine.cache, limit, self.num_draft_tokens
        )
        return self.engine.round(block, num_drafts)

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
        mx.async_eval(packed, block.logprobs)
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
        for b, row in enumerate(tokens):
            self.known[b] += len(row)
            self.emitted[b] += len(row)
        result = ReadRound(tokens, block.num_draft_tokens, block.logprobs, self.members)
        start = 0
        if self._given is not None and len(self.prompts) == 1:
            start = self._given.start + len(self._given.result.tokens[0])
        self._ids[start:] = tokens[0]
        # One assignment: an interrupt sees either the round before or this one.
        self._given = Given(result, block, snapshot, start)
        return result

    @property
    def last(self) -> ReadRound | None:
        """The last round yielded."""
        return None if self._given is None else self._given.result
