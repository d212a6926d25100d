"""``mlx_mtp.chat``: a conversation in the terminal, its prompt cache kept over turns.

The whole conversation is rendered for every turn, so that its text is the chat
template's, and what the prompt cache holds of it is not computed again. Templates that
rewrite earlier turns (most drop the thinking of an answer) make the end of the cache
useless; for them a second cache stands where the answer began, and only the answer, as
the template now has it, is run again.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .cli import run
from .generate import stream_generate
from .generate_cli import add_common, options_of, render
from .generate_step import extend_prompt_cache
from .load import load
from .prompt_cache import PromptCache, make_prompt_cache
from .response import GenerationResponse, acceptance_line
from .sampling import choice
from .stop import check_stop

PROMPT = ">> "
HELP = "commands: q exit, r reset, s figures of the last turn, h help"


class Interrupts:
    """Ctrl-C that waits for a place where the caches are whole; a second does not.

    Attributes:
        count: how often Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt

    def check(self, *progress: int) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed; a progress callback."""
        if self.count:
            raise KeyboardInterrupt


@dataclass
class Turn:
    """One answer, and what it took.

    Args:
        cached: tokens in the cache before the turn.
        reused: as many of them as the turn began with.
        computed: tokens of the conversation that were run before the answer.
        texts: the parts of the answer as they were shown.
        tokens: the ids of the answer.
        last: the last response, or None where there was none.
        interrupted: by Ctrl-C.
    """

    cached: int
    reused: int
    computed: int
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    last: GenerationResponse | None = None
    interrupted: bool = False

    def figures(self, mtp: bool) -> str:
        """Acceptance and use of the cache, a line each."""
        if not mtp:
            line = "MTP: off"
        else:
            line = acceptance_line(self.last.stats) if self.last else "MTP: no drafts"
        return (
            f"{line}\n"
            f"Cache: {self.cached} tokens before the turn, {self.reused} reused, "
            f"{self.computed} computed"
        )


class Conversation:
    """Messages, and a prompt cache that follows them.

    Args:
        args: of the command line.
        model: from :func:`mlx_mtp.load`.
        tokenizer: from :func:`mlx_mtp.load`.
    """

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, tokenizer: TokenizerWrapper
    ):
        self.args, self.model, self.tokenizer = args, model, tokenizer
        self.mtp = model.mtp is not None
        self.templated = tokenizer.has_chat_template and not args.ignore_chat_template
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []  # of the conversation where there is no template
        self.cache = make_prompt_cache(self.model)
        self.before_answer: PromptCache | None = None
        self.turn: Turn | None = None

    def ask(self, text: str, show: Callable[[str], Any]) -> Turn:
        """Answer a message; Ctrl-C ends the answer, which stands as it was shown."""
        question = {"role": "user", "content": text}
        ids = self._ids_with(question)
        turn = self._begin(ids)
        with Interrupts() as interrupts:
            try:
                self._stand_before_answer(question, ids, interrupts)
                rest = ids[len(self.cache.tokens) :]
                self._answer(rest, turn, show, interrupts)
            except KeyboardInterrupt:
                turn.interrupted = True
            self.cache.release()
            held, known = self.cache.tokens, ids + turn.tokens
            # A second Ctrl-C can hit the engine while it leaves the cache.
            if interrupts.count > 1 or known[: len(held)] != held:
                self.cache = make_prompt_cache(self.model)
        if not turn.tokens:  # the prompt may not have been run to its end
            turn.computed = max(0, len(held) - turn.reused)
        answer = {"role": "assistant", "content": "".join(turn.texts)}
        self.messages += [question, answer]
        self.ids, self.turn = known, turn
        return turn

    def _ids_with(self, question: dict[str, str]) -> list[int]:
        """The whole conversation as the model reads it, up to the answer."""
        if self.templated:
            text = render(self.args, self.tokenizer, [*self.messages, question])
            return self.tokenizer.encode(text, add_special_tokens=False)
        first = not self.ids
        text = question["content"]
        return self.ids + self.tokenizer.encode(text, add_special_tokens=first)

    def _begin(self, ids: list[int]) -> Turn:
        """Use the cache that holds most of the beginning of ``ids``, or an empty one.

        The last one does not where the template rewrites earlier turns, or where ids of
        the answer are not those of its text.
        """
        cached = len(self.cache.tokens)
        if not self._begins(self.cache, ids):
            before, self.cache = self.before_answer, make_prompt_cache(self.model)
            if before is not None and self._begins(before, ids):
                self.cache = before
        self.before_answer = None
        reused = len(self.cache.tokens)
        return Turn(cached, reused, len(ids) - reused)

    @staticmethod
    def _begins(cache: PromptCache, ids: list[int]) -> bool:
        size = len(cache.tokens)
        return size < len(ids) and ids[:size] == cache.tokens

    def _rewrites(self, question: dict[str, str]) -> bool:
        """Whether the template changes a turn once another one follows."""
        begun = render(self.args, self.tokenizer, [question])
        answer = {"role": "assistant", "content": "x"}
        later = render(self.args, self.tokenizer, [question, answer, question])
        return not later.startswith(f"{begun}x")

    def _stand_before_answer(
        self, question: dict[str, str], ids: list[int], interrupts: Interrupts
    ) -> None:
        """Keep a cache of what later turns will still begin with, if need be."""
        if not self.templated or not self._rewrites(question):
            return
        text = render(self.args, self.tokenizer, [*self.messages, question], False)
        lasting = self.tokenizer.encode(text, add_special_tokens=False)
        size = len(self.cache.tokens)
        if not size < len(lasting) < len(ids) or ids[: len(lasting)] != lasting:
            return
        extend_prompt_cache(
            lasting[size:],
            self.model,
            self.cache,
            mtp=self.mtp,
            prefill_step_size=self.args.prefill_step_size,
            prompt_progress_callback=interrupts.check,
        )
        self.before_answer = self.cache.copied()

    def _answer(
        self,
        ids: list[int],
        turn: Turn,
        show: Callable[[str], Any],
        interrupts: Interrupts,
    ) -> None:
        responses = stream_generate(
            self.model,
            self.tokenizer,
            ids,
            max_tokens=self.args.max_tokens,
            mtp=self.mtp,
            num_draft_tokens=self.args.num_draft_tokens,
            prefill_step_size=self.args.prefill_step_size,
            prompt_progress_callback=interrupts.check,
            prompt_cache=self.cache,
            **options_of(self.args),
        )
        with contextlib.closing(responses):
            for response in responses:
                turn.last = response
                turn.tokens.append(response.token)
                turn.texts.append(response.text)
                show(response.text)
                interrupts.check()


def end_line(turn: Turn) -> str:
    """Speeds of a turn, as mlx-lm's chat shows them."""
    parts = ["interrupted"] if turn.interrupted else []
    if turn.last is not None:
        parts += [
            f"{turn.last.generation_tokens} tokens",
            f"{turn.last.generation_tps:.1f} tok/s",
            f"prompt {turn.last.prompt_tps:.1f} tok/s",
            f"peak {turn.last.peak_memory:.2f} GB",
        ]
    return f"[{', '.join(parts)}]"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp.chat", description="Chat, with multi-token prediction."
    )
    add_common(parser)
    parser.add_argument(
        "--no-mtp",
        action="store_true",
        help="leave the model's MTP head, if it has one, unused",
    )
    return parser.parse_args(argv)


def chat_from_args(args: argparse.Namespace) -> None:
    options = options_of(args)
    check_stop(options.pop("stop"))
    choice(1, **options)  # refuses a wrong value before the model is loaded
    model, tokenizer = load(
        args.model, mtp=not args.no_mtp, draft_model=args.draft_model
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    conversation = Conversation(args, model, tokenizer)
    on = f"MTP with K = {args.num_draft_tokens}" if conversation.mtp else "no MTP"
    print(f"{args.model}, {on}\n{HELP}")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits and recalls lines)
    try:
        converse(conversation)
    except (EOFError, KeyboardInterrupt):  # at the prompt
        print()


def converse(conversation: Conversation) -> None:
    """Read and answer lines until ``q``, or an EOFError of ``input``."""
    while (line := input(PROMPT)) != "q":
        if line == "r":
            conversation.reset()
            print("[reset]")
        elif line == "h":
            print(HELP)
        elif line == "s":
            turn = conversation.turn
            print(turn.figures(conversation.mtp) if turn else "no turn yet")
        elif line.strip():
            turn = conversation.ask(line, lambda text: print(text, end="", flush=True))
            print(f"\n{end_line(turn)}")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    run(lambda: chat_from_args(args))


if __name__ == "__main__":
    main()
