"""A conversation with ``mlx_mtp.chat``, driven from a list of lines."""

import importlib
from collections.abc import Callable
from pathlib import Path

import mlx_lm
from checks import assert_same_stream, plain_stream

from mlx_mtp.chat import main

chat_module = importlib.import_module("mlx_mtp.chat")
INTERRUPT = object()  # Ctrl-C instead of a line


class Session:
    """A conversation driven from a list of lines, and what the model was asked."""

    def __init__(self, monkeypatch, capsys, path: Path):
        self.capsys, self.path = capsys, path
        self.fed: list[list[int]] = []
        self.cached: list[list[int]] = []
        self.answers: list[list] = []
        self.hook: Callable = lambda turn, count: None
        self.progress: Callable = lambda turn, done: None
        self.right = chat_module.stream_generate
        monkeypatch.setattr(chat_module, "stream_generate", self.spy)
        monkeypatch.setattr("builtins.input", self.input)

    def spy(self, model, tokenizer, ids, *, prompt_progress_callback, **options):
        """``hook`` is called before each response; ``None`` means not begun."""
        turn, answer = len(self.fed), []
        self.fed.append(list(ids))
        self.cached.append(list(options["prompt_cache"].tokens))
        self.answers.append(answer)

        def progress(done, total):
            self.progress(turn, done)
            prompt_progress_callback(done, total)

        self.hook(turn, None)
        for response in self.right(
            model, tokenizer, ids, prompt_progress_callback=progress, **options
        ):
            self.hook(turn, -1 - len(answer))  # made, not yet handed on
            answer.append(response)
            yield response
            self.hook(turn, len(answer))

    def input(self, prompt: str) -> str:
        assert prompt == ">> "
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        if line is INTERRUPT:
            raise KeyboardInterrupt
        return line

    def run(self, *lines, options=()) -> str:
        self.lines = iter(lines)
        main(["--model", str(self.path), *options])
        out, err = self.capsys.readouterr()
        assert err == ""
        return out

    def text(self, turn: int) -> str:
        return "".join(response.text for response in self.answers[turn])

    def check_cold(self, turn: int, ids: list[int]) -> None:
        """The turn read ``ids`` and answered as stock mlx-lm does from nothing."""
        assert self.cached[turn] + self.fed[turn] == ids
        got = [(r.token, r.logprobs) for r in self.answers[turn]]
        assert_same_stream(got, plain_stream(self.path, ids, len(got)))

    def rendered(self, *contents: str, system: str | None = None) -> list[int]:
        """Stock mlx-lm's rendering of user, assistant, user …"""
        _, tokenizer = mlx_lm.load(str(self.path))
        messages = [] if system is None else [{"role": "system", "content": system}]
        for i, content in enumerate(contents):
            role = "assistant" if i % 2 else "user"
            messages.append({"role": role, "content": content})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
