"""The rows of a running batch: who they are, where they stand, how they choose.

Rows leave when their text ends and others join behind the ones that stay. A round that
is in flight meanwhile goes on for the rows that stay.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import mlx.core as mx

from .processors import Processors
from .round import Block, Engine
from .rules import PerRow, Rule, rule_of_row


class Joining(NamedTuple):
    """A row that has had its prefill and joins a running batch.

    Args:
        member: its name.
        engine: of this row alone; its caches are taken over.
        block: its first block.
        length: of its text.
        prompt: its token ids.
    """

    member: int
    engine: Engine
    block: Block
    length: int
    prompt: Sequence[int] = ()


def choices_of(engine: Engine) -> list[tuple[Rule, Processors | None]]:
    """How the tokens of each row are chosen."""
    processors = engine.processors or [None] * engine.batch_size
    return [(rule_of_row(engine.rule, b), row) for b, row in enumerate(processors)]


class Rows:
    """The rows of an engine.

    Args:
        engine: whose rows they are.
        lengths: of their prompts.

    Attributes:
        members: the name of each row.
        known: per row, positions in the target's caches, of rounds read.
        emitted: per row, tokens of rounds read.
    """

    def __init__(self, engine: Engine, lengths: Sequence[int]):
        self.engine = engine
        self.members = tuple(range(len(lengths)))
        self.known = [engine.length + length - 1 for length in lengths]
        self.emitted = [0] * len(lengths)
        self._leaving: set[int] = set()
        self._joining: list[Joining] = []
        self._choices = choices_of(engine)

    def count(self, tokens: Sequence[Sequence[int]]) -> None:
        """A round has been read."""
        for b, row in enumerate(tokens):
            self.known[b] += len(row)
            self.emitted[b] += len(row)

    def change(self, leaving: Collection[int], joining: Sequence[Joining]) -> None:
        """To be carried out by the next ``leave`` and ``join``."""
        self._leaving |= set(leaving)
        self._joining += joining

    @property
    def joining(self) -> bool:
        return bool(self._joining)

    @property
    def changing(self) -> bool:
        return bool(self._leaving or self._joining)

    def leave(self, block: Block | None) -> Block | None:
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

    def join(self, block: Block | None) -> Block:
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
            self.engine.see(row.prompt)
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
