"""What is learned about drafting with a model, kept from run to run and on disk.

Costs are a matter of machine and model, so they are kept in a small JSON file in the
Hugging Face library's folder for other libraries' data. Losing it costs a few rounds;
a file that cannot be read or written is passed over. Acceptance is a matter of the
text: the last run's is a first guess for the next and stays in memory.
"""

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import cached_assets_path
from mlx.utils import tree_flatten

from .speculative.cache import MAX_BLOCK
from .speculative.controller import Controller
from .speculative.costs import CostTable

AUTO = "auto"
NumDraftTokens = int | Literal["auto"]
MAX_DRAFT_TOKENS = MAX_BLOCK - 1
FORMAT = 1


class DraftMemory:
    """Costs and acceptance of one model.

    Args:
        file: where the costs are kept; need not exist.
    """

    def __init__(self, file: Path):
        self.file = file
        self.costs = read_costs(file)
        self._last: Controller | None = None

    def begin(self, *, repeatable: bool = False) -> Controller:
        """A controller for a new text.

        Args:
            repeatable: K must not depend on the machine or on earlier runs: costs are
                assumed, and nothing is learned.
        """
        if repeatable:
            return Controller(CostTable.assumed(MAX_DRAFT_TOKENS), timed=False)
        return Controller(self.costs, self._last)

    def end(self, controller: Controller) -> None:
        """Keep what a controller has learned."""
        if controller.timed:
            self._last = controller
            write_costs(self.file, self.costs)


def memory_of(model: nn.Module) -> DraftMemory:
    """The model's memory, kept with the model object."""
    memory = getattr(model, "draft_memory", None)
    if memory is None:
        memory = model.draft_memory = DraftMemory(costs_file(model))
    return memory


def costs_file(model: nn.Module) -> Path:
    """One file per machine, MLX version and shapes of weights.

    ``HF_HOME`` and ``HF_ASSETS_CACHE`` move it, as all that library's files.
    """
    text = json.dumps([FORMAT, machine(), mx.__version__, shapes_of(model)])
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        folder = cached_assets_path("mlx_mtp", "costs", "rounds")
    except OSError:  # a home that cannot be written to
        folder = Path(tempfile.gettempdir())
    return folder / f"{name}.json"


def machine() -> dict[str, Any]:
    """What tells a machine from another, as far as speed goes."""
    info = mx.device_info()
    names = ("device_name", "architecture", "memory_size")
    return {
        "device": str(mx.default_device()),
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        **{name: info[name] for name in names if name in info},
    }


def shapes_of(model: nn.Module) -> str:
    parameters = tree_flatten(model.parameters())
    text = repr([(name, str(x.dtype), x.shape) for name, x in parameters])
    return hashlib.sha256(text.encode()).hexdigest()


def read_costs(file: Path) -> CostTable:
    """The table in a file; an empty one if there is none that can be used."""
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError
    ):
        return CostTable.from_dict(json.loads(file.read_text()), MAX_DRAFT_TOKENS)
    return CostTable(MAX_DRAFT_TOKENS)


def write_costs(file: Path, costs: CostTable) -> None:
    """Whole or not at all: others may read or write the file at the same time."""
    with contextlib.suppress(OSError):
        part = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        part.write_text(json.dumps(costs.as_dict()))
        os.replace(part, file)
