"""Wording shared by error messages and notes: one line, bounded length."""

from collections.abc import Iterable

MAX_NAMES = 5


def listing(names: Iterable[object]) -> str:
    """The first names, and how many there are where some are left out."""
    every = [str(name) for name in names]
    shown = ", ".join(every[:MAX_NAMES])
    return shown if len(every) <= MAX_NAMES else f"{shown}, ... ({len(every)} in all)"


def count(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
