"""Converted checkpoints that several test files share, each built once a session."""

from pathlib import Path

import isolated  # noqa: F401  (first: it moves folders)
import mlx.core as mx
import pytest
from checkpoints import END, build, chain

from mlx_mtp import convert

QUESTION = ord("Q")
TEXT = "aé🙂b"


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory):
    """Build a raw checkpoint and convert it -> the MLX directory."""
    made: dict[str, Path] = {}

    def make(name: str, convert_args: dict | None = None, **build_args) -> Path:
        if name not in made:
            root = tmp_path_factory.mktemp("model")
            build(root / "raw", **build_args)
            convert(str(root / "raw"), str(root / name), **(convert_args or {}))
            made[name] = root / name
        return made[name]

    return make


@pytest.fixture(scope="session")
def text_chain():
    """``Q`` -> ``aé🙂b`` -> end token, a byte per token."""
    return chain([QUESTION, *TEXT.encode(), END])


@pytest.fixture(scope="session")
def random_dir(make_model_dir):
    """All weights random: nearly every draft is rejected."""
    return make_model_dir("random", kind="random")


@pytest.fixture(scope="session")
def oracle_dir(make_model_dir, text_chain):
    """Emits TEXT after Q; every draft is right."""
    return make_model_dir("oracle", kind="oracle", succ=text_chain)


@pytest.fixture(scope="session")
def noisy_dir(make_model_dir, text_chain):
    """As the oracle, with log-probabilities that depend on the whole history."""
    return make_model_dir("noisy", kind="noisy", succ=text_chain)


def rows_equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())
