"""Where a text ends: end tokens and stop strings."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

CONFIG_FILES = ("config.json", "generation_config.json")


def end_token_ids(path: Path) -> set[int]:
    """All end tokens that a checkpoint's config files name.

    mlx-lm takes those of ``generation_config.json`` instead of the others; a chat model
    whose two files differ then runs past its turn.
    """
    ids: set[int] = set()
    for name in CONFIG_FILES:
        try:
            config = json.loads((path / name).read_text())
        except (OSError, ValueError):  # no such file, or not one that mlx-lm reads
            continue
        for part in (config, config.get("text_config") or {}):
            ids.update(_as_list(part.get("eos_token_id")))
    return ids


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def check_stop(stop: str | Sequence[str] | None) -> list[str]:
    """The stop strings as a list; none may be empty."""
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"a stop string must be text, not {string!r}")
    return strings


class StopStrings:
    """Looks for stop strings in streamed text, over the borders of its pieces.

    Text that may be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, strings: Iterable[str]):
        self.strings = list(strings)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add a piece -> text that may be shown, and whether a stop string is complete.

        What stands before the first stop string is shown; it and the rest never are.
        """
        self._held += text
        found = [at for s in self.strings if (at := self._held.find(s)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max(map(self._overlap, self.strings), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """The text held back, once the output has ended."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, string: str) -> int:
        """Length of the longest end of the held text that begins ``string``."""
        longest = min(len(string) - 1, len(self._held))
        return next(
            (n for n in range(longest, 0, -1) if self._held.endswith(string[:n])), 0
        )
