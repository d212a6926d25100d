"""Qwen3.5-MoE comes in several layouts: all give the same tensors."""

from pathlib import Path

import mlx.core as mx
import pytest
from converting import config_of, edit_config, read, rewrite, same
from families import family

from mlx_mtp import convert

BODY = "model.language_model."


def single_experts(weights: dict[str, mx.array]) -> None:
    """As transformers' ``save_pretrained`` writes them."""
    for key in [key for key in weights if key.endswith("experts.gate_up_proj")]:
        prefix = key.removesuffix("gate_up_proj")
        gate, up = mx.split(weights.pop(key), 2, axis=1)
        parts = {"gate": gate, "up": up, "down": weights.pop(f"{prefix}down_proj")}
        for name, stacked in parts.items():
            for e, expert in enumerate(stacked):
                weights[f"{prefix}{e}.{name}_proj.weight"] = expert


def flat(path: Path) -> None:
    """The text model alone, without the wrapper's config and prefix."""
    edit_config(path, lambda c: c.update(c.pop("text_config")))

    def rename(weights):
        for key in [key for key in weights if key.startswith(BODY)]:
            weights[f"model.{key.removeprefix(BODY)}"] = weights.pop(key)

    rewrite(path, rename)


def other_prefix(weights: dict[str, mx.array]) -> None:
    for key in [key for key in weights if key.startswith("mtp.")]:
        weights[f"model.{key}"] = weights.pop(key)


LAYOUTS = {
    "single experts": lambda path: rewrite(path, single_experts),
    "flat": flat,
    "another prefix": lambda path: rewrite(path, other_prefix),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    convert(family("qwen3_5_moe").write(root / "raw", seed=2), root / "out")
    return root / "out"


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_make_no_difference(plain, tmp_path, change):
    raw = family("qwen3_5_moe").write(tmp_path / "raw", seed=2)
    change(raw)
    convert(raw, tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))
    assert config_of(tmp_path / "out")["model_type"] == "qwen3_5_moe"
