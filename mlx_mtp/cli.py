"""What the command lines share: a user's mistake is one line, never a traceback."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

MAX_MESSAGE = 400
INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C


def one_line(error: BaseException) -> str:
    """An exception's message on one line, cut where a list of names would go on."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """While it is open, SIGTERM unwinds as Ctrl-C does, so that files are removed."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(command: Callable[[], None]) -> None:
    """Run a command's body; exit with 1 on a user's mistake, 130 on Ctrl-C."""
    try:
        command()
        if sys.stdout is not None:  # it may have been closed
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left, as in `generate.py … | head`. Python would complain again
        # when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
