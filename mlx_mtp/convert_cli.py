"""The command ``convert``; flags are named as mlx-lm's, a mistake is one line."""

import argparse
from collections.abc import Sequence

from mlx_lm.convert import QUANT_RECIPES

from .cli import run, terminable
from .convert import DEFAULT_MLX_PATH, DTYPES, convert
from .head_source import NORMS
from .quantization import DEFAULT_MODE, MODES, make_plan

PLANNED = (
    "quantize",
    "q_group_size",
    "q_bits",
    "q_mode",
    "mtp_bits",
    "mtp_group_size",
    "mtp_mode",
    "quant_predicate",
)


def configure_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="convert.py",
        description="Convert a Hugging Face checkpoint to MLX, with its MTP head.",
    )
    add = parser.add_argument
    add(
        "--hf-path",
        "--model",
        required=True,
        help="Local directory or Hugging Face repository (owner/name).",
    )
    add("--mlx-path", default=DEFAULT_MLX_PATH, help="Directory to make.")
    add("-q", "--quantize", action="store_true", help="Quantize the model.")
    add("--q-group-size", type=int, help="Group size for quantization.")
    add("--q-bits", type=int, help="Bits per weight for quantization.")
    add("--q-mode", default=DEFAULT_MODE, choices=[*MODES], help="Quantization mode.")
    add("--quant-predicate", choices=QUANT_RECIPES, help="Mixed-bit recipe.")
    add(
        "--dtype",
        choices=DTYPES,
        help="Type of the unquantized parameters. Default: the config's.",
    )
    add("--revision", help="Branch, tag or commit of the repository.")
    _add_head_options(parser)
    return parser


def _add_head_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("MTP head").add_argument
    add(
        "--mtp-bits",
        type=int,
        help="Bits per weight, 16 to leave it unquantized. Default: as the model.",
    )
    add("--mtp-group-size", type=int, help="Group size. Default: as the model.")
    add("--mtp-mode", choices=[*MODES], help="Mode. Default: as the model.")
    add(
        "--mtp-from",
        metavar="PATH_OR_REPO",
        help="Take the head from here, such as the original of a quantized model. "
        "Only the files with the head are downloaded.",
    )
    add("--mtp-revision", help="Branch, tag or commit of the repository --mtp-from.")
    add(
        "--mtp-norms",
        choices=NORMS,
        help="How the head's norms are stored, if the files do not say: raw (w for a "
        "scale of 1 + w) or shifted.",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command ``convert``.

    Raises:
        SystemExit: 1 for a source that cannot be converted, 2 for a wrong option, 130
            after Ctrl-C.
    """
    parser = configure_parser()
    args = parser.parse_args(argv)
    try:
        make_plan(**{name: getattr(args, name) for name in PLANNED})
    except ValueError as error:
        parser.error(str(error))
    with terminable():
        run(lambda: convert(**vars(args)))


if __name__ == "__main__":
    main()
