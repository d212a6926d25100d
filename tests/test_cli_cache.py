"""``generate.py --prompt-cache-file``: a conversation over several processes."""

import importlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from broken import check_line, copy_of
from checkpoints import END, chain

import mlx_mtp
from mlx_mtp.generate_cli import main

ROOT = Path(__file__).parent.parent
RAW = ["--ignore-chat-template", "--json", "-m", "12"]
cache_module = importlib.import_module("mlx_mtp.cache_file")
cli_module = importlib.import_module("mlx_mtp.generate_cli")


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "talk.safetensors"


@pytest.fixture
def command(capsys, random_dir, file):
    """Run the command here -> its JSON document."""

    def run(prompt: str, *options: str, path: Path = random_dir) -> dict:
        options = (*RAW, *options, "--prompt-cache-file", str(file))
        main(["--model", str(path), "--prompt", prompt, *options])
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    return run


def in_a_process(path: Path, *options: str) -> dict:
    done = subprocess.run(
        [sys.executable, "generate.py", "--model", str(path), *options],
        capture_output=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stderr == b""
    return json.loads(done.stdout)


def one_run(path: Path, ids: list[int]) -> list[int]:
    """Tokens behind ``ids``, in one run without a cache."""
    responses = mlx_mtp.stream_generate(
        *mlx_mtp.load(path), ids, mtp=False, max_tokens=12
    )
    return [response.token for response in responses]


@pytest.mark.parametrize("options", [[], ["--mtp"]])
def test_goes_on_in_another_process(command, random_dir, file, tmp_path, options):
    first = command("Once", *options)
    assert first["cached_tokens"] == 0
    ids = [*b"Once", *first["tokens"]]
    assert mlx_mtp.load_prompt_cache(file).tokens == ids
    more = ["--prompt", " upon", *RAW, *options, "--prompt-cache-file", str(file)]
    second = in_a_process(random_dir, *more)
    assert second["cached_tokens"] == len(ids)
    assert second["prompt_tokens"] == len(" upon")
    ids += b" upon"
    assert second["tokens"] == one_run(random_dir, ids)
    _, tokenizer = mlx_lm.load(str(random_dir))
    assert second["text"] == tokenizer.decode(second["tokens"])
    # What it loaded lazily from the file is in the new one.
    third = command("!", *options)
    assert third["tokens"] == one_run(random_dir, [*ids, *second["tokens"], ord("!")])
    assert os.listdir(tmp_path) == [file.name]


def test_chat_template(capsys, noisy_dir, file):
    """Behind a cache a turn goes on as the template would after the answer."""
    _, tokenizer = mlx_lm.load(str(noisy_dir))
    options = ["--model", str(noisy_dir), "--prompt-cache-file", str(file)]
    options += ["--json", "--mtp", "--system-prompt", "A <query>."]
    main([*options, "--prompt", "Hi", "-m", "3"])
    first = json.loads(capsys.readouterr().out)
    messages = [
        {"role": "system", "content": "A <query>."},
        {"role": "user", "content": "Hi"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids += first["tokens"]
    assert mlx_mtp.load_prompt_cache(file).tokens == ids
    main([*options, "--prompt", "Ho", "-m", "12"])
    second = json.loads(capsys.readouterr().out)
    tail = "<|im_end|>\n<|im_start|>user\nHo<|im_end|>\n<|im_start|>assistant\n"
    tail = tokenizer.encode(tail)
    assert second["prompt_tokens"] == len(tail)
    assert second["tokens"] == one_run(noisy_dir, ids + tail)


def test_the_end_token_of_an_answer_is_not_doubled(capsys, make_model_dir, file):
    succ = chain([ord("\n"), ord("a"), ord("b"), END])
    path = make_model_dir("answers ab", kind="noisy", succ=succ)
    capsys.readouterr()  # the converter's words
    options = ["--model", str(path), "--prompt-cache-file", str(file), "--json"]
    main([*options, "--prompt", "Hi", "-m", "300"])
    first = json.loads(capsys.readouterr().out)
    assert first["finish_reason"] == "stop"
    assert first["tokens"][-1] == END
    main([*options, "--prompt", "Ho", "-m", "5"])
    capsys.readouterr()
    held = mlx_mtp.load_prompt_cache(file).tokens
    assert (END, END) not in pairwise(held)
    assert held.count(END) == 4  # of two questions and two answers


def test_cache_without_head_goes_on_with_it(command, random_dir):
    first = command("Once")
    second = command("more", "--mtp")
    ids = [*b"Once", *first["tokens"], *b"more"]
    assert second["tokens"] == one_run(random_dir, ids)


class TestRefusals:
    @pytest.fixture
    def refused(self, capsys, random_dir, file):
        """One line on standard error -> that line."""

        def run(*options: str, path: Path = random_dir) -> str:
            options = (*RAW, "--prompt-cache-file", str(file), *options)
            with pytest.raises(SystemExit) as ended:
                main(["--model", str(path), "--prompt", "Q", *options])
            assert ended.value.code == 1
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith("error: ")
            check_line(err[:-1])
            return err

        return run

    def test_another_model(self, command, refused, random_dir, file, tmp_path):
        command("Q")
        before = file.read_bytes()
        other = copy_of(random_dir, tmp_path / "other")
        error = refused(path=other)
        assert f"{file} was made for {random_dir}, not for {other}" in error
        assert file.read_bytes() == before

    def test_the_same_model_by_another_path(self, command, random_dir, monkeypatch):
        command("Q")
        monkeypatch.chdir(random_dir.parent)
        assert command("Q", path=Path(random_dir.name))["cached_tokens"] == 13

    def test_unnamed_model(self, command, refused, file):
        command("Q")
        cache = mlx_mtp.load_prompt_cache(file)
        mlx_mtp.save_prompt_cache(file.with_stem("b"), cache)
        file.with_stem("b").rename(file)
        assert "made for an unnamed model" in refused()

    def test_no_prompt_cache(self, refused, file):
        mx.save_safetensors(str(file), {"a": mx.zeros(1)})
        assert "is no prompt cache" in refused()

    def test_truncated(self, command, refused, file):
        command("Q")
        file.write_bytes(file.read_bytes()[:-9])
        assert "truncated or corrupt" in refused()

    def test_template_without_the_text(self, command, capsys, random_dir, tmp_path):
        path = copy_of(random_dir, tmp_path / "deaf")
        command("Q", path=path)
        (path / "chat_template.jinja").write_text("Hello")
        file = str(tmp_path / "talk.safetensors")
        with pytest.raises(SystemExit):
            main(["--model", str(path), "-p", "Q", "--prompt-cache-file", file])
        error = capsys.readouterr().err
        check_line(error[:-1])
        assert "does not show earlier answers" in error

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("cache.bin", "must end in .safetensors"),
            ("no/such/a.safetensors", "must be a file in a directory"),
        ],
    )
    def test_usage(self, capsys, tmp_path, name, words):
        name = str(tmp_path / name)
        with pytest.raises(SystemExit) as ended:
            main(["--prompt", "Q", "--prompt-cache-file", name])
        assert ended.value.code == 2
        assert f"{words}, not {name}" in capsys.readouterr().err.splitlines()[-1]


class TestInterruptedSave:
    """The file stays as it was, and nothing lies beside it."""

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
    def test_save(self, command, capsys, monkeypatch, file, tmp_path, error):
        command("Q")
        before = file.read_bytes()

        def save(part, cache, metadata):
            Path(part).write_bytes(b"half")
            raise error("disk\nfull")

        monkeypatch.setattr(cache_module, "save_prompt_cache", save)
        with pytest.raises(SystemExit):
            command("Q")
        check_line(capsys.readouterr().err[:-1])
        assert file.read_bytes() == before
        assert os.listdir(tmp_path) == [file.name]

    def test_run(self, command, monkeypatch, file):
        command("Q")
        before = file.read_bytes()

        def responses(*args, **kwargs):
            yield from ()
            raise KeyboardInterrupt

        monkeypatch.setattr(cli_module, "stream_generate", responses)
        with pytest.raises(SystemExit) as ended:
            command("Q")
        assert ended.value.code == 130
        assert file.read_bytes() == before
