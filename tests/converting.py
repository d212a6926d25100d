"""Reading, comparing and changing checkpoint directories."""

import json
from pathlib import Path

import mlx.core as mx

from mlx_mtp.checkpoint import MTP_FILE, MTP_PREFIX

HEAD_LINEARS = {"fc"}
HEAD_LINEARS |= {f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
HEAD_LINEARS |= {f"layers.0.self_attn.{name}_proj" for name in "qkvo"}
HEAD_NORMS = {"norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}
HEAD_NORMS |= {f"layers.0.self_attn.{name}_norm" for name in "qk"}
HEAD_NORMS |= {f"layers.0.{n}_layernorm" for n in ("input", "post_attention")}


def read(path: Path, pattern: str = "*.safetensors") -> dict[str, mx.array]:
    files = sorted(path.glob(pattern))
    return {k: v for file in files for k, v in mx.load(str(file)).items()}


def head_of(path: Path) -> dict[str, mx.array]:
    tensors = read(path, MTP_FILE)
    assert all(name.startswith(MTP_PREFIX) for name in tensors)
    return {name.removeprefix(MTP_PREFIX): v for name, v in tensors.items()}


def config_of(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


def edit_config(path: Path, edit) -> None:
    config = config_of(path)
    edit(config)
    (path / "config.json").write_text(json.dumps(config))


def rewrite(path: Path, edit) -> None:
    """Change a source's tensors; they end in one file without an index."""
    tensors = read(path)
    edit(tensors)
    mx.eval(tensors)
    for file in (*path.glob("*.safetensors"), *path.glob("*.index.json")):
        file.unlink()
    mx.save_safetensors(str(path / "model.safetensors"), tensors)


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and mx.array_equal(a[k], b[k]) for k in a
    )
