"""The reference: transformers' Qwen3.5 and its generic MTP model, in torch, float32.

Both read the raw checkpoint themselves, so the reference shares no loading code, no
norm convention and no forward with the package. Results are float32 numpy arrays of one
sequence, without a batch axis.

The head pairs the hidden state of ``x[t]`` with the embedding of ``x[t+1]`` and
predicts ``x[t+2]``. A sequence of T tokens thus has T - 1 pairs.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.utils import logging


def _quiet_from_pretrained(path: Path) -> tuple[torch.nn.Module, MtpModel]:
    """Target and head without load reports and progress bars on the test's output."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        # transformers has the generic head but does not read Qwen's own config key.
        text = model.config.get_text_config()
        text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
        return model.eval(), MtpModel.from_pretrained(model).eval()
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class TorchOracle:
    """Reference logits and hidden states of one checkpoint directory."""

    def __init__(self, path: str | Path):
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
        self.model, self.mtp = _quiet_from_pretrained(Path(path))

    @torch.no_grad()
    def target(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, V] and hidden states after the final norm [T, hidden_size]."""
        hidden = self._hidden(ids)
        return self._logits(hidden), hidden[0].numpy()

    @torch.no_grad()
    def teacher_forced(self, ids: Sequence[int]) -> np.ndarray:
        """Head logits [T - 1, V] of all pairs, in one block."""
        hidden = self._hidden(ids)[:, :-1]
        return self._logits(self._head(hidden, ids[1:], 0, self._cache()))

    @torch.no_grad()
    def step_by_step(self, ids: Sequence[int]) -> np.ndarray:
        """Head logits [T - 1, V], one pair at a time with a cache."""
        hidden, cache = self._hidden(ids), self._cache()
        steps = [
            self._head(hidden[:, i : i + 1], ids[i + 1 : i + 2], i, cache)
            for i in range(len(ids) - 1)
        ]
        return self._logits(torch.cat(steps, dim=1))

    @torch.no_grad()
    def drafts(
        self, ids: Sequence[int], depth: int, tokens: Sequence[int] | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """Chained draft logits [depth, V] after ``ids``, and the draft tokens.

        Step 1 reads all pairs of ``ids``. A later step reads the draft before it and
        the head's own output (after its last norm) in place of a target hidden state;
        the head's KV cache goes on.

        Args:
            tokens: the drafts to follow; default: the most likely ones.
        """
        cache = self._cache()
        hidden = self._head(self._hidden(ids)[:, :-1], ids[1:], 0, cache)[:, -1:]
        logits, drafted = [], []
        for step in range(depth):
            if step:
                at = len(ids) - 2 + step
                hidden = self._head(hidden, drafted[-1:], at, cache)
            logits.append(self._logits(hidden)[0])
            drafted.append(int(logits[-1].argmax() if tokens is None else tokens[step]))
        return np.stack(logits), drafted

    def _cache(self) -> MtpCache:
        return MtpCache(config=self.model.config.get_mtp_config())

    def _hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """[1, T, hidden_size], after the final norm."""
        ids = torch.tensor([list(ids)])
        out = self.model(ids, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        # The last entry has been before the final norm in some models and versions.
        assert torch.equal(self.model.lm_head(hidden), out.logits)
        return hidden

    def _head(
        self, hidden: torch.Tensor, ids: Sequence[int], at: int, cache: MtpCache
    ) -> torch.Tensor:
        """One block of pairs; ``at`` counts the pairs before it. [1, T, hidden_size]"""
        # Positions are those of the tokens: pair 0 holds x[1].
        positions = torch.arange(at + 1, at + 1 + len(ids))[None]
        ids = torch.tensor([list(ids)])
        return self.mtp.forward_layer(0, hidden, positions, cache, input_ids=ids)

    def _logits(self, hidden: torch.Tensor) -> np.ndarray:
        return self.model.lm_head(hidden)[0].numpy()
