"""Downloads through the hub's own client, from a hub of the test's."""

import time
from pathlib import Path

import huggingface_hub
import mlx_lm
import pytest
from checkpoints import build
from converting import head_of, read, same
from hub_server import serve

from mlx_mtp import convert

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
CHUNK = 256
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def repos(tmp_path_factory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("repos")
    raw = build(root / "raw")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "figure.png"):
        (raw / name).write_bytes(b"never")
    (raw / "original").mkdir()
    (raw / "original" / "model.safetensors").write_bytes(b"never")
    old = build(root / "old", tie=True)
    mlx_lm.convert(str(build(root / "bare")), str(root / "base"), quantize=True)
    return {
        ("Qwen/X", "main"): raw,
        ("Qwen/X", "v1"): old,
        ("mlx-community/X-4bit", "main"): root / "base",
    }


@pytest.fixture
def hub(repos, monkeypatch, tmp_path):
    constants = huggingface_hub.constants
    with serve(dict(repos)) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", running.url)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between retries
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield running


def test_what_is_needed_and_nothing_else(hub, tmp_path):
    convert("Qwen/X", tmp_path / "out")
    assert {*SHARDS, INDEX, "config.json", "tokenizer.json"} <= hub.sent.keys()
    assert not {
        n for n in hub.sent if "consol" in n or "/" in n or n[-4:] != "json"
    } - {*SHARDS}
    convert(repos["Qwen/X", "main"], tmp_path / "local") if False else None
    first = dict(hub.sent)
    convert("Qwen/X", tmp_path / "again")
    assert hub.sent == first  # from the cache
    assert same(read(tmp_path / "again"), read(tmp_path / "out"))


def test_revision(hub, repos, tmp_path):
    convert("Qwen/X", tmp_path / "out", revision="v1")
    convert(repos["Qwen/X", "v1"], tmp_path / "local")
    assert same(read(tmp_path / "out"), read(tmp_path / "local"))
    assert not any("lm_head" in name for name in read(tmp_path / "out"))


def test_graft_downloads_the_shard_with_the_head(hub, tmp_path):
    convert("mlx-community/X-4bit", tmp_path / "out", mtp_from="Qwen/X")
    assert SHARDS[2] in hub.sent
    assert not {*SHARDS[:2]} & hub.sent.keys()
    assert len(head_of(tmp_path / "out")) == 15


def test_broken_download_goes_on(hub, tmp_path):
    hub.break_after[SHARDS[0]] = 1000
    convert("Qwen/X", tmp_path / "out")
    (file,) = (tmp_path / "cache").rglob(SHARDS[0])
    assert hub.ranges == [SHARDS[0]]
    assert hub.sent[SHARDS[0]] < file.stat().st_size + CHUNK
    assert (tmp_path / "out" / "mtp.safetensors").exists()


def test_offline(hub, tmp_path):
    convert("Qwen/X", tmp_path / "out")
    hub.repos.clear()
    convert("Qwen/X", tmp_path / "again")
    assert same(read(tmp_path / "again"), read(tmp_path / "out"))


def test_graft_offline(hub, tmp_path):
    """Of the original the cache has no more than the graft has asked for."""
    options = {"mtp_from": "Qwen/X"}
    convert("mlx-community/X-4bit", tmp_path / "out", **options)
    hub.repos.clear()
    convert("mlx-community/X-4bit", tmp_path / "again", **options)
    assert same(read(tmp_path / "again"), read(tmp_path / "out"))
    with pytest.raises(ValueError, match="lacks model-00001-of-00003"):
        convert("Qwen/X", tmp_path / "whole")


def test_unknown_repository(hub, tmp_path):
    with pytest.raises(ValueError, match="nobody/nothing is no directory here and"):
        convert("nobody/nothing", tmp_path / "out")
    with pytest.raises(ValueError, match="nobody/nothing is no directory here and"):
        convert("mlx-community/X-4bit", tmp_path / "out", mtp_from="nobody/nothing")
