"""Gemma 4 and its assistant: a drafter of its own that reads the target's keys.

Sources: transformers ``models/gemma4`` and ``models/gemma4_assistant``, whose modules
both are here, and its ``SinglePositionMultiTokenCandidateGenerator``. The assistant has
queries alone: every layer attends to what the target's last layer of its type with keys
of its own has kept. Draft 1 reads the embedding of the token that the target has not
read yet and the target's state before it; later drafts read the draft before and the
assistant's projected state. All of them stand at one position and see the same keys.

Where the engines differ: the position is that token's here, as in transformers and
mlx-vlm; vLLM takes the one before. A sliding layer sees the keys that the target would
from this position, as in mlx-vlm; transformers sees two more, vLLM one. Tokens outside
the chosen clusters have logits of minus infinity; transformers gives them one less than
the smallest, which lets sampling draw them.
"""

import copy
import json
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

from .gemma4_files import ASSISTANT, CENTROIDS, SLIDING, write
from .loading import read_raw
from .reference import Drafts, HeadOut, Reference, Target, Tokens, batch

__all__ = ["ASSISTANT", "SLIDING", "Gemma4Reference", "write"]
KV = dict[str, tuple[Tensor, Tensor]]


class Gemma4Reference(Reference):
    """``raw_head`` holds the assistant's tensors. ``head`` needs the target's keys and
    values besides: see ``kv``."""

    def load_target(self) -> PreTrainedModel:
        read = json.loads((self.path / "config.json").read_text())["text_config"]
        settings = Gemma4TextConfig(**read)
        settings._attn_implementation = "eager"
        model = Gemma4ForCausalLM(settings).to(torch.float32)
        raw = read_raw(self.path).items()
        state = {k.replace("language_model.", ""): v for k, v in raw}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        wanted = model.state_dict().keys()
        unread = {k for k in state if k not in wanted}
        assert all(".self_attn.k_" in k or ".self_attn.v_" in k for k in unread)
        model.load_state_dict({k: v for k, v in state.items() if k in wanted})
        return model.eval()

    def is_head(self, key: str) -> bool:
        return False

    def build(self, head: dict[str, Tensor]) -> None:
        """The assistant's raw tensors; without any, those of its file."""
        path = self.path / ASSISTANT
        self.raw_head = head or read_raw(path)
        if hasattr(self, "assistant"):
            self.assistant = copy.deepcopy(self.assistant)
        else:
            read = json.loads((path / "config.json").read_text())
            self.assistant_config = Gemma4AssistantConfig(**read)
            self.assistant_config._attn_implementation = "eager"
            self.assistant = Gemma4AssistantForCausalLM(self.assistant_config)
        embedding = self.raw_head["model.embed_tokens.weight"]
        self.assistant.load_state_dict(self.raw_head | {"lm_head.weight": embedding})
        self.assistant.eval()

    def target(self, tokens: Tokens) -> Target:
        found, cap = super().target(tokens), self.config.final_logit_softcapping
        return found._replace(logits=torch.tanh(found.logits / cap) * cap)

    @torch.no_grad()
    def kv(self, tokens: Tokens) -> KV:
        """By type of layer, keys and values [B, heads, T, D] that the assistant reads:
        rotated and normed, those of the last layer that has its own."""
        out = self.decoder(batch(tokens), use_cache=False, return_shared_kv_states=True)
        return dict(out.shared_kv_states)

    @torch.no_grad()
    def head(
        self, states: Tensor, tokens: Tokens, kv: KV, positions: Tensor
    ) -> HeadOut:
        """Rows of their own, which do not see each other.

        Args:
            states: [B, T, H] of the target, or what the assistant gave.
            tokens: [B, T].
            kv: from ``kv``.
            positions: [T]; a row sees the keys before its own.
        """
        embedded = self.decoder.embed_tokens(batch(tokens))  # scaled
        x = torch.cat([embedded, torch.as_tensor(states)], dim=-1)
        hidden = self.assistant.model(
            inputs_embeds=self.assistant.pre_projection(x),
            attention_mask=self.masks(kv, positions),
            position_ids=positions[None],
            shared_kv_states=kv,
            use_cache=False,
            output_hidden_states=True,  # or it cuts inputs per layer that are not there
        ).last_hidden_state
        return HeadOut(self.assistant.post_projection(hidden), self.logits(hidden))

    def masks(self, kv: KV, positions: Tensor) -> dict[str, Tensor]:
        window = self.config.sliding_window
        masks = {}
        for kind, (keys, _) in kv.items():
            at = torch.arange(keys.shape[2])[None, :]
            seen = at < positions[:, None]
            if kind == SLIDING:
                seen &= at > positions[:, None] - window
            masks[kind] = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        return {kind: mask[None, None] for kind, mask in masks.items()}

    def logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.raw_head["model.embed_tokens.weight"])
        if not self.assistant_config.use_ordered_embeddings:
            return logits
        centroids = self.raw_head["masked_embedding.centroids.weight"]
        clusters = self.raw_head["masked_embedding.token_ordering"].view(CENTROIDS, -1)
        count = self.assistant_config.centroid_intermediate_top_k
        chosen = F.linear(hidden, centroids).topk(count).indices
        allowed = clusters[chosen].flatten(-2)
        masked = torch.full_like(logits, float("-inf"))
        return masked.scatter(-1, allowed, logits.gather(-1, allowed))

    def teacher_forced(
        self, tokens: Tokens, states: Tensor | None = None, **toggles: Any
    ) -> list[HeadOut]:
        tokens = batch(tokens)
        if states is None:
            stage = replace(self.toggles, **toggles).hidden
            states = getattr(self.target(tokens), stage)
        positions = torch.arange(1, tokens.shape[1])
        kv = self.kv(tokens[:, :-1])
        return [self.head(states[:, :-1], tokens[:, 1:], kv, positions)]

    def drafts(
        self,
        tokens: Tokens,
        num_draft_tokens: int,
        follow: Tokens | None = None,
        **toggles: Any,
    ) -> Drafts:
        """Drafts after ``tokens`` [T] or [B, T]; the target has not read the last one,
        at whose position T - 1 every draft is made.

        Args:
            follow: the drafts to go on with; default: the most likely ones.
        """
        tokens, stage = batch(tokens), replace(self.toggles, **toggles).hidden
        given = None if follow is None else batch(follow)
        kv = self.kv(tokens[:, :-1])
        states = getattr(self.target(tokens[:, :-1]), stage)[:, -1:]
        position = torch.tensor([tokens.shape[1] - 1])
        token = tokens[:, -1:]
        logits: list[Tensor] = []
        drafted: list[Tensor] = []
        for step in range(num_draft_tokens):
            out = self.head(states, token, kv, position)
            states = out.chain
            logits.append(out.logits)
            token = (
                out.logits.argmax(-1) if given is None else given[:, step : step + 1]
            )
            drafted.append(token)
        return Drafts(torch.cat(logits, 1), torch.cat(drafted, 1))
