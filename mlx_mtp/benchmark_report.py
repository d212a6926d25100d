"""The benchmark's figures as a table for people, a JSON line and a picture."""

import statistics
from collections.abc import Sequence
from typing import Any


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def rounded(value: Any, digits: int = 4) -> Any:
    """Numbers to significant digits, in any JSON value."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def print_costs(document: dict[str, Any]) -> None:
    costs = document["costs"]
    shares = ", ".join(f"{c:.2f}" for c in costs["verify_relative"])
    print(f"verify c(1..{len(costs['verify_relative'])}): {shares}", end="")
    print(f" (plain step {1e3 * costs['verify_seconds'][0]:.1f} ms)")
    if costs["draft_relative"] is not None:
        print(
            f"draft step: {costs['draft_relative']:.3f} of a plain step; over the "
            f"whole vocabulary {costs['draft_whole_relative']:.3f}, without the output "
            f"layer {costs['head_layer_relative']:.3f}"
        )
    print(f"weights read in a plain step: {costs['bandwidth_gb_s']:.1f} GB/s\n")


def print_table(document: dict[str, Any]) -> None:
    """Speed of every method, its ratio to mlx-lm with quartiles, and acceptance."""
    header = ("method", "tok/s", "ratio", "quartiles", "expected", "tokens/round")
    header += ("accepted by position", "first token", "peak GB")
    print("| " + " | ".join(header) + " |")
    print("|---" * len(header) + "|")
    for name, method in document["methods"].items():
        low, middle, high = method["ratio"]
        expected = method.get("expected_speed_up")
        length = method.get("mean_acceptance_length")
        rates = method.get("conditional_acceptance") or ()
        cells = (
            name,
            f"{method['tokens_per_second']:.2f}",
            f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}",
            "" if expected is None else f"{expected:.2f}",
            "" if length is None else f"{length:.2f}",
            " ".join(f"{rate:.2f}" for rate in rates if rate is not None),
            f"{method['first_token_seconds']:.2f} s",
            f"{method['peak_memory_gb']:.2f}",
        )
        print("| " + " | ".join(cells) + " |")
    print()


def print_exact(comparisons: list[dict[str, Any]]) -> None:
    for c in comparisons:
        where = f"prompt {c['prompt']}, K = {c['num_draft_tokens']}"
        if c["exact"]:
            print(f"exact: {where}, {c['tokens']} tokens and log-probabilities")
        elif c["diverged_at"] is None:
            print(
                f"same tokens: {where}, log-probabilities differ by up to "
                f"{c['max_difference']:.2e}"
            )
        else:
            print(
                f"DIVERGED: {where}, at token {c['diverged_at']}, where the two "
                f"likeliest are {c['top2_gap']:.3g} apart; before it "
                f"log-probabilities differ by up to {c['max_difference']:.2e}"
            )
    print()


def plot(document: dict[str, Any], file: str) -> None:
    """Speed-up and acceptance by K.

    Raises:
        ValueError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib: pip install 'mlx-mtp[bench]'"
        ) from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    methods = document["methods"]
    fixed = {m["k"]: m for m in methods.values() if isinstance(m.get("k"), int)}
    ks = sorted(fixed)
    middle = [fixed[k]["ratio"][1] for k in ks]
    spread = [
        [fixed[k]["ratio"][1] - fixed[k]["ratio"][0] for k in ks],
        [fixed[k]["ratio"][2] - fixed[k]["ratio"][1] for k in ks],
    ]
    left.errorbar(ks, middle, spread, marker="o", capsize=3, label="measured")
    known = [k for k in ks if fixed[k].get("expected_speed_up")]
    expected = [fixed[k]["expected_speed_up"] for k in known]
    left.plot(known, expected, "--", marker="x", label="expected")
    if "auto" in methods:
        left.axhline(methods["auto"]["ratio"][1], color="C2", label="auto")
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(xlabel="drafts per round (K)", ylabel="speed / mlx-lm's", xticks=ks)
    left.legend()
    for k in ks:
        rates = [r for r in fixed[k].get("conditional_acceptance") or () if r]
        if rates:
            right.plot(range(1, len(rates) + 1), rates, marker="o", label=f"K = {k}")
    right.set(xlabel="draft position", ylabel="accepted, if all before were")
    right.set(ylim=(0, 1.05))
    if right.lines:
        right.legend()
    figure.suptitle(f"{document['model']} on {document['machine']['device_name']}")
    figure.savefig(file, dpi=120)
