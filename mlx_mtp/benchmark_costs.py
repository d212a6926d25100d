"""What the parts of a round cost on this machine, measured one by one.

Every timing is a median over repetitions in rotating order, evaluated alone, so that
other programs and clock changes fall on all parts alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream

from .generate_step import target_of
from .speculative.accept import greedy_tokens, log_probs
from .speculative.cache import MAX_BLOCK
from .speculative.prefill import prefill
from .speculative.round import Engine
from .speculative.vocabulary import draft_vocabulary


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Args:
        verify: of a target pass over 1 to 9 rows, output layer included.
        draft: of one draft step, output layer included; None without a head.
        draft_whole: the same over the whole vocabulary.
        head_layer: the same without the output layer.
        weight_bytes: that a pass over one row reads of the target.
    """

    verify: tuple[float, ...]
    draft: float | None
    draft_whole: float | None
    head_layer: float | None
    weight_bytes: int

    @property
    def relative(self) -> list[float]:
        """c(T) in units of a plain step."""
        return [seconds / self.verify[0] for seconds in self.verify]

    @property
    def relative_draft(self) -> float | None:
        return None if self.draft is None else self.draft / self.verify[0]

    @property
    def bandwidth(self) -> float:
        """Bytes of weights per second in a plain step."""
        return self.weight_bytes / self.verify[0]

    def expected_speed_up(self, k: int, conditional: Sequence[float]) -> float:
        """With K drafts, each accepted at its rate if all before it were."""
        tokens = chance = 1.0
        for rate in conditional[:k]:
            chance *= rate
            tokens += chance
        return tokens / (self.relative[k] + k * (self.relative_draft or 0))


def measure_costs(
    model: nn.Module, prompt: Sequence[int], *, repeats: int, widths: int = MAX_BLOCK
) -> Costs:
    """Time the parts behind a prompt."""
    target, head = target_of(model), model.mtp
    with mx.stream(generation_stream):
        engine = Engine(target, head)
        block = prefill(engine, [list(prompt)], 2048)
        mx.eval(block)
        rows = mx.array([(list(prompt) * MAX_BLOCK)[:MAX_BLOCK]])
        parts: dict[str, Callable[[], object]] = {}
        for width in range(1, widths + 1):
            parts[f"verify {width}"] = lambda w=width: _verify(engine, rows[:, :w])
        if head is not None:
            embedding = engine.drafter.embed(rows[:, :1])
            cache = engine.drafter.cache

            def layer() -> mx.array:
                state = head(embedding, block.hidden[:, -1:], cache)
                return state

            parts["head layer"] = lambda: mx.eval(layer(), cache.state)
            parts["draft whole"] = lambda: mx.eval(
                greedy_tokens(log_probs(head.logits(target, layer()))), cache.state
            )
            vocabulary = draft_vocabulary(head, target)
            if vocabulary is not None:
                parts["draft"] = lambda: mx.eval(
                    mx.argmax(vocabulary.logits(head.normed(target, layer())), axis=-1),
                    cache.state,
                )
        seconds = _medians(parts, repeats)
    verify = tuple(seconds[f"verify {w}"] for w in range(1, widths + 1))
    whole = seconds.get("draft whole")
    return Costs(
        verify,
        seconds.get("draft", whole),
        whole,
        seconds.get("head layer"),
        weight_bytes(model),
    )


def _verify(engine: Engine, rows: mx.array) -> None:
    logits = engine.target.logits(engine.target.hidden(rows, engine.cache))
    states = [cache.state for cache in engine.cache]
    mx.eval(greedy_tokens(log_probs(logits)), states)
    for cache in engine.cache:
        if hasattr(cache, "record"):
            cache.commit()


def _medians(parts: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    names, times = list(parts), {name: [] for name in parts}
    for turn in range(repeats + 1):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            start = time.perf_counter()
            parts[name]()
            if turn:  # the first turn compiles kernels and allocates
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def weight_bytes(model: nn.Module) -> int:
    """Weights that a step over one token reads: all but a separate embedding."""
    layer = target_of(model).output_layer
    total = sum(x.nbytes for _, x in tree_flatten(model.parameters()))
    if model.mtp is not None:
        total -= sum(x.nbytes for _, x in tree_flatten(model.mtp.parameters()))
    embedding = target_of(model).model.model.embed_tokens
    if layer is not embedding:
        total -= sum(x.nbytes for _, x in tree_flatten(embedding.parameters()))
    return total
