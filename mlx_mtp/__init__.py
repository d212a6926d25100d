"""Multi-token prediction for MLX: the same text, sooner.

The functions are mlx-lm's: ``load``, ``generate``, ``stream_generate``, ``convert``.
"""

from ._version import __version__
from .convert import convert
from .generate import generate, stream_generate
from .generate_step import mtp_generate_step
from .load import load
from .response import GenerationResponse
from .speculative.stats import SpeculationStats

__all__ = [
    "GenerationResponse",
    "SpeculationStats",
    "__version__",
    "convert",
    "generate",
    "load",
    "mtp_generate_step",
    "stream_generate",
]
