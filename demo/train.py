"""Train the demo checkpoint on a CPU: a tiny Qwen3.5 with its MTP head.

Two phases: target and head together on next tokens, then the target frozen and the head
distilled on the target's own distributions, three drafts deep. The state is saved every
few minutes; the same command resumes. ``--minutes`` is CPU time over all runs. The
learning rate is constant and falls linearly to zero over the last part of a phase.

    python demo/corpus.py --out demo/run
    python demo/train.py --data demo/run --out demo/raw --minutes 82
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from export import save_hf_layout
from model import DemoModel, distillation_loss, evaluate, joint_loss
from muon import Muon
from tokenizers import Tokenizer

LENGTH, BATCH = 256, 8
DISTILL_DEPTH, DISTILL_SHARE = 3, 0.12
ADAM_RATE, MUON_RATE, WEIGHT_DECAY = 3e-3, 0.02, 0.1
WARMUP_STEPS, DECAY_SHARE = 60, 0.3
SAVE_SECONDS, EVALUATE_SECONDS = 120, 240


@dataclass
class Progress:
    """What a resumed run needs to know besides weights and optimizer state."""

    step: int = 0
    tokens: int = 0
    joint_cpu_seconds: float = 0.0
    distill_cpu_seconds: float = 0.0
    log: list[dict] = field(default_factory=list)


class Batches:
    """Random windows of the training text; evenly spaced ones of the held-out text."""

    def __init__(self, data: Path):
        self.train = np.memmap(data / "train.bin", np.uint16, "r")
        self.held_out = np.memmap(data / "heldout.bin", np.uint16, "r")

    def windows(self, text: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        width = LENGTH + 1 + DISTILL_DEPTH
        rows = [text[i : i + width].astype(np.int64) for i in starts]
        return torch.from_numpy(np.stack(rows))

    def at_step(self, step: int) -> torch.Tensor:
        rng = np.random.default_rng([0, step])  # the same batch again after a resume
        last = len(self.train) - LENGTH - DISTILL_DEPTH - 1
        return self.windows(self.train, rng.integers(0, last, BATCH))

    def evaluation(self, count: int = 12) -> list[torch.Tensor]:
        last = len(self.held_out) - LENGTH - DISTILL_DEPTH - 1
        starts = np.linspace(0, last, count * BATCH).astype(int)
        return [self.windows(self.held_out, s) for s in np.split(starts, count)]


class Trainer:
    """One phase's parameters, optimizers and learning rate."""

    def __init__(self, model: DemoModel, phase: str, bf16: bool = False):
        self.model, self.phase, self.bf16 = model, phase, bf16
        model.target.requires_grad_(phase == "joint")
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [
            p
            for n, p in named
            if p.ndim == 2 and "embed" not in n and min(p.shape) > 31
        ]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.rate = 1.0 if phase == "joint" else 0.3
        self.muon = Muon(matrices, MUON_RATE, weight_decay=WEIGHT_DECAY * 0.1)
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim > 1]},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=ADAM_RATE,
            betas=(0.9, 0.95),
            weight_decay=WEIGHT_DECAY,
        )

    def step(self, ids: torch.Tensor, share: float, steps_done: int) -> float:
        """One update; ``share`` in [0, 1] is how much of the phase is over."""
        scale = self.rate * min(1.0, (1 - share) / DECAY_SHARE)
        if self.phase == "joint":
            scale *= min(1.0, (steps_done + 1) / WARMUP_STEPS)
        for optimizer, rate in ((self.muon, MUON_RATE), (self.adam, ADAM_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            if self.phase == "joint":
                loss = joint_loss(self.model, ids)
            else:
                loss = distillation_loss(self.model, ids, DISTILL_DEPTH)
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            [p for p in self.model.parameters() if p.requires_grad], 1.0
        )
        self.muon.step()
        self.adam.step()
        return loss.item()

    def state(self) -> dict:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def save_state(path: Path, trainer: Trainer, progress: Progress) -> None:
    """Write beside, then rename: an interrupted save loses nothing."""
    state = {
        "model": trainer.model.state_dict(),
        "phase": trainer.phase,
        "optimizers": trainer.state(),
        "progress": asdict(progress),
    }
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    beside.replace(path)


def run_phase(
    trainer: Trainer, progress: Progress, batches: Batches, budget: float, state: Path
) -> None:
    """Train until the phase has used ``budget`` CPU seconds, over all runs."""
    key = f"{trainer.phase}_cpu_seconds"
    before, start = getattr(progress, key), time.process_time()
    saved = evaluated = start
    while (used := before + time.process_time() - start) < budget:
        ids = batches.at_step(progress.step)
        loss = trainer.step(ids, used / budget, progress.step)
        progress.step += 1
        progress.tokens += BATCH * LENGTH
        now = time.process_time()
        if now - evaluated > EVALUATE_SECONDS:
            evaluated = now
            record = {"phase": trainer.phase, "tokens": progress.tokens}
            record |= {"cpu_minutes": round(used / 60, 1), "loss": round(loss, 3)}
            record |= evaluate(trainer.model, batches.evaluation(4))
            progress.log.append(record)
            print(json.dumps(record), flush=True)
        if now - saved > SAVE_SECONDS:
            saved = now
            setattr(progress, key, used)
            save_state(state, trainer, progress)
    setattr(progress, key, used)
    save_state(state, trainer, progress)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=82.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="autocast: three times faster with AVX512-BF16 or AMX, far slower without",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    model = DemoModel(tokenizer.get_vocab_size(), LENGTH)
    state, progress, saved = args.data / "state.pt", Progress(), None
    if state.exists():
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        progress = Progress(**saved["progress"])
        print(f"resumed at step {progress.step}", flush=True)
    batches = Batches(args.data)
    seconds = args.minutes * 60
    budgets = {
        "joint": seconds * (1 - DISTILL_SHARE),
        "distill": seconds * DISTILL_SHARE,
    }
    for phase, budget in budgets.items():
        if saved and phase == "joint" and saved["phase"] == "distill":
            continue
        trainer = Trainer(model, phase, args.bf16)
        if saved and saved["phase"] == phase:
            trainer.load(saved["optimizers"])
        run_phase(trainer, progress, batches, budget, state)
    result = {"steps": progress.step, "tokens": progress.tokens}
    result |= evaluate(model, batches.evaluation())
    print(json.dumps(result), flush=True)
    save_hf_layout(args.out, model, args.data / "tokenizer.json")
    record = {"result": result, "log": progress.log}
    (args.out / "training_log.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
