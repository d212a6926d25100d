"""The launch counter, in a process of its own, on a config of small sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """As Qwen3.5-0.8B in everything that decides the number of launches."""
    folder = ROOT / "benchmarks"
    config = json.loads((folder / "configs" / "qwen3.5-0.8b.json").read_text())
    config["text_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 32,
        "vocab_size": 256,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    path = tmp_path_factory.mktemp("launches") / "config.json"
    path.write_text(json.dumps(config))
    run = subprocess.run(
        [sys.executable, str(folder / "launches.py"), "--config", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    *table, last = run.stdout.splitlines()
    assert table[0].split()[0] == "launches"
    return json.loads(last)


def test_control(counts):
    """mlx-lm's own layer and step, known from its source."""
    assert counts["launches_delta_layer_stock"] == 18
    assert 550 <= counts["launches_plain"] <= 650


def test_a_delta_layer(counts):
    assert counts["launches_delta_layer"] <= 5


def test_a_round(counts):
    rounds = counts["launches_round"]
    assert list(rounds) == ["0", "1", "2", "3", "4"]
    assert rounds["1"] <= 0.85 * counts["launches_plain"]
    steps = [rounds[str(K + 1)] - rounds[str(K)] for K in range(1, 4)]
    # Each further draft costs the same; the second also joins the drafts' tokens.
    assert max(steps) - min(steps) <= 1


def test_the_state_moves_once_whatever_k(counts):
    for name in ("state_reads_per_round", "state_writes_per_round"):
        assert set(counts[name].values()) == {1.0}


def test_bytes(counts):
    """A draft reads the head and the output layer again, and nothing else grows."""
    sizes = counts["bytes_round"]
    grows = [
        sizes[str(K + 1)]["weights"] - sizes[str(K)]["weights"] for K in range(1, 4)
    ]
    assert len(set(grows)) == 1
    assert grows[0] > 0
    assert len({size["state"] for size in sizes.values()}) == 1


def test_build_time_is_measured(counts):
    """Python's share; its bound holds for one quiet run, not for a shared machine."""
    assert counts["build_ms_plain"] > 0
    assert all(0 < ratio < 3 for ratio in counts["build_ratio"].values())
