"""Runs Metal kernels on a CPU, with checks. See docs/METAL_HARNESS.md."""

from .buffers import unwritten
from .build import NO_COMPILER, BuildError, compiler
from .lint import NO_CLANG, clang, lint
from .run import ORDERS, KernelFault, Traffic, run_kernel, run_source
from .source import Source, generated_source, parse

__all__ = [
    "NO_CLANG",
    "NO_COMPILER",
    "ORDERS",
    "BuildError",
    "KernelFault",
    "Source",
    "Traffic",
    "clang",
    "compiler",
    "generated_source",
    "lint",
    "parse",
    "run_kernel",
    "run_source",
    "unwritten",
]
