"""Writes a directory so that it appears whole or not at all, and shows the progress.

Knows nothing of what is written.
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from glob import escape
from pathlib import Path

from tqdm import tqdm


def check_free(target: Path) -> None:
    """Raise ValueError if something stands at ``target``, even a broken link."""
    if os.path.lexists(target):
        raise ValueError(
            f"Cannot save to the path {target} as it already exists. Please delete "
            "the file/directory or specify a new path to save to."
        )


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A hidden directory beside ``target`` that takes its name at the end.

    On any error, Ctrl-C included, the directory is removed, and so are the parents
    made for it. What a killed process has left is removed by the next one.

    Args:
        target: an absolute path; its parents are made.

    Raises:
        ValueError: if ``target`` exists.
    """
    check_free(target)
    remove_abandoned(target)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    directory = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        directory.mkdir(parents=True)
        with _locked(directory):
            yield directory
            check_free(target)
            directory.rename(target)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def remove_abandoned(target: Path) -> None:
    """Remove the hidden directories of processes that were killed.

    A living process holds a lock on its own; the system drops the lock with it.
    """
    for directory in target.parent.glob(f".{escape(target.name)}.????????.tmp"):
        with contextlib.suppress(OSError), _locked(directory):
            shutil.rmtree(directory)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int], object]]:
    """A bar over bytes, to be told how many were written; silent without a terminal."""
    with tqdm(
        total=total, desc="Writing", unit="B", unit_scale=True, disable=None
    ) as bar:
        yield bar.update
