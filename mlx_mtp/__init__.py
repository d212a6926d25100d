"""Multi-token prediction for MLX: the same text, sooner.

The functions are mlx-lm's: ``load``, ``generate``, ``stream_generate``, ``convert``.
"""

from ._version import __version__
from .batch import BatchResponse, batch_generate
from .convert import convert
from .generate import generate, stream_generate
from .generate_step import mtp_generate_step
from .load import load
from .models import supported_families
from .prompt_cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from .response import GenerationResponse
from .speculative.stats import SpeculationStats

__all__ = [
    "BatchResponse",
    "GenerationResponse",
    "SpeculationStats",
    "__version__",
    "batch_generate",
    "convert",
    "generate",
    "load",
    "load_prompt_cache",
    "make_prompt_cache",
    "mtp_generate_step",
    "save_prompt_cache",
    "stream_generate",
    "supported_families",
]
