"""One round as one lazy graph: draft, verify, accept, rollback. It reads nothing."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from .accept import Accepted, log_probs, pick
from .draft import Drafts, no_drafts
from .module_drafter import drafter_of
from .processors import Processors, judge_rows
from .quantized_cache import NEVER, KVQuantization
from .rules import Greedy, Rule
from .vocabulary import DraftVocabulary


class Block(NamedTuple):
    """A verified block, all of it lazy: what the next round starts from.

    Shapes:
        tokens: [B, T] int32, the token that follows each position
        kept: [B] int32, how many positions stand; ``tokens[b, kept[b] - 1]`` is
            pending: emitted, and not yet in any cache
        logprobs: [B, T, V], the target's, in its dtype
        hidden: [B, T, H], the target's, at the stage the head reads
        position: [B] int32, of the pending token
    """

    tokens: mx.array
    kept: mx.array
    logprobs: mx.array
    hidden: mx.array
    position: mx.array

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_draft_tokens(self) -> int:
        return self.width - 1

    def row(self, index: int) -> "Block":
        return Block(*(array[index : index + 1] for array in self))

    def filter(self, rows: mx.array) -> "Block":
        return Block(*(array[rows] for array in self))

    def extend(self, other: "Block") -> "Block":
        """With another block's rows behind; the narrower one is padded."""
        width = max(self.width, other.width)
        pairs = zip(self.padded(width), other.padded(width), strict=True)
        return Block(*(mx.concatenate(pair) for pair in pairs))

    def padded(self, width: int) -> "Block":
        def pad(x: mx.array) -> mx.array:
            more = [(0, 0), (0, width - self.width), *[(0, 0)] * (x.ndim - 2)]
            return mx.pad(x, more)

        return self._replace(
            tokens=pad(self.tokens),
            logprobs=pad(self.logprobs),
            hidden=pad(self.hidden),
        )


class History(NamedTuple):
    """What is in the caches when a run begins or has ended, the same for all rows.

    Args:
        target: the target's caches.
        head: the head's cache; None for an empty one.
        carry: [B, 1, H], the hidden state of the last position, which the head has yet
            to see together with the next token; None if there is none.
        length: positions in the target's caches.
    """

    target: list[Any]
    head: Any = None
    carry: mx.array | None = None
    length: int = 0


class Engine:
    """A target, a drafter or none, and their caches for B rows.

    Args:
        target: ``embed``, ``hidden``, ``logits``, ``make_cache`` and ``vocab_size``
            (see ``models.target.Target``).
        head: an MTP head, or None to decode plainly.
        batch_size: rows.
        rule: how drafts are chosen and judged.
        processors: the logits processors of every row, or None; with them a round
            reads on the host.
        history: the caches of an earlier run to go on with; default: empty ones.
        quantization: of the target's KV caches; for a single row.
        vocabulary: the part that drafts come from; None for all of it.
    """

    def __init__(
        self,
        target: Any,
        head: Any | None = None,
        batch_size: int = 1,
        rule: Rule | None = None,
        processors: Sequence[Processors] | None = None,
        history: "History | None" = None,
        quantization: KVQuantization = NEVER,
        vocabulary: DraftVocabulary | None = None,
    ):
        self.target, self.rule = target, rule or Greedy()
        self.batch_size, self.processors = batch_size, processors
        self.quantization = quantization
        history = history or History(target.make_cache(batch_size))
        self.cache, self.carry, self.length = (
            history.target,
            history.carry,
            history.length,
        )
        self.drafter = None
        if head is not None:
            self.drafter = drafter_of(head, target, batch_size, history.head)
            self.drafter.vocabulary = vocabulary

    @property
    def caches(self) -> list[Any]:
        """The target's caches, then the head's."""
        return self.cache + ([self.drafter.cache] if self.drafter else [])

    @property
    def _parts(self) -> list[Any]:
        """What rows are taken from and added to, and what is kept and put back."""
        return self.cache + ([self.drafter] if self.drafter else [])

    def first(self, tokens: mx.array, position: mx.array) -> Block:
        """Run the prompts' last tokens [B, 1]: the block before the first round.

        ``position`` [B] is theirs.
        """
        return self.verify(tokens, no_drafts(tokens.shape[0]), position)

    def round(self, last: Block, num_draft_tokens: int) -> Block:
        """The round behind ``last``: K drafts, one target pass over K + 1 rows."""
        drafts = self.draft(last, num_draft_tokens)
        pending = pick(last.tokens, last.kept - 1)
        block = self.verify(pending, drafts, last.position)
        self.rollback(block)
        return block

    def draft(self, last: Block, num_draft_tokens: int) -> Drafts:
        """K drafts behind the pending token."""
        if self.drafter is None:
            return no_drafts(last.tokens.shape[0])
        choose = partial(self.choose, last.position)
        for row in self.processors or ():
            row.before_drafts()
        self.drafter.reads = self.cache
        drafts = self.drafter.draft(
            last.tokens,
            last.hidden,
            last.kept,
            num_draft_tokens,
            choose,
            greedy=self.processors is None and self.rule.greedy_drafts,
        )
        for row in self.processors or ():
            row.after_drafts()
        return drafts

    def choose(
        self, start: mx.array, logits: mx.array, index: int
    ) -> tuple[mx.array, mx.array | None]:
        """Draft ``index`` of the round whose pending token has position ``start``."""
        if self.processors is None:
            return self.rule.draft(logits, start, index)
        rows = enumerate(self.processors)
        logits = mx.concatenate([p.shape_draft(logits[b : b + 1]) for b, p in rows])
        token, probs = self.rule.draft(logits, start, index)
        for b, row in enumerate(self.processors):
            row.drafted(token[b : b + 1])
        return token, probs

    def verify(self, pending: mx.array, drafts: Drafts, position: mx.array) -> Block:
        """One pass of the target over pending [B, 1] and drafts [B, K], then accept."""
        tokens = mx.concatenate([pending, drafts.tokens], axis=1)
        hidden = self.target.hidden(tokens, self.cache)
        logits = self.target.logits(hidden)
        accepted, logprobs = self.judge(drafts, logits, position)
        return Block(*accepted, logprobs, hidden, position + accepted.kept)

    def judge(
        self, drafts: Drafts, logits: mx.array, position: mx.array
    ) -> tuple[Accepted, mx.array]:
        """Accept by the target's logits [B, K + 1, V]; with their log-probabilities."""
        if self.processors is not None:
            return judge_rows(self.processors, self.rule, drafts, logits, position)
        logprobs = log_probs(logits)
        return self.rule.accept(*drafts, logprobs, position), logprobs

    def rollback(self, block: Block) -> None:
        """Rewind the target's caches to the kept positions of the block just run."""
        if block.width > 1:  # of a single position nothing can be rejected
            for cache in self.cache:
                cache.keep(block.kept)

    def extract(
        self, snapshot: list[Any], block: Block, row: int, count: int, pending: bool
    ) -> "Engine":
        """A row of its own, left at the first ``count`` tokens of a block.

        ``snapshot`` was taken behind the block's round. A stop in mid-block runs
        nothing again; else the last token is pending and is fed.

        Args:
            count: tokens of the block that stand, 1 or more.
            pending: whether the last of them is not a draft that has been verified.
        """
        kept = None
        if block.width > 1:
            kept = mx.array([count if pending else count + 1], mx.int32)
        pairs = zip(self.cache, snapshot, strict=False)
        new = Engine(
            self.target,
            history=History([cache.extract(s, row, kept) for cache, s in pairs]),
        )
        if self.drafter:
            new.drafter = self.drafter.extract(snapshot[-1], row)
        new._settle(block.row(row), count, pending, 0)
        return new

    def settle(self, block: Block, count: int, pending: bool, size: int) -> None:
        """Leave a single row's caches as ``extract`` does; they stand behind it.

        ``size`` is the number of positions that will be in them.
        """
        if block.width > 1:
            kept = mx.array([count if pending else count + 1], mx.int32)
            for cache in self.cache:
                cache.keep(kept)
        self._settle(block, count, pending, size)

    def _settle(self, block: Block, count: int, pending: bool, size: int) -> None:
        """The head's rows, the pending token and the carry behind a rewind."""
        if self.drafter:
            self.drafter.prime(block.tokens[:, :count], block.hidden[:, :count], None)
        if pending:
            self.feed(block.tokens[:, count - 1 : count])
        else:
            self.carry = block.hidden[:, count : count + 1]
        self.quantize(size)
        self.commit()
        mx.eval([cache.state for cache in self.caches], self.carry)

    def take_back(self, block: Block, size: int) -> None:
        """Leave a single row's caches at the last block's first position.

        That one had been pending; the head has seen it already.
        """
        if block.width > 1:
            for cache in self.cache:
                cache.keep(mx.array([1], mx.int32))
        self.carry = block.hidden[:, :1]
        self.quantize(size)
        self.commit()
        mx.eval([cache.state for cache in self.caches], self.carry)

    def prime_carry(self, tokens: mx.array) -> None:
        """Show the head the last position of the history and its successor [B, 1]."""
        if self.drafter and self.carry is not None:
            self.drafter.prime(tokens, self.carry, None)

    def feed(self, tokens: mx.array) -> None:
        """Run tokens [B, T] whose successors are not known yet."""
        self.carry = self.target.hidden(tokens, self.cache)[:, -1:]

    def quantize(self, size: int) -> None:
        """Behind a forward; earlier snapshots belong to the caches of before."""
        self.cache = self.quantization.apply(self.cache, size)

    def filter(self, rows: list[int]) -> None:
        """Keep these rows of the caches; the rule must follow."""
        for part in self._parts:
            part.filter(mx.array(rows))
        self.batch_size = len(rows)

    def extend(self, other: "Engine") -> None:
        """Append another engine's rows; the rule must follow."""
        for ours, theirs in zip(self._parts, other._parts, strict=True):
            ours.extend(theirs)
        self.batch_size += other.batch_size

    def replace(self, other: "Engine") -> None:
        """Take over another engine's rows in place of the own ones."""
        self.cache, self.batch_size = other.cache, other.batch_size
        self.drafter = other.drafter

    def bound(self, limit: int, last_width: int) -> None:
        """Tell the KV caches the host's upper bound of their positions.

        Args:
            limit: of the target's caches, blocks in flight counted whole.
            last_width: positions of the last block, which the head has yet to see.
        """
        for cache in self.cache:
            if hasattr(cache, "limit"):
                cache.limit = limit
        if self.drafter:
            unseen = last_width + len(self.drafter.waiting)
            cache = self.drafter.cache
            if cache.limit != limit - unseen:
                cache.rewind(cache.offset, limit - unseen)

    def snapshot(self) -> list[Any]:
        """The state behind the last round, by reference."""
        return [part.snapshot() for part in self._parts]

    def restore(self, snapshot: list[Any]) -> None:
        for part, state in zip(self._parts, snapshot, strict=True):
            part.restore(state)

    def commit(self) -> None:
        for part in self._parts:
            part.commit()

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The part of the vocabulary that drafts come from, where it is in use."""
        part = self.drafter.vocabulary if self.drafter else None
        return part if part and part.active else None

    def see(self, tokens: Iterable[int]) -> None:
        """Tokens of the text, as they become known on the host."""
        if self.drafter and self.drafter.vocabulary:
            self.drafter.vocabulary.see(tokens)

    def due(self) -> list[mx.array]:
        """Arrays that no later round evaluates by itself: else a graph would grow."""
        if self.drafter is None or not self.drafter.due:
            return []
        self.drafter.due = False
        return self.drafter.cache.state

    @property
    def kv_nbytes(self) -> int:
        """Bytes that a round in flight keeps from being written in place."""
        return sum(c.nbytes for c in self.caches if hasattr(c, "limit"))
