"""Logits processors under MTP: called in order, on the histories of plain decoding.

A processor is mlx-lm's: ``(tokens [n], logits [1, V]) -> logits [1, V]``, the tokens
being prompt and output so far. It needs them on the host, so here, and only here, a
round is judged row by row with a read for each, and the loop waits for it. A processor
never sees a rejected draft, so one that keeps a state of its own (a grammar matcher, a
thinking budget) works as it is.

A processor with ``snapshot() -> state`` and ``restore(state)`` also shapes the drafts,
so that they keep to the grammar and more of them are accepted; its state is put back
before the drafts are judged. A processor without state can be given both by
``Stateless``.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx

from .accept import Accepted, log_probs
from .draft import Drafts
from .rules import Rule, rule_of_row

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Stateless:
    """A processor that depends on its arguments alone; it may shape drafts as well."""

    def __init__(self, processor: LogitsProcessor):
        self.processor = processor

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return self.processor(tokens, logits)

    def snapshot(self) -> None:
        return None

    def restore(self, state: None) -> None:
        pass


class Processors:
    """One row's processors and its history.

    Args:
        processors: called in this order.
        prompt: the row's token ids.
        end_tokens: no processor is called behind one of them within a round.
        limit: nor behind this many tokens of output; -1 for no limit.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        prompt: Sequence[int],
        end_tokens: Collection[int] = (),
        limit: int = -1,
    ):
        self.processors, self.end_tokens = list(processors), end_tokens
        self.left = limit
        self.history = mx.array(list(prompt))
        self.shaping = [
            p
            for p in self.processors
            if hasattr(p, "snapshot") and hasattr(p, "restore")
        ]
        self._saved: list[Any] = []
        self._draft_history = self.history
        self._draft_ended = False

    def before_drafts(self) -> None:
        self._saved = [p.snapshot() for p in self.shaping]
        self._draft_history = self.history
        self._draft_ended = self.left == 1

    def after_drafts(self) -> None:
        for processor, state in zip(self.shaping, self._saved, strict=True):
            processor.restore(state)

    def shape_draft(self, logits: mx.array) -> mx.array:
        """The head's logits [1, 1, V] as the target's will be."""
        if not self.shaping or self._draft_ended:
            return logits
        return apply(self.shaping, self._draft_history, logits[:, 0])[:, None]

    def drafted(self, token: mx.array) -> None:
        """Tell the next draft step what this one [1, 1] has chosen."""
        if self.shaping:
            value = token.item()
            self._draft_history = _append(self._draft_history, value)
            drafted = self._draft_history.size - self.history.size
            self._draft_ended |= value in self.end_tokens or drafted + 1 == self.left

    def judge(
        self, rule: Rule, drafts: Drafts, logits: mx.array, start: mx.array
    ) -> tuple[list[int], list[mx.array]]:
        """Judge one row's drafts in order, up to the first that is rejected.

        Shapes:
            drafts: tokens [1, K]; logits: [1, K + 1, V]; start: [1]

        Returns:
            The tokens to emit, and their log-probabilities [1, V].
        """
        tokens, rows = [], []
        count = drafts.tokens.shape[1]
        for i in range(count + 1):
            processed = apply(self.processors, self.history, logits[:, i])
            rows.append(log_probs(processed))
            draft = drafts.tokens[:, i : i + 1]
            probs = None if drafts.probs is None else drafts.probs[:, i : i + 1]
            token, accepted = rule.one(draft, probs, rows[-1][:, None], start, i)
            tokens.append(token.item())
            self.history = _append(self.history, tokens[-1])
            self.left -= 1
            # The rule may have drawn the draft's own value anew: then it was rejected.
            if tokens[-1] in self.end_tokens or self.left == 0:
                break
            if not (i < count and accepted.item()):
                break
        return tokens, rows


def apply(
    processors: Sequence[LogitsProcessor], tokens: mx.array, logits: mx.array
) -> mx.array:
    for processor in processors:
        logits = processor(tokens, logits)
    return logits


def judge_rows(
    rows: Sequence[Processors],
    rule: Rule,
    drafts: Drafts,
    logits: mx.array,
    start: mx.array,
) -> tuple[Accepted, mx.array]:
    """Judge every row of a batch; log-probabilities [B, K + 1, V] after processors."""
    width = logits.shape[1]
    tokens, kept, logprobs = [], [], []
    for b, row in enumerate(rows):
        one = slice(b, b + 1)
        probs = None if drafts.probs is None else drafts.probs[one]
        emitted, seen = row.judge(
            rule_of_row(rule, b),
            Drafts(drafts.tokens[one], probs),
            logits[one],
            start[one],
        )
        rest = width - len(emitted)
        tokens.append([*emitted, *[0] * rest])
        kept.append(len(emitted))
        # Rows nobody has judged are left over, as their tokens are.
        seen += [mx.zeros_like(seen[0])] * rest
        logprobs.append(mx.stack(seen, axis=1))
    accepted = Accepted(mx.array(tokens, mx.int32), mx.array(kept, mx.int32))
    return accepted, mx.concatenate(logprobs)


def _append(history: mx.array, token: int) -> mx.array:
    return mx.concatenate([history, mx.array([token], history.dtype)])
