"""Let clang judge a kernel's text with real address spaces; nothing is run.

It sees an address space on every pointer, on threadgroup memory too, and gives clang's
own warnings. It is not Apple's compiler.
"""

import functools
import os
import shutil
import subprocess

from .build import SHIM, compile_file
from .rewrite import to_lint
from .source import Source

NO_CLANG = "no clang++ that knows __bf16 (18 or later): the address-space lint needs it"
_FLAGS = (
    "-std=c++17",
    "-fsyntax-only",
    "-Werror",
    "-Wall",
    "-Wconditional-uninitialized",
    "-Wno-unused",
    "-Wno-sign-compare",  # Metal's positions are unsigned; MLX's own kernels compare so
    "-Wno-undefined-inline",
    "-Wno-undefined-internal",
)


@functools.cache
def clang() -> str | None:
    """A clang++ that understands ``shim/lint.hpp``, if there is one."""
    names = ["clang++", *(f"clang++-{version}" for version in range(30, 17, -1))]
    for path in filter(None, map(shutil.which, names)):
        command = [path, *_FLAGS, "-Wno-pragma-once-outside-header", "-x", "c++"]
        probe = [*command, str(SHIM / "lint.hpp"), "-o", os.devnull]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return path
    return None


def lint(source: Source) -> None:
    """Check a kernel's text.

    Raises:
        BuildError: With clang's errors and warnings, by line of the Metal text.
        RuntimeError: If there is no clang++.
    """
    path = clang()
    if path is None:
        raise RuntimeError(NO_CLANG)
    compile_file([path, *_FLAGS], to_lint(source), ".cpp", ".ok")
