"""The converter's files: headers, marker, staging, and the command."""

import importlib
import io
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import build
from converting import config_of

from mlx_mtp.checkpoint import read_marker
from mlx_mtp.convert_cli import main
from mlx_mtp.models.qwen3_5 import Qwen35
from mlx_mtp.safetensors_check import check_file
from mlx_mtp.staging import progress, staged

CONVERT = importlib.import_module("mlx_mtp.convert")


@pytest.fixture
def raw(tmp_path) -> Path:
    return build(tmp_path / "raw")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_bad_header(tmp_path, header):
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"x\.safetensors is truncated or corrupt"):
        check_file(file)


def test_good_header(tmp_path):
    file = str(tmp_path / "x.safetensors")
    mx.save_safetensors(file, {"a": mx.zeros((2, 3), mx.bfloat16)}, {"format": "mlx"})
    header = check_file(file)
    assert header.metadata == {"format": "mlx"}
    assert (header.tensors["a"].dtype, header.tensors["a"].shape) == ("BF16", (2, 3))


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (RuntimeError("[write] Unable\nto write"), 1, "[write] Unable to write"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["full disk", "mlx error", "Ctrl-C"],
)
def test_interrupted_conversion_leaves_nothing(
    capsys, raw, tmp_path, monkeypatch, raised, code, message
):
    seen = []

    def fail(directory, *args):
        seen.extend(Path(directory).iterdir())
        raise raised

    monkeypatch.setattr(CONVERT, "write_target", fail)
    with pytest.raises(SystemExit) as ended:
        main(["--hf-path", str(raw), "--mlx-path", str(tmp_path / "a" / "b")])
    assert ended.value.code == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [file.name for file in seen] == ["mtp.safetensors"]
    assert [file.name for file in tmp_path.iterdir()] == ["raw"]


def test_other_errors_are_not_hidden(raw, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(CONVERT, "write_target", fail)
    with pytest.raises(ZeroDivisionError):
        main(["--hf-path", str(raw), "--mlx-path", str(tmp_path / "out")])
    assert [file.name for file in tmp_path.iterdir()] == ["raw"]


def test_target_that_appears_meanwhile_is_kept(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(ValueError, match="already exists"), staged(target):
        target.mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_command_as_a_user_calls_it(raw, tmp_path):
    script, out = Path(__file__).parents[1] / "convert.py", tmp_path / "out"
    options = ["--hf-path", raw, "--mlx-path", out, "-q", "--q-bits", "8"]
    command = [sys.executable, script, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert config_of(out)["quantization"]["bits"] == 8


def test_source_is_required(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "--hf-path" in capsys.readouterr().err


def test_progress_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress(2000) as report:
        report(1000)
        report(1000)
    assert "2.00k/2.00k" in sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"family": "glm4_moe"}, "mtp.family is 'glm4_moe'"),
        ({"hidden": "no_norm"}, "mtp.hidden is 'no_norm'"),
        ({"num_modules": 3}, "mtp.num_modules is 3"),
        ({"quantization": {"bits": 4}}, "mtp.quantization is"),
        ({"quantization": 4}, "mtp.quantization is"),
    ],
    ids=str,
)
def test_marker_that_does_not_fit(change, words):
    marker = {"format": 1, "family": Qwen35.spec.family, "num_modules": 1}
    marker |= {"hidden": Qwen35.spec.hidden, "quantization": None} | change
    with pytest.raises(ValueError, match=re.escape(words)):
        read_marker({"model_type": "qwen3_5", "mtp": marker})
    with pytest.raises(ValueError, match="'mtp' is 3"):
        read_marker({"model_type": "qwen3_5", "mtp": 3})
