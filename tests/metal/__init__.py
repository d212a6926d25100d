"""Runs Metal kernels on a CPU, with checks. See docs/METAL_HARNESS.md."""

from .build import NO_COMPILER, BuildError, compiler
from .run import ORDERS, KernelFault, Traffic, run_kernel, run_source, unwritten
from .source import Source, generated_source, parse

__all__ = [
    "NO_COMPILER",
    "ORDERS",
    "BuildError",
    "KernelFault",
    "Source",
    "Traffic",
    "compiler",
    "generated_source",
    "parse",
    "run_kernel",
    "run_source",
    "unwritten",
]
