"""Qwen3.5 and 3.6 with experts; those of the head are fused or one by one."""

from dataclasses import replace

import mlx.nn as nn
from mlx_lm.models import qwen3_5_moe

from .experts import split_fused_experts, stack_experts
from .family import Weights
from .qwen3_5 import Qwen35


class Qwen35Moe(Qwen35):
    spec = replace(
        Qwen35.spec,
        family="qwen3_5_moe",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    )
    base = qwen3_5_moe

    def target_weights(self, weights: Weights) -> Weights:
        return stack_experts(weights)  # the fused form is mlx-lm's to split

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        return split_fused_experts(stack_experts(weights))
