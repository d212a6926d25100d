"""The command ``generate.py``: what it prints, and how it ends."""

import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest
from conftest import TEXT

import mlx_mtp
from mlx_mtp.generate_cli import main, parse, prompt_of

ROOT = Path(__file__).parent.parent
RAW_PROMPT = ["--prompt", "Q", "--ignore-chat-template"]
TWO_DRAFTS = ["--num-draft-tokens", "2"]
FIELDS = {
    *("text", "tokens", "finish_reason", "prompt_tokens", "generation_tokens"),
    *("prompt_tps", "generation_tps", "peak_memory", "mtp", "k", "num_drafts"),
    *("num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"),
    *("num_draft_tokens_per_pos", "num_outside_draft_vocabulary"),
    *("acceptance_rate", "mean_acceptance_length", "cached_tokens", "notes"),
}
SPEED_LINES = [
    r"Prompt: 1 tokens, \d+\.\d{3} tokens-per-sec",
    r"Generation: 9 tokens, \d+\.\d{3} tokens-per-sec",
    r"Peak memory: \d+\.\d{3} GB",
]


@pytest.fixture
def command(capsys, oracle_dir):
    """Run the command on the oracle -> standard output."""

    def run(*arguments: str) -> str:
        main(["--model", str(oracle_dir), *arguments])
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture(scope="module")
def tokenizer(oracle_dir):
    return mlx_mtp.load(oracle_dir)[1]


def check_lines(lines: list[str], patterns: list[str]) -> None:
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns):
        assert re.fullmatch(pattern, line)


class TestText:
    def test_without_mtp(self, command):
        lines = command(*RAW_PROMPT).splitlines()
        rule = "=" * 10
        check_lines(lines, [rule, TEXT, rule, *SPEED_LINES])

    def test_with_mtp(self, command):
        *lines, last = command(*RAW_PROMPT, "--mtp", *TWO_DRAFTS).splitlines()
        check_lines(lines[3:], SPEED_LINES)
        assert lines[1] == TEXT
        assert last == (
            "MTP: K = 2, 6 of 6 drafts accepted "
            "(rate 1.000; by position 1.00, 1.00), 3.00 tokens per round"
        )

    @pytest.mark.parametrize(
        ("options", "k"),
        [
            ([*TWO_DRAFTS, "--max-tokens", "1"], 2),
            (["--num-draft-tokens", "0"], 0),
            (["--max-tokens", "1"], 0),
        ],
    )
    def test_mtp_without_a_draft(self, command, options, k):
        last = command(*RAW_PROMPT, "--mtp", *options).splitlines()[-1]
        assert last == f"MTP: K = {k}, no drafts"

    def test_text_streams(self, monkeypatch, oracle_dir):
        class Recorder(io.StringIO):
            flushed = ()

            def flush(self):
                self.flushed += (self.getvalue(),)

        recorder = Recorder()
        monkeypatch.setattr(sys, "stdout", recorder)
        main(["--model", str(oracle_dir), *RAW_PROMPT, "--mtp", *TWO_DRAFTS])
        texts = [text.removeprefix("=" * 10 + "\n") for text in recorder.flushed]
        for begun in ("a", "aé", "aé🙂", "aé🙂b"):
            assert begun in texts

    def test_verbose_generate_prints_the_same(self, capsys, oracle_dir):
        loaded = mlx_mtp.load(oracle_dir)
        mlx_mtp.generate(*loaded, "Q", verbose=True, num_draft_tokens=2)
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == TEXT
        assert lines[-1].startswith("MTP: K = 2, 6 of 6 drafts accepted")
        options = {"verbose": True, "mtp": False}
        assert mlx_mtp.generate(*mlx_mtp.load(oracle_dir), "Q", **options) == TEXT
        assert "MTP" not in capsys.readouterr().out


class TestJson:
    def test_with_mtp(self, command, oracle_dir):
        out = command(*RAW_PROMPT, "--mtp", "--num-draft-tokens", "3", "--json")
        document = json.loads(out)
        assert out.count("\n") == 1
        assert document.keys() == FIELDS
        *_, last = responses = list(
            mlx_mtp.stream_generate(*mlx_mtp.load(oracle_dir), "Q", num_draft_tokens=3)
        )
        assert document["text"] == TEXT
        assert document["tokens"] == [response.token for response in responses]
        for name in ("finish_reason", "prompt_tokens", "generation_tokens"):
            assert document[name] == getattr(last, name)
        for name in ("prompt_tps", "generation_tps", "peak_memory"):
            assert document[name] > 0
        assert (document["mtp"], document["k"]) == (True, 3)
        assert document["num_drafts"] == 2
        assert document["num_draft_tokens"] == 6
        assert document["num_accepted_tokens"] == 6
        assert document["num_accepted_tokens_per_pos"] == [2, 2, 2]
        assert document["acceptance_rate"] == 1
        assert document["mean_acceptance_length"] == 4
        assert document["notes"] == []

    def test_without_mtp(self, command):
        document = json.loads(command(*RAW_PROMPT, "--json", "-m", "4"))
        assert document.keys() == FIELDS
        assert document["finish_reason"] == "length"
        assert document["generation_tokens"] == len(document["tokens"]) == 4
        assert (document["mtp"], document["k"]) == (False, 0)
        assert document["num_accepted_tokens_per_pos"] == []
        names = [n for n in FIELDS if n.startswith("num_") and "per" not in n]
        names += ["acceptance_rate", "mean_acceptance_length"]
        assert {document[name] for name in names} == {0}

    def test_nothing_else_on_stdout(self, command, monkeypatch):
        """mlx-lm warns there of a model that nearly fills the memory."""
        stream_generate = mlx_mtp.stream_generate

        def warning(*args, **kwargs):
            for response in stream_generate(*args, **kwargs):
                print("[WARNING] nearly full", file=sys.stdout)
                yield response

        module = importlib.import_module("mlx_mtp.generate_cli")
        monkeypatch.setattr(module, "stream_generate", warning)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert json.loads(command(*RAW_PROMPT, "--json"))["text"] == TEXT


class TestPrompt:
    def ids(self, tokenizer, *arguments: str) -> list[int]:
        return prompt_of(parse(arguments), tokenizer)

    def test_chat_template(self, tokenizer, oracle_dir):
        _, stock = mlx_lm.load(str(oracle_dir))
        messages = [{"role": "user", "content": "Hi"}]
        want = stock.apply_chat_template(messages, add_generation_prompt=True)
        assert self.ids(tokenizer, "--prompt", "Hi") == want
        assert tokenizer.decode(want).count("<|im_start|>") == 2
        messages.insert(0, {"role": "system", "content": "Be brief."})
        want = stock.apply_chat_template(messages, add_generation_prompt=True)
        got = self.ids(tokenizer, "-p", "Hi", "--system-prompt", "Be brief.")
        assert got == want

    def test_chat_template_config(self, tokenizer):
        config = '{"add_generation_prompt": false}'
        got = self.ids(tokenizer, "-p", "Hi", "--chat-template-config", config)
        assert tokenizer.decode(got) == "<|im_start|>user\nHi<|im_end|>\n"

    def test_ignore_chat_template(self, tokenizer):
        got = self.ids(tokenizer, "-p", "Hi", "--ignore-chat-template")
        assert got == tokenizer.encode("Hi") == [ord("H"), ord("i")]

    def test_escapes(self, tokenizer):
        got = self.ids(tokenizer, "-p", r"a\n\tb", "--ignore-chat-template")
        assert bytes(got) == b"a\n\tb"

    def test_standard_input(self, tokenizer, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\\n\nb"))
        got = self.ids(tokenizer, "-p", "-", "--ignore-chat-template")
        assert bytes(got) == b"a\\n\nb"


class TestProcess:
    """In a process of its own, as a user runs it."""

    def run(self, line: str, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
            capture_output=True,
            check=False,
            **options,
        )

    def test_prompt_from_stdin(self, oracle_dir):
        options = "--prompt - --ignore-chat-template --mtp --json"
        done = self.run(
            f"$PYTHON generate.py --model '{oracle_dir}' {options}", input=b"Q"
        )
        assert done.stderr == b""
        assert done.returncode == 0
        assert json.loads(done.stdout)["text"] == TEXT

    def test_reader_that_leaves(self, random_dir):
        options = "--prompt Q --mtp --max-tokens 100"
        command = f"$PYTHON generate.py --model '{random_dir}' {options}"
        done = self.run(command + " | head -c 1; exit ${PIPESTATUS[0]}")
        assert done.stdout == b"="
        assert done.stderr == b""
        assert done.returncode == 1

    def test_error(self, tmp_path):
        done = self.run(f"$PYTHON generate.py --model '{tmp_path}' --prompt Q")
        assert done.returncode == 1
        assert done.stdout == b""
        assert done.stderr.decode() == (
            f"error: {tmp_path} has no config.json; is it a checkpoint's directory?\n"
        )


def test_installed_command():
    """The name in pyproject.toml; ``mlx_mtp.generate`` the attribute is a function."""
    module = importlib.import_module("mlx_mtp.generate")
    assert module is sys.modules["mlx_mtp.generate"]
    assert module.generate is mlx_mtp.generate
    assert callable(module.main)
