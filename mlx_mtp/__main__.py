"""``python -m mlx_mtp generate|convert|chat|benchmark|doctor``, as mlx-lm's command."""

import importlib
import sys

COMMANDS = {
    "generate": "generate_cli",
    "convert": "convert_cli",
    "chat": "chat",
    "benchmark": "benchmark",
    "doctor": "doctor",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in COMMANDS:
        print(f"usage: python -m mlx_mtp {{{','.join(COMMANDS)}}} …", file=sys.stderr)
        sys.exit(2)
    module = importlib.import_module(f"mlx_mtp.{COMMANDS[name]}")
    module.main(sys.argv[2:])


if __name__ == "__main__":
    main()
