"""Directories that must not load: what breaks a good one, and what the error says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from byte_tokenizer import VOCAB_SIZE
from converting import edit_config, read

from mlx_mtp.checkpoint import MARKER, MTP_FILE

MODEL_FILE = "model.safetensors"

Break = Callable[[Path], None]


def copy_of(source: Path, target: Path) -> Path:
    return shutil.copytree(source, target)


def config(edit: Callable[[dict], object]) -> Break:
    return lambda path: edit_config(path, edit)


def text_config(**values: object) -> Break:
    return config(lambda c: c["text_config"].update(values))


def tensors(file: str, edit: Callable[[dict[str, mx.array]], object]) -> Break:
    def change(path: Path) -> None:
        weights = read(path, file)
        mx.eval(weights)
        edit(weights)
        mx.save_safetensors(str(path / file), weights, metadata={"format": "mlx"})

    return change


def head(edit: Callable[[dict[str, mx.array]], object]) -> Break:
    return tensors(MTP_FILE, edit)


def remove(*names: str) -> Break:
    return lambda path: [(path / name).unlink() for name in names] and None


def content(name: str, change: Callable[[bytes], bytes]) -> Break:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def drop_head(path: Path) -> None:
    """What mlx-lm's own converter makes of the checkpoint."""
    edit_config(path, lambda c: c.pop(MARKER))
    (path / MTP_FILE).unlink()


def another_header(data: bytes) -> bytes:
    """A header of the same length that says another size."""
    start, rest = data[:8], data[8:]
    return start + rest.replace(b'"shape":[', b'"shape":[9', 1)[: len(rest)]


AGAIN = "convert the original again: python convert.py --hf-path"
RESTORE = "download or copy it again"
TOKENIZER = "download the original's tokenizer files"

BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    "head tensor missing": (
        head(lambda w: w.pop("mtp.fc.weight")),
        (MTP_FILE, "lacks 1 tensor(s): fc.weight", AGAIN),
    ),
    "all head tensors missing": (
        head(lambda w: [w.pop(name) for name in list(w)[1:]]),
        (MTP_FILE, "lacks 14 tensor(s): ", AGAIN),
    ),
    "head tensor unknown": (
        head(lambda w: w.update({"mtp.layers.1.norm.weight": mx.zeros(3)})),
        ("holds unknown 1 tensor(s): layers.1.norm.weight", AGAIN),
    ),
    "head tensor of a wrong shape": (
        head(lambda w: w.update({"mtp.norm.weight": mx.ones(7)})),
        (f"norm.weight is (7,), not ({VOCAB_SIZE},)", AGAIN),
    ),
    "head tensor transposed": (
        head(lambda w: w.update({"mtp.fc.weight": w["mtp.fc.weight"].T})),
        ("fc.weight is (576, 288), not (288, 576)", AGAIN),
    ),
    "head scales without packed weight": (
        head(lambda w: w.update({"mtp.fc.scales": mx.zeros((288, 9))})),
        (MTP_FILE, "cannot be loaded", AGAIN),
    ),
    "head file missing": (
        remove(MTP_FILE),
        ("promises an MTP head", f"{MTP_FILE} is missing", AGAIN),
    ),
    "head file without marker": (
        config(lambda c: c.pop(MARKER)),
        (MTP_FILE, "not marked in config.json", AGAIN),
    ),
    "head file truncated": (
        content(MTP_FILE, lambda data: data[:-100]),
        (MTP_FILE, "truncated or corrupt", RESTORE),
    ),
    "head file empty": (content(MTP_FILE, lambda data: b""), (MTP_FILE, RESTORE)),
    "model file truncated": (
        content(MODEL_FILE, lambda data: data[: len(data) // 2]),
        (MODEL_FILE, "truncated or corrupt", RESTORE),
    ),
    "model file without a header": (
        content(MODEL_FILE, lambda data: b"\xff" * 100),
        (MODEL_FILE, "truncated or corrupt", RESTORE),
    ),
    "model file with a false header": (
        content(MODEL_FILE, another_header),
        (MODEL_FILE, "truncated or corrupt", RESTORE),
    ),
    "model file is a Git LFS pointer": (
        content(MODEL_FILE, lambda data: b"version https://git-lfs.github.com/spec/v1"),
        (MODEL_FILE, "Git LFS pointer", RESTORE),
    ),
    "model file missing": (remove(MODEL_FILE), ("holds no model*.safetensors",)),
    "model tensor missing": (
        tensors(MODEL_FILE, lambda w: w.pop("language_model.lm_head.weight")),
        ("cannot be loaded", "language_model.lm_head.weight", AGAIN),
    ),
    "marker of another format": (
        config(lambda c: c[MARKER].update(format=2)),
        ("format 2", "format 1", "convert the original again"),
    ),
    "marker of another stage": (
        config(lambda c: c[MARKER].update(hidden="no_norm")),
        ("mtp.hidden is 'no_norm'", "convert the original again"),
    ),
    "config.json missing": (remove("config.json"), ("has no config.json",)),
    "config.json broken": (
        content("config.json", lambda data: data[:-30]),
        ("config.json cannot be read",),
    ),
    "config.json is a list": (
        content("config.json", lambda data: b"[]"),
        ("config.json",),
    ),
    "model_type unknown": (
        config(lambda c: c.update(model_type="llama")),
        ("'llama' is not supported", "qwen3_5"),
    ),
    "sizes of another model": (
        text_config(vocab_size=10),
        ("cannot be loaded", "(10, 288)", AGAIN),
    ),
    "size is no number": (
        text_config(hidden_size="64"),
        ("cannot be loaded", "TypeError", AGAIN),
    ),
    "quantization is no object": (
        config(lambda c: c.update(quantization="4")),
        ("cannot be loaded", AGAIN),
    ),
    "tokenizer missing": (
        remove("tokenizer.json", "tokenizer_config.json"),
        ("has no usable tokenizer", TOKENIZER),
    ),
    "tokenizer without its vocabulary": (
        remove("tokenizer.json"),
        ("has no usable tokenizer", TOKENIZER),
    ),
    "tokenizer broken": (
        content("tokenizer.json", lambda data: data[:-30]),
        ("cannot be loaded", TOKENIZER),
    ),
}


def check_line(message: str, *words: str) -> None:
    """One line that holds every word."""
    assert message == message.strip()
    assert "\n" not in message
    for word in words:
        assert word in message


def index_head(path: Path) -> None:
    """Name the head's file in the index, as other converters do."""
    index = path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] |= dict.fromkeys(read(path, MTP_FILE), MTP_FILE)
    index.write_text(json.dumps(data))
