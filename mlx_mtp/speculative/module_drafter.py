"""The drafter for a head of several modules.

Draft m + 1 is module m's, from its entry at the last position that the target has read:
there module m reads draft m. The m entries before that one are new as well, since their
tokens were drafts in the round before. So every module runs once a round, over the last
block and m entries more, and behind the round its cache holds what a run over the text
that stands would have put there.

Past the last module, that one is used again as a head of one module is: for every
further draft one entry more, made of its own last output.
"""

from typing import Any

import mlx.core as mx

from .accept import pick
from .assistant_drafter import AssistantDrafter, NoCache
from .draft import Drafter, Made, TokenOf
from .ranges import arange


class ModuleDrafter(Drafter):
    """Modules and their caches; what ``Drafter`` says of the cache holds for each."""

    def add(self, next_tokens: mx.array, hidden: mx.array) -> None:
        self._run(next_tokens, hidden, next_tokens.shape[1], 0, None)

    def make(
        self,
        next_tokens: mx.array,
        hidden: mx.array,
        kept: mx.array,
        num_draft_tokens: int,
        token_of: TokenOf,
    ) -> list[Made]:
        # What modules add that do not draft, no draft evaluates.
        self.due |= num_draft_tokens < len(self.head.heads)
        limit = self.cache.limit + next_tokens.shape[1]
        made = self._run(next_tokens, hidden, kept, num_draft_tokens, token_of)
        self.cache.rewind(self.cache[0].block_start + kept, limit)
        return made

    def _run(
        self,
        next_tokens: mx.array,
        hidden: mx.array,
        kept: mx.array | int,
        num_draft_tokens: int,
        token_of: TokenOf | None,
    ) -> list[Made]:
        """Every module over a block; the caches stand behind drafted entries then.

        A module that does not draft runs over the block alone. Its input is that of the
        module before, or what that one made of it, one position later.
        """
        width, made, inputs = next_tokens.shape[1], [], []
        tokens, states, output = next_tokens, hidden, None
        for m, module in enumerate(self.head.heads):
            if m:
                states = self.cache.late(m, output if self.head.chained else states)
                inputs.append(states)
            if 0 < m < num_draft_tokens:
                tokens = with_draft(tokens, made[-1][0], kept + (m - 1))
            elif m >= num_draft_tokens:
                tokens, states = next_tokens, states[:, :width]
            output = module(self.embed(tokens), states, self.cache[m])
            if m < num_draft_tokens:
                state = pick(output, kept + (m - 1))
                made.append(token_of(module, state, m))
        self.cache.begin_with(inputs, kept)
        if num_draft_tokens > len(self.head.heads):
            self._go_on(made, state, kept, num_draft_tokens, token_of)
        return made

    def _go_on(
        self,
        made: list[Made],
        state: mx.array,
        kept: mx.array,
        num_draft_tokens: int,
        token_of: TokenOf,
    ) -> None:
        """Draft with the last module what no module is there for."""
        module, cache = self.head.heads[-1], self.cache[-1]
        cache.rewind(cache.block_start + kept + (len(made) - 1), cache.limit)
        for step in range(len(made), num_draft_tokens):
            state = module(self.embed(made[-1][0]), state, cache)
            made.append(token_of(module, state, step))


def with_draft(tokens: mx.array, draft: mx.array, at: mx.array) -> mx.array:
    """Tokens [B, T] and one column more, with the draft [B, 1] at ``at`` [B]."""
    wider = mx.concatenate([tokens, draft], axis=1)
    return mx.where(arange(wider.shape[1]) == at[:, None], draft, wider)


def drafter_of(head: Any, target: Any, batch_size: int, cache: Any = None) -> Drafter:
    """The drafter for a head of one module or of several."""
    if getattr(head, "reads_target", False):
        return AssistantDrafter(head, target, batch_size, cache or NoCache(batch_size))
    kind = ModuleDrafter if hasattr(head, "heads") else Drafter
    return kind(head, target, batch_size, cache)
