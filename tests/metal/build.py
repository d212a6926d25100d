"""Find a C++ compiler, compile a kernel, keep the result under its content's hash."""

import contextlib
import ctypes
import functools
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SHIM = Path(__file__).parent / "shim"
NO_COMPILER = "no C++ compiler: install g++ or clang++"
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a * b + c rounds twice, unless the text says fma
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-w",
)
# Faults in a thread's own code: an index past a local array and a division by zero
# trap, a variable never set holds a large number, an endless loop does not end.
_CHECKS = (
    "-fsanitize=bounds",
    "-fsanitize=integer-divide-by-zero",
    "-fno-finite-loops",
    "-fsanitize-undefined-trap-on-error",
    "-ftrivial-auto-var-init=pattern",
)


class BuildError(RuntimeError):
    """The compiler rejects a kernel's text; the message is the compiler's."""


def compiler() -> str | None:
    """The C++ compiler to use: g++, else clang++, else none."""
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _known_checks(cxx: str) -> tuple[str, ...]:
    """Those of ``_CHECKS`` that this compiler knows."""

    def accepts(flag: str) -> bool:
        command = [cxx, "-Werror", flag, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True).returncode == 0

    return tuple(flag for flag in _CHECKS if accepts(flag))


def cache_dir() -> Path:
    """Outside the source tree; safe to delete."""
    path = Path(tempfile.gettempdir()) / f"mlx_mtp-metal-{getpass.getuser()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def compile_file(command: list[str], text: str, suffix: str, output: str) -> Path:
    """Run ``command`` on ``text`` unless its result is in the cache.

    Args:
        command: Compiler and flags; the input and ``-o`` are added.
        text: The program.
        suffix: Of the input, such as ``.cpp``.
        output: Suffix of the result, such as ``.so``.
    """
    digest = hashlib.sha256("\0".join([*command, text]).encode())
    for header in sorted(SHIM.iterdir()):
        digest.update(header.read_bytes())
    path = cache_dir() / (digest.hexdigest()[:24] + output)
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        program, made = Path(scratch) / f"kernel{suffix}", Path(scratch) / "made"
        program.write_text(text)
        run = subprocess.run(
            [*command, f"-I{SHIM}", str(program), "-o", str(made)],
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise BuildError("\n".join(run.stderr.splitlines()[:12]))
        made.touch()  # a check alone makes no file
        os.replace(made, path)  # another worker may have been quicker: the same bytes
    return path


@functools.cache
def _precompiled(*command: str) -> tuple[str, ...]:
    """g++ reads its own form of the shim three times as fast; clang goes without."""
    if command[0].endswith("clang++"):
        return ()
    text = (SHIM / "shim.hpp").read_text()
    header = compile_file([*command, "-x", "c++-header"], text, ".hpp", ".gch")
    folder = header.with_suffix("")
    folder.mkdir(exist_ok=True)
    if not (link := folder / "shim.hpp.gch").exists():
        with contextlib.suppress(FileExistsError):  # another worker was quicker
            link.symlink_to(header)
    return (f"-I{folder}",)


@functools.cache
def load(cpp: str) -> ctypes.CDLL:
    """Compile a program of ``rewrite.to_cpp`` and load it.

    Raises:
        BuildError: If the compiler rejects the text.
        RuntimeError: If there is no compiler.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(NO_COMPILER)
    base = [cxx, *_FLAGS]
    runtime = compile_file(
        [*base, "-c"], (SHIM / "runtime.cpp").read_text(), ".cpp", ".o"
    )
    command = [*base, *_known_checks(cxx)]
    command += [*_precompiled(*command), "-shared", str(runtime)]
    return ctypes.CDLL(str(compile_file(command, cpp, ".cpp", ".so")))
