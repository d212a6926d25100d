"""The reference of a family in torch, float32: target, draft head and chained drafts.

The target and the head's transformer block are transformers' own modules; the head
around the block is written here from the published math. Nothing has a cache: every
result is computed anew from the whole sequence, so that caches, positions and rollback
are checked by something that has none.

Alignment: entry p of the head reads (hidden state of x[p], embedding of x[p + 1]) and
predicts x[p + 2].
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .loading import quiet_from_pretrained, read_raw, stack_experts

Stage = Literal["post_norm", "pre_norm"]
Tokens = Sequence[int] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Toggles:
    """What the sources disagree on, or what differs between the families.

    Attributes:
        hidden: stage of the target state fed with draft 1, relative to its final norm.
        chain: stage of the head's own state fed with draft 2 and later.
        final_norm: what stands before the output layer: the head's own last norm, the
            target's final norm, or nothing.
        mask_first: the embedding of entry 0 is replaced by zeros.
    """

    hidden: Stage = "post_norm"
    chain: Stage = "post_norm"
    final_norm: Literal["own", "main", "none"] = "own"
    mask_first: bool = False


class Target(NamedTuple):
    """[B, T, H] after and before the final norm, and [B, T, V]."""

    post_norm: Tensor
    pre_norm: Tensor
    logits: Tensor


class HeadOut(NamedTuple):
    """[B, T, H] of the stage that is fed on, and [B, T, V]."""

    chain: Tensor
    logits: Tensor


class Drafts(NamedTuple):
    """Logits [B, K, V] and the drafted (or given) tokens [B, K]."""

    logits: Tensor
    tokens: Tensor


def causal_mask(length: int, window: int | None = None) -> Tensor:
    """[1, 1, T, T], added to the scores; a window counts the query itself."""
    at = torch.arange(length)
    seen = at[None, :] <= at[:, None]
    if window is not None:
        seen &= at[None, :] > at[:, None] - window
    return torch.zeros(length, length).masked_fill(~seen, float("-inf"))[None, None]


class Reference:
    """One raw checkpoint. A family says how it is laid out and what its block is."""

    toggles: ClassVar[Toggles] = Toggles()
    hidden_first: ClassVar[bool] = False
    zero_centred: ClassVar[bool] = False
    num_modules = 1

    def __init__(self, path: str | Path):
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
        self.path = Path(path)
        self.model = self.load_target()
        self.config = self.model.config.get_text_config()
        head = {k: v for k, v in read_raw(path).items() if self.is_head(k)}
        self.build(head)

    # What a family may or must say.

    def load_target(self) -> PreTrainedModel:
        return quiet_from_pretrained(AutoModelForCausalLM.from_pretrained, self.path)

    def is_head(self, key: str) -> bool:
        """Whether a raw tensor belongs to the head."""
        raise NotImplementedError

    def names(self) -> dict[str, str]:
        """Raw names: ``enorm``, ``hnorm``, ``proj``, ``block`` (a prefix), and where
        the head has its own ``norm``, ``embedding``, ``output``."""
        raise NotImplementedError

    def make_block(self) -> nn.Module:
        """The head's transformer block, with weights still to be loaded."""
        raise NotImplementedError

    def block_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The block's raw tensors, without prefix, under the module's names."""
        return stack_experts(weights)

    def mask(self, length: int) -> Tensor:
        return causal_mask(length)

    # Common to all families.

    def build(self, head: dict[str, Tensor]) -> None:
        """Take the head's raw tensors; every one must find a place."""
        self.raw_head, names = head, self.names()
        self.weights = {
            part: head[name] for part, name in names.items() if name in head
        }
        prefix, used = names["block"], set(names.values())
        block = {
            key.removeprefix(prefix): value
            for key, value in head.items()
            if key.startswith(prefix) and key not in used
        }
        assert len(block) + len(self.weights) == len(head)
        self.block = self.make_block().to(torch.float32).eval()
        self.block.load_state_dict(self.block_state(block))

    def with_head(self, head: dict[str, Tensor]) -> "Reference":
        """The same target with other head tensors."""
        other = copy.copy(self)
        other.build(head)
        return other

    @property
    def decoder(self) -> nn.Module:
        return self.model.get_decoder()

    @property
    def eps(self) -> float:
        return self.config.rms_norm_eps

    @property
    def main_embedding(self) -> nn.Module:
        return self.decoder.get_input_embeddings()

    @property
    def main_norm(self) -> nn.Module:
        """The target's final norm."""
        return self.decoder.norm

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * (1 + weight if self.zero_centred else weight)

    @torch.no_grad()
    def target(self, tokens: Tokens) -> Target:
        """tokens: [T] or [B, T]."""
        before: list[Tensor] = []
        hook = self.main_norm.register_forward_pre_hook(
            lambda _, args: before.append(args[0])
        )
        try:
            out = self.decoder(batch(tokens), use_cache=False).last_hidden_state
        finally:
            hook.remove()
        assert len(before) == 1
        return Target(out, before[0], self.model.lm_head(out))

    @torch.no_grad()
    def head(self, states: Tensor, tokens: Tokens, **toggles: Any) -> HeadOut:
        """Entries 0..T-1: ``states`` [B, T, H] of x[p] and ``tokens`` [B, T] x[p+1].

        The caller chooses the stage of ``states``; the toggle ``hidden`` does nothing.
        """
        chosen = replace(self.toggles, **toggles)
        embed = self.weights.get("embedding", self.main_embedding.weight)
        e = F.embedding(batch(tokens), embed)
        if chosen.mask_first:
            e = torch.cat([torch.zeros_like(e[:, :1]), e[:, 1:]], dim=1)
        e = self.norm(e, self.weights["enorm"])
        h = self.norm(torch.as_tensor(states), self.weights["hnorm"])
        both = torch.cat([h, e] if self.hidden_first else [e, h], dim=-1)
        x = self.run_block(F.linear(both, self.weights["proj"]))
        normed = {
            "own": lambda: self.norm(x, self.weights["norm"]),
            "main": lambda: self.main_norm(x),
            "none": lambda: x,
        }[chosen.final_norm]()
        output = self.weights.get("output", self.model.lm_head.weight)
        chain = normed if chosen.chain == "post_norm" else x
        return HeadOut(chain, F.linear(normed, output))

    def run_block(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        at = torch.arange(length)[None]
        return self.block(
            x,
            attention_mask=self.mask(length),
            position_ids=at,
            position_embeddings=self.rotary(x, at),
        )

    def rotary(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder.rotary_emb(x, at)

    def teacher_forced(
        self, tokens: Tokens, states: Tensor | None = None, **toggles: Any
    ) -> list[HeadOut]:
        """Every module of the head over ``tokens`` [B, T] alone, without drafts: module
        m has T - 1 - m entries, of which entry p predicts x[p + m + 2].

        Args:
            states: those of the target [B, T, H] where they are known already.
        """
        if states is None:
            stage = replace(self.toggles, **toggles).hidden
            states = getattr(self.target(tokens), stage)
        return [self.head(states[:, :-1], batch(tokens)[:, 1:], **toggles)]

    @torch.no_grad()
    def drafts(
        self,
        tokens: Tokens,
        num_draft_tokens: int,
        follow: Tokens | None = None,
        **toggles: Any,
    ) -> Drafts:
        """Chained drafts after ``tokens`` [T] or [B, T], of which the last is the one
        the target has not read yet: T - 1 entries, and one more for every draft.

        Args:
            follow: the drafts to go on with; default: the most likely ones.
        """
        chosen = replace(self.toggles, **toggles)
        tokens = batch(tokens)
        states = getattr(self.target(tokens[:, :-1]), chosen.hidden)
        following = tokens[:, 1:]
        given = None if follow is None else batch(follow)
        logits: list[Tensor] = []
        for step in range(num_draft_tokens):
            out = self.head(states, following, **toggles)
            logits.append(out.logits[:, -1])
            token = logits[-1].argmax(-1) if given is None else given[:, step]
            states = torch.cat([states, out.chain[:, -1:]], dim=1)
            following = torch.cat([following, token[:, None]], dim=1)
        return Drafts(torch.stack(logits, 1), following[:, tokens.shape[1] - 1 :])


class NextNReference(Reference):
    """The head is the layer after the last, ``model.layers.{N}.``, with copies of
    embedding and output layer (DeepSeek-V3 and its followers)."""

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.config.num_hidden_layers}."

    def is_head(self, key: str) -> bool:
        return key.startswith(self.prefix)

    def names(self) -> dict[str, str]:
        parts = {
            "enorm": "enorm.weight",
            "hnorm": "hnorm.weight",
            "proj": "eh_proj.weight",
            "norm": "shared_head.norm.weight",
            "embedding": "embed_tokens.weight",
            "output": "shared_head.head.weight",
            "block": "",
        }
        return {part: self.prefix + name for part, name in parts.items()}


class FcReference(Reference):
    """Qwen's names: ``mtp.fc``, ``mtp.pre_fc_norm_*``, ``mtp.norm``, one layer."""

    def is_head(self, key: str) -> bool:
        return key.startswith("mtp.")

    def names(self) -> dict[str, str]:
        return {
            "enorm": "mtp.pre_fc_norm_embedding.weight",
            "hnorm": "mtp.pre_fc_norm_hidden.weight",
            "proj": "mtp.fc.weight",
            "norm": "mtp.norm.weight",
            "block": "mtp.layers.0.",
        }


def batch(tokens: Tokens) -> Tensor:
    tokens = torch.as_tensor(tokens, dtype=torch.long)
    return tokens[None] if tokens.ndim == 1 else tokens
