"""Heads of several modules: one reference per module around the same target.

Entry p of module m reads a state of x[p] and the embedding of x[p + m + 1], and
predicts x[p + m + 2]. That state is the target's for every module of a target-fed head;
in a chained head module m reads what module m - 1 gave at the same p. Each module sees
its own entries only, at positions p.
"""

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .reference import Drafts, HeadOut, Reference, Tokens, batch


class ModulesReference(Reference):
    """A family says the prefix of a module, and ``names`` and ``make_block`` for the
    module ``self.module``."""

    chained: ClassVar[bool]
    module = 0

    def prefix(self, module: int) -> str:
        """Of the raw names of a module's tensors."""
        raise NotImplementedError

    def is_head(self, key: str) -> bool:
        return any(key.startswith(self.prefix(m)) for m in range(self.num_modules))

    def build(self, head: dict[str, Tensor]) -> None:
        self.raw_head, self.modules = head, []
        for m in range(self.num_modules):
            one = copy.copy(self)
            one.module = m
            prefix = self.prefix(m)
            Reference.build(
                one, {k: v for k, v in head.items() if k.startswith(prefix)}
            )
            self.modules.append(one)
        assert sum(len(one.raw_head) for one in self.modules) == len(head)

    def head(
        self, states: Tensor, tokens: Tokens, module: int = 0, **toggles: Any
    ) -> HeadOut:
        """Entries 0..T-1 of a module: ``states`` [B, T, H] as chosen by the caller (the
        target's, or the ``chain`` of the module before), ``tokens`` [B, T]
        x[p + module + 1]."""
        return Reference.head(self.modules[module], states, tokens, **toggles)

    def teacher_forced(
        self, tokens: Tokens, states: Tensor | None = None, **toggles: Any
    ) -> list[HeadOut]:
        tokens = batch(tokens)
        if states is None:
            stage = replace(self.toggles, **toggles).hidden
            states = getattr(self.target(tokens), stage)
        outs: list[HeadOut] = []
        for m in range(self.num_modules):
            if m and self.chained:
                states = outs[-1].chain
            states = states[:, : tokens.shape[1] - m - 1]
            outs.append(self.head(states, tokens[:, m + 1 :], m, **toggles))
        return outs

    @torch.no_grad()
    def drafts(
        self,
        tokens: Tokens,
        num_draft_tokens: int,
        follow: Tokens | None = None,
        **toggles: Any,
    ) -> Drafts:
        """Drafts after ``tokens`` [T] or [B, T]; the target has not read the last one.
        Draft k is that of module k at its last entry T - 2: every module has T - 1
        entries, whose last k tokens are drafts.

        Past the last module, that module is used again as a head of one module is: it
        keeps its entries and for every further draft gets one more, made of its own
        last ``chain`` and the draft before. Few engines allow it; this is the choice
        made here.

        Args:
            follow: the drafts to go on with; default: the most likely ones.
        """
        chosen = replace(self.toggles, **toggles)
        tokens = batch(tokens)
        states = getattr(self.target(tokens[:, :-1]), chosen.hidden)
        following = tokens[:, 1:]
        given = None if follow is None else batch(follow)
        logits: list[Tensor] = []
        drafted: list[Tensor] = []
        chain = states[:, :0]
        last = self.num_modules - 1
        for step in range(num_draft_tokens):
            if step > last:
                states = torch.cat([states, chain[:, -1:]], dim=1)
                following = torch.cat([following, drafted[-1]], dim=1)
            elif step:
                states = chain if self.chained else states
                following = torch.cat([following[:, 1:], drafted[-1]], dim=1)
            out = self.head(states, following, min(step, last), **toggles)
            chain = out.chain
            logits.append(out.logits[:, -1])
            token = logits[-1].argmax(-1) if given is None else given[:, step]
            drafted.append(token[:, None])
        return Drafts(torch.stack(logits, 1), torch.cat(drafted, 1))
