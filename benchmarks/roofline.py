"""A roofline ESTIMATE of a round on Apple GPUs, from the counts of ``launches.py``.

    python benchmarks/launches.py | python benchmarks/roofline.py

Time of a step = bytes / bandwidth + launches x launch cost. Bandwidths are Apple's
published figures; the share of it that is reached, and the cost of a launch, are
assumptions and no measurement: no Apple GPU was used.
"""

import argparse
import json
import sys

# GB/s, as published.
BANDWIDTH = {
    "M1": 68,
    "M2 Pro": 200,
    "M3": 100,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max (40 cores)": 546,
    "M3 Ultra": 819,
}
REACHED = 0.8  # assumed share of the bandwidth
LAUNCH_US = 1.5  # assumed, microseconds, one launch after the other


def milliseconds(size: dict[str, int], launches: int, bandwidth: float) -> float:
    seconds = sum(size.values()) / (bandwidth * REACHED * 1e9)
    return seconds * 1e3 + launches * LAUNCH_US / 1e3


def tokens(num_draft_tokens: int, acceptance: float) -> float:
    """Of a round, on average; a draft behind accepted ones is accepted so often."""
    return sum(acceptance**i for i in range(num_draft_tokens + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acceptance", type=float, default=0.8)
    args = parser.parse_args()
    counts = json.loads(sys.stdin.read().strip().splitlines()[-1])
    drafts = [int(K) for K in counts["launches_round"]]
    print(
        f"Estimate; acceptance {args.acceptance}, {REACHED:.0%} of the bandwidth, ",
        end="",
    )
    print(f"{LAUNCH_US} us a launch. Speed-up over mlx-lm's plain step:")
    print(f"{'':20}{'plain ms':>10}", *(f"{f'K = {K}':>8}" for K in drafts))
    rows = {}
    for chip, bandwidth in BANDWIDTH.items():
        plain = milliseconds(counts["bytes_plain"], counts["launches_plain"], bandwidth)
        gains = {}
        for K in drafts:
            launches = counts["launches_round"][str(K)]
            round_ms = milliseconds(counts["bytes_round"][str(K)], launches, bandwidth)
            gains[K] = round(plain / round_ms * tokens(K, args.acceptance), 2)
        rows[chip] = {"plain_ms": round(plain, 2), "speed_up": gains}
        print(f"{chip:20}{plain:>10.2f}", *(f"{gain:>8.2f}" for gain in gains.values()))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
