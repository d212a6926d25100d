"""Rows, pieces and memory: what is written does not depend on how it is cut."""

import json
import random
import resource
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from checkpoints import build
from converting import config_of, head_of, read, same
from families import family

import mlx_mtp
from mlx_mtp import convert, source, staging, stream
from mlx_mtp.rows import Rows, trace
from mlx_mtp.safetensors_check import check_file
from mlx_mtp.source import read_config, read_weight_map

ROOT = Path(__file__).parents[1]
# transformers says so of configs whose type it does not know.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
MODES = [
    {},
    {"dtype": "float16"},
    {"quantize": True, "q_group_size": 32},
    {"quantize": True, "q_mode": "mxfp4"},
    {"quantize": True, "q_mode": "mxfp8"},
    {"quantize": True, "q_mode": "nvfp4"},
    {"quantize": True, "quant_predicate": "mixed_3_6", "q_group_size": 32},
]


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    return family("qwen3_5_moe").write(root / "raw", seed=6)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_pieces_of_any_size(experts, tmp_path, monkeypatch, options):
    """Whole tensors, and rows of 7 at most: the same file, which is mlx-lm's."""
    convert(experts, tmp_path / "whole", **options)
    monkeypatch.setattr(stream, "PIECE_ELEMENTS", 7 * 64)
    monkeypatch.setattr(stream, "MAX_FILE_BYTES", 1 << 18)
    monkeypatch.setattr(source, "COPIED_BYTES", 100)
    convert(experts, tmp_path / "cut", **options)
    assert same(read(tmp_path / "cut"), read(tmp_path / "whole"))
    assert len(list((tmp_path / "cut").glob("model-*.safetensors"))) > 1
    recipe = options.get("quant_predicate")
    mlx_lm.convert(str(experts), str(tmp_path / "stock"), **options)
    got = read(tmp_path / "cut", "model*.safetensors")
    want = read(tmp_path / "stock")
    if recipe:  # which gives routers less than 8 bits
        routers = ("mlp.gate.", "shared_expert_gate.")
        got, want = (
            {k: v for k, v in t.items() if not any(r in k for r in routers)}
            for t in (got, want)
        )
    assert same(got, want)
    model, _ = mlx_mtp.load(tmp_path / "cut")
    assert model.mtp is not None


def test_routers_keep_8_bits_in_a_recipe(experts, tmp_path):
    options = {"quantize": True, "quant_predicate": "mixed_2_6", "q_group_size": 32}
    convert(experts, tmp_path / "out", **options)
    config = config_of(tmp_path / "out")
    routers = {k: v for k, v in config["quantization"].items() if k.endswith("gate")}
    assert len(routers) == 8
    assert {entry["bits"] for entry in routers.values()} == {8}
    assert config["mtp"]["quantization"]["bits"] == 6
    gate = head_of(tmp_path / "out")["layers.0.mlp.gate.weight"]
    assert gate.shape[1] * 32 // 8 == 64


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"mtp_mode": "mxfp8"}, (32, 8, "mxfp8")),
        ({"mtp_group_size": 32, "mtp_bits": 8}, (32, 8, "affine")),
        ({"mtp_bits": 8, "q_bits": 3}, (64, 8, "affine")),
        ({"mtp_mode": "affine", "q_mode": "mxfp4"}, (64, 4, "affine")),
        ({"quant_predicate": "mixed_3_4"}, (64, 4, "affine")),
    ],
    ids=str,
)
def test_head_in_a_form_of_its_own(tmp_path, options, want):
    convert(build(tmp_path / "raw"), tmp_path / "out", quantize=True, **options)
    stated = config_of(tmp_path / "out")["mtp"]["quantization"]
    assert tuple(stated.values()) == want
    model, _ = mlx_mtp.load(tmp_path / "out")
    assert (model.mtp.fc.group_size, model.mtp.fc.bits, model.mtp.fc.mode) == want


def test_function_as_predicate(tmp_path):
    def only_mlp(path, module):
        return {"group_size": 32, "bits": 8} if "mlp" in path else False

    raw = build(tmp_path / "raw")
    options = {"quantize": True, "quant_predicate": only_mlp}
    convert(raw, tmp_path / "out", **options)
    mlx_lm.convert(str(raw), str(tmp_path / "stock"), **options)
    got = read(tmp_path / "out", "model*.safetensors")
    assert same(got, read(tmp_path / "stock"))


def test_origin_of_rows():
    def transform(w):
        gate, up = mx.split(w["fused"], 2, axis=-2)
        stacked = mx.stack([w["b"], w["a"]])
        turned = w["t"].swapaxes(0, 1)
        both = mx.stack([w["a"], w["b"]])
        outputs = {"gate": gate, "up": up, "s": stacked, "both": both}
        return outputs | {"v": w["v"] + 1, "t": turned}

    shapes = {"a": (2, 5), "b": (2, 5), "fused": (2, 4, 3), "t": (4, 4), "v": (5,)}
    names, found = trace(transform, shapes)
    assert names == {"gate", "up", "s", "both", "v", "t"}
    assert found.keys() == {"gate", "up", "s", "both"}
    assert found["gate"].shape == (2, 2)
    assert found["gate"].pieces == (Rows("fused", 0, 2), Rows("fused", 4, 6))
    assert found["up"].pieces == (Rows("fused", 2, 4), Rows("fused", 6, 8))
    assert found["both"].pieces == (Rows("a", 0, 2), Rows("b", 0, 2))
    assert found["s"].pieces == (Rows("b", 0, 2), Rows("a", 0, 2))


MEASURE = """
import sys
sys.path.insert(0, "benchmarks")
from convert_bench import peak_bytes
from mlx_mtp import convert
tiny, raw, out = sys.argv[1:]
convert(tiny, out + "tiny", quantize=True)  # imports what a conversion needs
before = peak_bytes()
convert(raw, out + "plain")
convert(raw, out + "packed", quantize=True)
print("MEASURED", peak_bytes() - before)
"""


def test_memory(tmp_path):
    """In pieces of a fixed size, whatever the size of the source."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import convert_bench

    tiny, raw = build(tmp_path / "tiny"), tmp_path / "raw"
    largest = convert_bench.write_source(raw, 0.2, 0.05)
    size = sum(file.stat().st_size for file in raw.glob("*.safetensors"))
    command = [sys.executable, "-c", MEASURE, tiny, raw, tmp_path / "out"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    growth = int(done.stdout.split()[-1])
    assert growth < largest + 100e6 < size / 2, f"{growth / 1e6:.0f} MB"


class Killed(BaseException):
    """A process that ends on the spot."""


def test_killed_at_any_write(tmp_path, monkeypatch):
    """Never a directory under the name asked for, and the next run succeeds."""
    raw, out = build(tmp_path / "raw"), tmp_path / "out"
    convert(raw, tmp_path / "whole")
    put, writes = stream._put, []
    monkeypatch.setattr(stream, "_put", lambda *a: writes.append(put(*a)))
    convert(raw, tmp_path / "counted")
    for kill_at in sorted(random.Random(0).sample(range(len(writes)), 12)):
        count = iter(range(kill_at))

        def killed(*args, count=count):
            if next(count, None) is None:
                raise Killed
            put(*args)

        with monkeypatch.context() as dying:
            dying.setattr(stream, "_put", killed)
            dying.setattr(staging.shutil, "rmtree", lambda *a, **k: None)
            with pytest.raises(Killed):
                convert(raw, out)
        assert not out.exists()
    left = list(tmp_path.glob(".out.*.tmp"))
    assert left
    convert(raw, out)
    assert not list(tmp_path.glob(".out.*.tmp"))
    assert same(read(out), read(tmp_path / "whole"))


def test_staging_directory_of_a_living_process_stays(tmp_path):
    with staging.staged(tmp_path / "out") as directory:
        staging.remove_abandoned(tmp_path / "out")
        assert directory.exists()


def test_full_disk(tmp_path):
    """A limit on the size of files stands in for it."""
    raw = build(tmp_path / "raw")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            convert(raw, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["raw"]


def mutations(data: bytes, count: int, seed: int):
    """Bytes changed, cut out, doubled, and values of other kinds in their place."""
    rng = random.Random(seed)
    values = [
        b"-1",
        b"1e99",
        b'"x"',
        b"null",
        b"[]",
        b"{}",
        b"9" * 30,
        b"true",
        b"[" * 2000,
    ]
    for _ in range(count):
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.choice((0, 1, 2, 8)))
        middle = rng.choice([rng.randbytes(2), b"", data[start:stop] * 2, *values])
        yield data[:start] + middle + data[stop:]


@pytest.mark.parametrize("kind", ["header", "index", "config"])
def test_damaged_files(kind, tmp_path):
    """Whatever stands in them: a result, or a ValueError of one line."""
    tensors = {"a": mx.zeros((2, 3)), "b": mx.zeros(4, mx.bfloat16)}
    mx.save_safetensors(str(tmp_path / "x.safetensors"), tensors)
    index = {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
    config = {"model_type": "qwen3_5", "text_config": {"a": 1}}
    file, read_it, data = {
        "header": ("x.safetensors", check_file, None),
        "index": ("x.safetensors.index.json", read_weight_map, json.dumps(index)),
        "config": ("config.json", read_config, json.dumps(config)),
    }[kind]
    file = tmp_path / file
    data = file.read_bytes() if data is None else data.encode()
    lines = []
    for changed in mutations(data, 1500, len(kind)):
        if kind == "header":  # a length that fits, or the rest is never reached
            end = len(changed) - 32
            changed = max(0, end - 8).to_bytes(8, "little") + changed[8:]
        file.write_bytes(changed)
        try:
            found = read_it(file if kind == "header" else tmp_path)
        except ValueError as error:
            lines.append(str(error))
        else:
            if kind == "index":
                assert all("/" not in name for name in found.values())
    assert len(lines) > 500
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ('"a": {A}, "a": {A}', "stands twice"),
        ('"a": {A}, "b": {A}', "does not follow"),
        ('"a": {B}', "does not follow"),
    ],
)
def test_overlaps_and_holes(tmp_path, entries, words):
    parts = {"{A}": [0, 4], "{B}": [4, 8]}
    for name, offsets in parts.items():
        entry = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
        entries = entries.replace(name, json.dumps(entry))
    text = f"{{{entries}}}".encode()
    file = tmp_path / "x.safetensors"
    size = 8 if "[4, 8]" in entries else 4
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ValueError, match=words):
        check_file(file)


def test_file_names_stay_inside(tmp_path):
    raw = build(tmp_path / "raw")
    index = raw / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["x"] = "../x.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"names files elsewhere: \.\./x\.safe"):
        convert(raw, tmp_path / "out")


def test_bfloat16_bytes():
    values = mx.array([[1.5, -2.0], [3.0, 0.5]], mx.bfloat16).T
    want = np.array([0x3FC0, 0x4040, 0xC000, 0x3F00], np.uint16)
    assert bytes(stream._bytes(values)) == want.tobytes()
