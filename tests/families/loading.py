"""Raw files into torch: the target through transformers, the head as it is stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging


def quiet_from_pretrained(
    load: Callable[..., PreTrainedModel], path: Path, **kwargs: Any
) -> PreTrainedModel:
    """Load without reports and progress bars on the test's output."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, info = load(
            path,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            **kwargs,
        )
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def read_raw(path: str | Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for shard in sorted(Path(path).glob("*.safetensors")):
        weights |= load_file(shard)
    return weights


def stack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``experts.{i}.{gate,up,down}_proj.weight`` -> transformers' two 3-D tensors.

    ``gate_up_proj`` [E, 2I, H] holds the gate first, ``down_proj`` is [E, H, I].
    Without such names nothing changes.
    """
    prefix = "mlp.experts."
    split = {k: v for k, v in weights.items() if k.startswith(f"{prefix}0.")}
    if not split:
        return weights
    count = len({k.split(".")[2] for k in weights if k.startswith(prefix)})

    def stack(name: str) -> Tensor:
        return torch.stack(
            [weights[f"{prefix}{i}.{name}.weight"] for i in range(count)]
        )

    kept = {k: v for k, v in weights.items() if not k.startswith(prefix)}
    gate_up = torch.cat([stack("gate_proj"), stack("up_proj")], dim=1)
    return kept | {
        f"{prefix}gate_up_proj": gate_up,
        f"{prefix}down_proj": stack("down_proj"),
    }
