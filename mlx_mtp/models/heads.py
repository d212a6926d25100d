"""A head of several modules, each a head of its own for one more token ahead.

Module m, counted from 0, reads the embedding of x[t + m + 1] and a state of x[t], and
its output predicts x[t + m + 2]. Which state that is, is data (``spec.modules``); how
drafts are made of it, ``speculative.module_drafter`` knows.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..speculative.module_cache import ModuleCaches
from .head import MTPHead
from .target import Target

PREFIX = "heads.{}."  # of a module's parameters


def reuse_note(head: nn.Module | None, num_draft_tokens: int | str) -> str | None:
    """What to tell someone who asks for more drafts than a head has modules."""
    modules = getattr(head, "heads", None)
    wants = num_draft_tokens if isinstance(num_draft_tokens, int) else 0
    if modules is None or wants <= len(modules):
        return None
    return (
        f"{wants} drafts per round, but the MTP head has {len(modules)} modules: the "
        "last one is used again, and fewer of its further drafts will be accepted"
    )


class MTPHeads(nn.Module):
    """The modules of a head; embeddings are the same for all of them.

    Args:
        heads: module by module.
    """

    def __init__(self, heads: Sequence[MTPHead]):
        super().__init__()
        self.spec = heads[0].spec
        self.heads = list(heads)

    @property
    def chained(self) -> bool:
        """Whether a module reads the output of the one before, not the target's."""
        return self.spec.modules == "chained"

    def embed(self, target: Target, tokens: mx.array) -> mx.array:
        """[B, T] -> [B, T, hidden_size]"""
        return self.heads[0].embed(target, tokens)

    def output_layer(self, target: Target) -> nn.Module:
        """The first module's; its rows are the vocabulary."""
        return self.heads[0].output_layer(target)

    def make_cache(self, batch_size: int = 1) -> ModuleCaches:
        return ModuleCaches.empty_of(len(self.heads), batch_size)
