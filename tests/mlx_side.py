"""The package's model and head on a raw checkpoint, without the package's converter.

``load_raw`` applies the raw layout's rules itself (each of the head's seven norms plus
one), so a fault of the converter cannot hide a fault of the model, nor the reverse. The
runs mirror ``torch_oracle.TorchOracle`` and return numpy arrays without a batch axis.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import Model

from mlx_mtp.models import FAMILIES
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.target import Target

HEAD_PREFIX = "mtp."


def read_raw(path: str | Path) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """The tensors of target and head, the head's without their prefix."""
    target, head = {}, {}
    for shard in sorted(Path(path).glob("*.safetensors")):
        for key, value in mx.load(str(shard)).items():
            if key.startswith(HEAD_PREFIX):
                head[key.removeprefix(HEAD_PREFIX)] = value
            else:
                target[key] = value
    return target, head


def load_raw(path: str | Path) -> tuple[Model, Target, MTPHead]:
    family = FAMILIES["qwen3_5"]
    config = json.loads((Path(path) / "config.json").read_text())
    model = family.build_model(config)
    weights, head_weights = read_raw(path)
    model.load_weights(list(model.sanitize(weights).items()))
    family.make_rewindable(model)
    head = family.head(model, config, family.spec)
    # The head's only one-dimensional tensors are its norms.
    norms = [key for key, value in head_weights.items() if value.ndim == 1]
    assert len(norms) == 7
    head_weights |= {key: head_weights[key] + 1 for key in norms}
    head.load_weights(list(head_weights.items()))
    return model.eval(), family.target(model), head.eval()


def change_weight(
    module: nn.Module, key: str, change: Callable[[mx.array], mx.array]
) -> None:
    """Change one weight in place, to plant a fault."""
    weight = dict(tree_flatten(module.parameters()))[key]
    module.load_weights([(key, change(weight))], strict=False)


def run_target(
    target: Target, ids: Sequence[int], blocks: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states, read in blocks of the given sizes; default: one."""
    cache, done, parts = target.make_cache(), 0, []
    for size in blocks or [len(ids)]:
        tokens = mx.array([list(ids[done : done + size])])
        parts.append(target.hidden(tokens, cache))
        done += size
    assert done == len(ids)
    hidden = mx.concatenate(parts, axis=1)
    return _numpy(target.logits(hidden)), _numpy(hidden)


class HeadRun:
    """The head over one sequence and the target's hidden states of it.

    A test may set ``embedding``, ``hidden`` and ``chain`` (the head's output -> hidden
    state of the next draft step) to plant a fault.

    Shapes:
        hidden: [T, hidden_size]
    """

    def __init__(
        self, target: Target, head: MTPHead, ids: Sequence[int], hidden: np.ndarray
    ):
        self.target, self.head = target, head
        self.embedding = target.embed(mx.array([list(ids[1:])]))
        self.hidden = mx.array(hidden[:-1])[None]
        self.chain = lambda out: out

    def teacher_forced(self, *, use_cache: bool = False) -> np.ndarray:
        cache = self.head.make_cache() if use_cache else None
        out = self.head(self.embedding, self.hidden, cache)
        return _numpy(self.target.logits(out))

    def step_by_step(self) -> np.ndarray:
        cache, steps = self.head.make_cache(), []
        for i in range(self.hidden.shape[1]):
            at = slice(i, i + 1)
            steps.append(self.head(self.embedding[:, at], self.hidden[:, at], cache))
        return _numpy(self.target.logits(mx.concatenate(steps, axis=1)))

    def drafts(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [len(tokens), V]; step d + 1 reads ``tokens[d]``."""
        cache = self.head.make_cache()
        steps = [self.head(self.embedding, self.hidden, cache)[:, -1:]]
        for token in tokens[:-1]:
            embedding = self.target.embed(mx.array([[token]]))
            steps.append(self.head(embedding, self.chain(steps[-1]), cache))
        return _numpy(self.target.logits(mx.concatenate(steps, axis=1)))


def _numpy(x: mx.array) -> np.ndarray:
    return np.array(x[0])
