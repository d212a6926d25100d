"""Acceptance of each rule on a checkpoint, as a Markdown table and one line of JSON.

    python benchmarks/acceptance.py [--model DIR] [--num-draft-tokens 3]

Every cell is accepted / drafted over all prompts, with a seed per prompt. Text for a
seed differs between rules, so small differences mean nothing.
"""

import argparse
import json
from collections import deque

from tqdm import tqdm

import mlx_mtp
from mlx_mtp.load import DEMO_PATH
from mlx_mtp.sampling import ACCEPTANCE

PROMPTS = (
    "def ",
    "class ",
    "import os\nimport sys\n\n",
    "    def __init__(self, ",
    ".. function:: ",
    "The following example shows how to ",
    "Return a new ",
    "    if not isinstance(",
)
TEMPERATURES = (0.3, 0.6, 0.8, 1.0, 1.3)


def rate(loaded: tuple, k: int, count: int, **options: object) -> float:
    accepted = drafted = 0
    for seed, prompt in enumerate(PROMPTS):
        responses = mlx_mtp.stream_generate(
            *loaded, prompt, max_tokens=count, num_draft_tokens=k, seed=seed, **options
        )
        (last,) = deque(responses, maxlen=1)
        accepted += last.stats.num_accepted_tokens
        drafted += last.stats.num_draft_tokens
    return accepted / max(drafted, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEMO_PATH))
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args()
    loaded = mlx_mtp.load(args.model)
    cells = [(t, rule) for t in TEMPERATURES for rule in ACCEPTANCE]
    k, count = args.num_draft_tokens, args.max_tokens
    rates = {"greedy": rate(loaded, k, count)}
    for temp, rule in tqdm(cells, disable=None):
        options = {"temp": temp, "acceptance": rule}
        rates[f"{temp} {rule}"] = rate(loaded, k, count, **options)
    print("| temperature | " + " | ".join(ACCEPTANCE) + " |")
    print("|---" * (1 + len(ACCEPTANCE)) + "|")
    for temp in TEMPERATURES:
        row = [f"{rates[f'{temp} {rule}']:.2f}" for rule in ACCEPTANCE]
        print(f"| {temp} | " + " | ".join(row) + " |")
    rounded = {name: round(value, 4) for name, value in rates.items()}
    print(json.dumps({"model": args.model, "k": k, "tokens": count, "rates": rounded}))


if __name__ == "__main__":
    main()
