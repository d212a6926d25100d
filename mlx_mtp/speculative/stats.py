"""Counters of speculation, under vLLM's names."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SpeculationStats:
    """What has been drafted and accepted so far, over all rows.

    A round counts with its whole verification, even where a limit cuts its output.

    Args:
        num_drafts: rounds that drafted at least one token.
        num_draft_tokens: tokens drafted.
        num_accepted_tokens: drafts that the target accepted.
        num_accepted_tokens_per_pos: the same by position in the draft.
        num_draft_tokens_per_pos: tokens drafted by position in the draft.
        num_outside_draft_vocabulary: rejected drafts in whose place stood a token that
            could not be drafted, as it is not in the draft vocabulary.
        notes: what did not run as it should on this machine, such as a kernel.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    num_outside_draft_vocabulary: int = 0
    notes: tuple[str, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafts; 0 before the first draft."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, recovered or bonus token included; 0 before the first."""
        if self.num_drafts == 0:
            return 0.0
        return 1 + self.num_accepted_tokens / self.num_drafts

    def after(
        self, num_draft_tokens: int, num_accepted: int, outside: bool = False
    ) -> "SpeculationStats":
        """The counters with one more round of one row."""
        if num_draft_tokens == 0:
            return self
        return replace(
            self,
            num_drafts=self.num_drafts + 1,
            num_draft_tokens=self.num_draft_tokens + num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + num_accepted,
            num_accepted_tokens_per_pos=_one_more(
                self.num_accepted_tokens_per_pos, num_accepted, num_draft_tokens
            ),
            num_draft_tokens_per_pos=_one_more(
                self.num_draft_tokens_per_pos, num_draft_tokens, num_draft_tokens
            ),
            num_outside_draft_vocabulary=self.num_outside_draft_vocabulary + outside,
        )

    def as_dict(self) -> dict[str, int | float | list[int] | list[str]]:
        """Counters and rates, as the JSON output names them."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "num_draft_tokens_per_pos": list(self.num_draft_tokens_per_pos),
            "num_outside_draft_vocabulary": self.num_outside_draft_vocabulary,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "notes": list(self.notes),
        }


def _one_more(counts: tuple[int, ...], first: int, size: int) -> tuple[int, ...]:
    """Counts of at least ``size`` positions, the ``first`` ones higher by 1."""
    padded = counts + (0,) * (size - len(counts))
    return tuple(n + (i < first) for i, n in enumerate(padded))
