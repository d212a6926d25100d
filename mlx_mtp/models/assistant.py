"""Gemma 4's assistant: a drafter with queries only, which reads the target's keys.

``post_projection(norm(layers(pre_projection([e; h]))))``, e the target's embedding and
h its state after the final norm, or what the assistant gave for the draft before. Each
layer attends to what the target's last layer of its type has cached. All drafts of a
round stand at one position, that of the token which the target has yet to read, and see
what the target would see from there. Sources: transformers ``models/gemma4_assistant``;
mlx-vlm for the window of sliding layers, where transformers and vLLM see one or two
positions more.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from .gemma4 import FULL, SLIDING, Gemma4, Gemma4Target

MODEL_TYPE = "gemma4_assistant"


class ClusteredOutput(nn.Module):
    """An output layer that computes the logits of a few clusters of tokens only.

    The tokens of the clusters with the highest scores; the others are impossible.
    """

    def __init__(self, size: int, vocab_size: int, clusters: int, count: int):
        super().__init__()
        self.count, self.clusters = count, clusters
        self.centroids = nn.Linear(size, clusters, bias=False)
        self.token_ordering = mx.zeros((vocab_size,), mx.int32)

    def __call__(self, x: mx.array, embedding: nn.Embedding) -> mx.array:
        """[B, T, size] -> [B, T, V]"""
        scores = self.centroids(x)
        chosen = mx.argpartition(scores, kth=-self.count, axis=-1)[..., -self.count :]
        tokens = self.token_ordering.reshape(self.clusters, -1)[chosen].flatten(-2)
        logits = (embedding(tokens) @ x[..., None]).squeeze(-1)
        shape = (*x.shape[:-1], self.token_ordering.size)
        nothing = mx.full(shape, -mx.inf, logits.dtype)
        return mx.put_along_axis(nothing, tokens, logits, axis=-1)


class Layers(nn.Module):
    def __init__(self, args: gemma4_text.ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        count = range(args.num_hidden_layers)
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in count]
        self.norm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)


class Assistant(nn.Module):
    """The drafter; parameters are named as the checkpoint's tensors.

    Args:
        config: the checkpoint's.
    """

    reads_target = True  # see speculative.assistant_drafter
    spec = Gemma4.spec

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.args = args = gemma4_text.ModelArgs.from_dict(config["text_config"])
        width = config["backbone_hidden_size"]
        self.pre_projection = nn.Linear(2 * width, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, width, bias=False)
        self.model = Layers(args)
        if config.get("use_ordered_embeddings"):
            self.masked_embedding = ClusteredOutput(
                args.hidden_size,
                args.vocab_size,
                config["num_centroids"],
                config["centroid_intermediate_top_k"],
            )

    def __call__(
        self,
        embedding: mx.array,
        hidden: mx.array,
        shared: dict[str, tuple[mx.array, mx.array]],
        masks: dict[str, mx.array],
        position: mx.array,
    ) -> mx.array:
        """The state that ``logits`` and ``chain`` take.

        Args:
            embedding, hidden: [B, 1, width of the target]
            shared: by type of layer, keys and values [B, heads, S, D]
            masks: by type of layer, [B, 1, 1, S]
            position: [B]
        """
        x = self.pre_projection(mx.concatenate([embedding, hidden], axis=-1))
        for layer in self.model.layers:
            kind = layer.layer_type
            x, *_ = layer(x, masks[kind], shared_kv=shared[kind], offset=position)
        return self.model.norm(x)

    def chain(self, state: mx.array) -> mx.array:
        """What the next draft reads in place of the target's state."""
        return self.post_projection(state)

    def masks(
        self, target: Gemma4Target, position: mx.array, size: int
    ) -> dict[str, mx.array]:
        """Which of ``size`` cached positions a row at ``position`` [B] sees."""
        at, here = mx.arange(size), position[:, None]
        full = at < here
        sliding = full & (at > here - target.window)
        return {FULL: full[:, None, None], SLIDING: sliding[:, None, None]}

    def embed(self, target: Gemma4Target, tokens: mx.array) -> mx.array:
        return target.embed(tokens)

    def normed(self, target: Gemma4Target, state: mx.array) -> mx.array:
        return state

    def output_layer(self, target: Gemma4Target) -> nn.Module:
        return self.get("masked_embedding", self.model.embed_tokens)

    def logits(self, target: Gemma4Target, state: mx.array) -> mx.array:
        """[B, T, size] -> [B, T, V]"""
        if "masked_embedding" in self:
            return self.masked_embedding(state, self.model.embed_tokens)
        return self.model.embed_tokens.as_linear(state)


def check_assistant(config: dict[str, Any], target: Gemma4Target) -> None:
    """Refuse an assistant of another target.

    Raises:
        ValueError: names what differs.
    """
    text, args = config["text_config"], target.model.args
    pairs = {
        "backbone_hidden_size": (config["backbone_hidden_size"], args.hidden_size),
        "vocab_size": (text.get("vocab_size"), args.vocab_size),
    }
    for name in ("head_dim", "global_head_dim"):
        pairs[name] = (text.get(name, getattr(args, name)), getattr(args, name))
    if missing := set(text["layer_types"]) - set(args.layer_types):
        raise ValueError(
            f"the assistant has layers of {missing.pop()}, the model has none"
        )
    if wrong := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        name, (theirs, ours) = next(iter(wrong.items()))
        raise ValueError(
            f"the assistant belongs to another model: its {name} is {theirs}, this "
            f"model's {ours}"
        )
