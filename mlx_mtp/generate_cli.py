"""``python generate.py``: flags of mlx-lm's command, plus ``--mtp`` and ``--json``."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .cache_file import cache_file, load_cache, save_cache
from .cli import one_line, run
from .draft_memory import AUTO, MAX_DRAFT_TOKENS, NumDraftTokens
from .generate import stream_generate
from .generate_step import (
    KV_GROUP_SIZE,
    MAX_TOKENS,
    NUM_DRAFT_TOKENS,
    PREFILL_STEP_SIZE,
    QUANTIZED_KV_START,
    check_num_draft_tokens,
)
from .load import DEMO_PATH, load
from .models.heads import reuse_note
from .prompt_cache import make_prompt_cache
from .response import GenerationResponse, print_stream
from .sampling import ACCEPTANCE, SamplingParams

ANSWER = "⟦answer⟧"  # stands for an answer while the template is read


def num_draft_tokens(text: str) -> NumDraftTokens:
    try:
        return text if text == AUTO else check_num_draft_tokens(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 0 to {MAX_DRAFT_TOKENS}, or {AUTO}, not "
            f"{text}"
        ) from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def max_tokens(text: str) -> int:
    if text == "-1" or (text.isdecimal() and int(text) > 0):
        return int(text)
    raise argparse.ArgumentTypeError(
        f"must be 1 or more, or -1 for no limit, not {text}"
    )


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text}")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py", description="Generate text, with multi-token prediction."
    )
    add_common(parser)
    parser.add_argument(
        "--mtp", action="store_true", help="draft with the model's MTP head"
    )
    parser.add_argument(
        "--prompt", "-p", required=True, help="the prompt; '-' reads standard input"
    )
    parser.add_argument(
        "--prompt-cache-file",
        type=cache_file,
        metavar="FILE",
        help="the text before the prompt, computed already: the prompt goes on behind "
        "it, and FILE then holds prompt and output as well; made if there is none",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else"
    )
    args = parser.parse_args(argv)
    if args.draft_model is not None and not args.mtp:
        parser.error("--draft-model drafts, so it needs --mtp")
    return args


def add_common(parser: argparse.ArgumentParser) -> None:
    """Flags of ``generate.py`` and ``mlx_mtp.chat``."""
    parser.add_argument(
        "--model",
        default=str(DEMO_PATH),
        help="directory written by convert.py, or a Hugging Face repository of that "
        "form; default: the tiny demo model in the package",
    )
    parser.add_argument(
        "--draft-model",
        metavar="PATH",
        help="for Gemma 4: its assistant, a directory or a Hugging Face repository",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=num_draft_tokens,
        default=NUM_DRAFT_TOKENS,
        metavar="K",
        help=f"drafts per round with MTP, 0 to {MAX_DRAFT_TOKENS}; {AUTO} chooses the "
        "fastest, round by round (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=max_tokens,
        default=MAX_TOKENS,
        help="tokens to generate at most, -1 for no limit (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="use the raw prompt without the tokenizer's chat template",
    )
    parser.add_argument("--system-prompt", help="system message of the chat template")
    parser.add_argument(
        "--chat-template-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="more arguments of the chat template, such as "
        "'{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--prefill-step-size",
        type=positive,
        default=PREFILL_STEP_SIZE,
        help="prompt tokens per prefill chunk (default: %(default)s)",
    )
    add_kv_cache(parser)
    add_sampling(parser)


def add_kv_cache(parser: argparse.ArgumentParser) -> None:
    """mlx-lm's flags for a quantised KV cache."""
    group = parser.add_argument_group("KV cache")
    for name, default, text in (
        ("kv-bits", None, "quantise the KV cache to this many bits"),
        ("kv-group-size", KV_GROUP_SIZE, "values that share a scale"),
        ("quantized-kv-start", QUANTIZED_KV_START, "positions before it is quantised"),
    ):
        group.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Flags of the sampling parameters, penalties and stops; defaults are the API's."""
    defaults = SamplingParams()
    sampling = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("temp", float, "temperature; 0 takes the most likely token"),
        ("top_p", float, "keep the most likely tokens up to this mass"),
        ("top_k", int, "keep this many tokens; 0 keeps all"),
        ("min_p", float, "drop tokens below this share of the likeliest one's"),
        ("min_tokens_to_keep", int, "tokens that min-p always keeps"),
        ("xtc_probability", float, "chance of XTC at a token"),
        ("xtc_threshold", float, "probability above which XTC drops, 0 to 0.5"),
        ("seed", int, "seed of all random numbers; None draws one"),
    ):
        sampling.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(defaults, name),
            help=f"{text} (default: %(default)s)",
        )
    sampling.add_argument(
        "--acceptance",
        choices=ACCEPTANCE,
        default=defaults.acceptance,
        help="how sampled drafts are judged; 'coupled' gives the same text for a seed "
        "with and without --mtp (default: %(default)s)",
    )
    for name in ("repetition", "presence", "frequency"):
        sampling.add_argument(
            f"--{name}-penalty", type=float, help=f"mlx-lm's {name} penalty"
        )
    stops = parser.add_argument_group("stops")
    stops.add_argument(
        "--stop",
        action="append",
        type=unescape,
        metavar="TEXT",
        help="end the text before TEXT; may be given several times",
    )
    stops.add_argument(
        "--extra-eos-token",
        nargs="+",
        default=(),
        metavar="TOKEN",
        help="more end tokens",
    )


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of ``stream_generate`` among the flags."""
    names = (
        *("temp", "top_p", "top_k", "min_p", "min_tokens_to_keep"),
        *("xtc_probability", "xtc_threshold", "seed", "acceptance"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop"),
    )
    return {name: getattr(args, name) for name in names}


def render(
    args: argparse.Namespace,
    tokenizer: TokenizerWrapper,
    messages: Sequence[dict[str, str]],
    answer_follows: bool = True,
) -> str:
    """What the chat template makes of the system prompt and some messages."""
    if args.system_prompt is not None:
        messages = [{"role": "system", "content": args.system_prompt}, *messages]
    options = {"add_generation_prompt": answer_follows} | args.chat_template_config
    try:
        return tokenizer.apply_chat_template([*messages], tokenize=False, **options)
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"the chat template fails ({one_line(error)}); change --system-prompt and "
            "--chat-template-config, or use --ignore-chat-template"
        ) from error


def add_end_tokens(tokenizer: TokenizerWrapper, tokens: Sequence[str]) -> None:
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            raise ValueError(
                f"--extra-eos-token {token!r} is no token of this model; --stop takes "
                "any text"
            )
        tokenizer.add_eos_token(token)


def unescape(text: str) -> str:
    """``\\n`` and ``\\t`` as in mlx-lm's command."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def read_stdin() -> str:
    if sys.stdin is None:
        raise ValueError("standard input is closed; give the prompt with --prompt")
    return sys.stdin.read()


def prompt_of(
    args: argparse.Namespace,
    tokenizer: TokenizerWrapper,
    *,
    behind: Sequence[int] = (),
) -> list[int]:
    """The prompt's ids: escapes, standard input and chat template as in mlx-lm.

    Args:
        behind: the ids in a prompt cache, which end with an answer or within one.
    """
    text = unescape(args.prompt)
    try:
        text = read_stdin() if text == "-" else text
        text.encode()  # undecodable bytes of the shell come as surrogates
    except UnicodeError as error:
        raise ValueError(f"the prompt is not valid UTF-8 ({error})") from error
    if not text:
        raise ValueError("the prompt is empty; give some text with --prompt")
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(text, add_special_tokens=not behind)
    question = {"role": "user", "content": text}
    if not behind:
        whole = render(args, tokenizer, [question])
        return tokenizer.encode(whole, add_special_tokens=False)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    _, found, rest = render(args, tokenizer, [*turns, question]).partition(ANSWER)
    if not found:
        raise ValueError(
            "the chat template does not show earlier answers, so a turn cannot go on "
            "behind a prompt cache; use --ignore-chat-template"
        )
    ids = tokenizer.encode(rest, add_special_tokens=False)
    # The answer's end token may be in the cache already.
    return ids[1:] if ids[:1] == list(behind[-1:]) else ids


def generate_from_args(args: argparse.Namespace) -> None:
    file, cache = args.prompt_cache_file, None
    if file and file.exists():
        cache = load_cache(file, args.model)
    model, tokenizer = load(args.model, mtp=args.mtp, draft_model=args.draft_model)
    if args.mtp and model.mtp is None:
        raise ValueError(
            f"{args.model} has no MTP head; convert the original with convert.py, or "
            "leave --mtp out"
        )
    if note := reuse_note(model.mtp, args.num_draft_tokens):
        print(f"Note: {note}", file=sys.stderr)
    add_end_tokens(tokenizer, args.extra_eos_token)
    prompt = prompt_of(args, tokenizer, behind=cache.tokens if cache else ())
    if file and cache is None:
        cache = make_prompt_cache(model)
    cached_tokens = len(cache.tokens) if file else 0
    responses = stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=args.max_tokens,
        mtp=args.mtp,
        num_draft_tokens=args.num_draft_tokens,
        prefill_step_size=args.prefill_step_size,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
        prompt_cache=cache,
        **options_of(args),
    )
    if args.json:
        print_json(responses, args, cached_tokens)
    else:
        print_stream(responses, mtp=args.mtp)
    if file:
        save_cache(file, cache, args.model)


def print_json(
    responses: Iterable[GenerationResponse],
    args: argparse.Namespace,
    cached_tokens: int,
) -> None:
    texts, tokens = [], []
    # mlx-lm prints a warning where a model nearly fills the memory.
    with contextlib.redirect_stdout(sys.stderr):
        for last in responses:  # each holds log-probabilities: kept one at a time
            texts.append(last.text)
            tokens.append(last.token)
    document = {
        "text": "".join(texts),
        "tokens": tokens,
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": cached_tokens,
        "generation_tokens": last.generation_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "peak_memory": last.peak_memory,
        "mtp": args.mtp,
        "k": args.num_draft_tokens if args.mtp else 0,
        **last.stats.as_dict(),
    }
    print(json.dumps(document))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    run(lambda: generate_from_args(args))
