"""What generation yields, and how it is printed."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_lm.generate import GenerationResponse as BaseResponse

from .speculative.stats import SpeculationStats

RULE = "=" * 10


@dataclass
class GenerationResponse(BaseResponse):
    """One token of the output: mlx-lm's response and the speculation counters.

    Args:
        stats: counters over all rounds read so far; zero without MTP.
    """

    stats: SpeculationStats = field(default_factory=SpeculationStats)


def print_stream(responses: Iterable[GenerationResponse], *, mtp: bool) -> str:
    """Print and return the text; mlx-lm's layout, and a line on MTP if it was on."""
    print(RULE)
    text, last = [], None
    for last in responses:
        print(last.text, end="", flush=True)
        text.append(last.text)
    print(f"\n{RULE}")
    print(
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, "
        f"{last.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {last.peak_memory:.3f} GB"
    )
    if mtp:
        print(acceptance_line(last.stats))
    for note in last.stats.notes:
        print(f"Note: {note}")
    return "".join(text)


def acceptance_line(stats: SpeculationStats) -> str:
    drafted = stats.num_draft_tokens_per_pos
    line = f"MTP: K = {len(drafted)}, "
    if len(set(drafted)) > 1:  # chosen round by round
        mean = stats.num_draft_tokens / stats.num_drafts
        line = f"MTP: K up to {len(drafted)}, {mean:.1f} on average, "
    if stats.num_drafts == 0:
        return line + "no drafts"
    pairs = zip(stats.num_accepted_tokens_per_pos, drafted, strict=True)
    rates = ", ".join(f"{accepted / count:.2f}" for accepted, count in pairs)
    return line + (
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts accepted "
        f"(rate {stats.acceptance_rate:.3f}; by position {rates}), "
        f"{stats.mean_acceptance_length:.2f} tokens per round"
    )
