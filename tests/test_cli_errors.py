"""Wrong input to ``generate.py``: one line that names the value and the way out."""

import importlib
import io
import sys
from pathlib import Path

import pytest
from broken import BROKEN, check_line, copy_of, drop_head
from checkpoints import build
from conftest import TEXT

from mlx_mtp.checkpoint import MTP_FILE
from mlx_mtp.generate_cli import main


@pytest.fixture
def refused(capsys):
    """Run the command with wrong input: one line on stderr, which is returned."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        out, err = capsys.readouterr()
        assert ended.value.code == 1
        assert out == ""
        assert err.startswith("error: ")
        assert err.endswith("\n")
        check_line(err[:-1])
        return err

    return run


@pytest.fixture
def good(oracle_dir, tmp_path) -> Path:
    return copy_of(oracle_dir, tmp_path / "good")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_directory(good, refused, name):
    break_directory, words = BROKEN[name]
    break_directory(good)
    error = refused("--model", str(good), "--mtp", "--prompt", "Q", "--json")
    for word in words:
        assert word in error


def test_raw_directory(refused, tmp_path):
    raw = build(tmp_path / "raw")
    for mtp in ([], ["--mtp"]):
        error = refused("--model", str(raw), "--prompt", "Q", *mtp)
        assert f"python convert.py --hf-path {raw} --mlx-path" in error


def test_missing_directory(refused):
    error = refused("--model", "/no/such/place", "--prompt", "Q")
    assert "/no/such/place is no directory" in error


def test_no_head(good, capsys, refused):
    drop_head(good)
    error = refused("--model", str(good), "--mtp", "--prompt", "Q")
    assert f"{good} has no MTP head" in error
    assert "leave --mtp out" in error
    main(["--model", str(good), "--prompt", "Q", "--ignore-chat-template"])
    assert TEXT in capsys.readouterr().out


def test_promised_head_is_not_needed_without_mtp(good, capsys):
    (good / MTP_FILE).unlink()
    main(["--model", str(good), "--prompt", "Q", "--ignore-chat-template"])
    assert TEXT in capsys.readouterr().out


@pytest.mark.parametrize("prompt", ["", "-"])
def test_empty_prompt(refused, monkeypatch, oracle_dir, prompt):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    error = refused("--model", str(oracle_dir), "--prompt", prompt)
    assert "the prompt is empty" in error


def test_chat_template_that_fails(good, refused):
    template = "{{ raise_exception('no system\\nmessage') }}"
    (good / "chat_template.jinja").write_text(template)
    error = refused("--model", str(good), "--prompt", "Q")
    assert "no system message" in error
    assert "--ignore-chat-template" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-draft-tokens", "9"], "0 to 8, or auto, not 9"),
        (["--num-draft-tokens", "-1"], "0 to 8, or auto, not -1"),
        (["--num-draft-tokens", "two"], "0 to 8, or auto, not two"),
        (["--max-tokens", "0"], "-1 for no limit, not 0"),
        (["--max-tokens", "-2"], "-1 for no limit, not -2"),
        (["--prefill-step-size", "0"], "1 or more, not 0"),
        (["--chat-template-config", "{"], "--chat-template-config"),
        (["--chat-template-config", "3"], "must be a JSON object, not 3"),
        (["--draft-model", "x"], "--draft-model"),
    ],
)
def test_usage(capsys, oracle_dir, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(oracle_dir), "--prompt", "Q", *arguments])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err.splitlines()[-1]


def test_prompt_is_required(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "--prompt" in capsys.readouterr().err


def test_ctrl_c(capsys, monkeypatch):
    def load(*args, **kwargs):
        raise KeyboardInterrupt

    module = importlib.import_module("mlx_mtp.generate_cli")
    monkeypatch.setattr(module, "load", load)
    with pytest.raises(SystemExit) as ended:
        main(["--prompt", "Q"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
