"""Optimisation: one step of the joint loss, as a captured CUDA graph where there is a GPU, and the loop around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lumotree.errors import InputError
from lumotree.model_config import ModelConfig
from lumotree.training.evaluate import evaluate
from lumotree.training.network import draft_steps, initial_weights, trunk
from lumotree.training.settings import Settings

Stream = NDArray[np.int16]
Losses = tuple[float, float]

_WARM_STEPS = 8
_TIMED_STEPS = 24
_SPARE_SECONDS = 6.0  # kept for validations and export when the number of steps is worked out from a time
_KEPT_FP32 = ("A_log", "dt_bias")


@dataclass
class Trained:
    """best: fp32 weights at the best validation; curve: (step, target loss, draft loss) in nats, means since the last
    entry; validations: (step, bits per token); steps: that were run; captured: whether steps were graph replays."""

    best: dict[str, Tensor]
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    best_step: int = 0
    seconds: float = 0.0
    captured: bool = False


def compute_weights(weights: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The weights as the forward uses them: rounded to `dtype`, the gate's parameters kept; differentiable."""
    return {name: w if name.endswith(_KEPT_FP32) else w.to(dtype) for name, w in weights.items()}


def joint_loss(
    config: ModelConfig, settings: Settings, weights: dict[str, Tensor], windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Target loss and mean draft loss, nats, of windows int64 `[B, length + 1]`.

    The head learns half from the text and half from the target's own law, which it will be verified against; the
    target does not learn from the latter.
    """
    out = trunk(config, weights, windows[:, :-1], settings.dropout)
    target = F.cross_entropy(out.logits.float().flatten(0, 1), windows[:, 1:].flatten())
    some = settings.chained_windows
    losses = _draft_losses(config, settings, weights, windows, out.hidden, out.logits, 1)
    if settings.chained > 1:
        losses += _draft_losses(
            config, settings, weights, windows[:some], out.hidden[:some], out.logits[:some], settings.chained
        )[1:]
    return target, torch.stack(losses).mean()


def _draft_losses(
    config: ModelConfig,
    settings: Settings,
    weights: dict[str, Tensor],
    windows: Tensor,
    hidden: Tensor,
    logits: Tensor,
    steps: int,
) -> list[Tensor]:
    losses = []
    for s, drafted in enumerate(draft_steps(config, weights, windows[:, :-1], hidden, steps, settings.dropout)):
        rows = drafted[:, s:].float().flatten(0, 1)
        law = logits[:, 1 + s :].detach().float().softmax(-1).flatten(0, 1)
        losses.append((F.cross_entropy(rows, windows[:, 2 + s :].flatten()) + F.cross_entropy(rows, law)) / 2)
    return losses


def train(
    config: ModelConfig,
    settings: Settings,
    text: Stream,
    validation: Stream,
    device: str,
    say: Callable[[str], None] = print,
    keep: Callable[[dict[str, Tensor], int], None] = lambda weights, step: None,
) -> Trained:
    """Train from the settings' seed and return the best weights. `keep` is called with each new best.

    Raises InputError for a text shorter than a window.
    """
    if len(text) <= settings.length + 1:
        raise InputError(f"training: the text has {len(text)} tokens; a window needs {settings.length + 2}")
    torch.manual_seed(settings.seed)
    weights = {n: w.to(device).requires_grad_() for n, w in initial_weights(config, settings.seed).items()}
    step = _Step(config, settings, weights, torch.from_numpy(text.astype(np.int64)).to(device), device)
    started = time.perf_counter()
    total = settings.steps or _planned_steps(step, settings, started, say)
    done = Trained({n: w.detach().clone() for n, w in weights.items()}, captured=step.graph is not None)
    best = math.inf
    for number in range(1, total + 1):
        step.run(_rate(settings, number, total))
        if number % settings.every == 0 or number == total:
            target, draft = step.means()
            scores = evaluate(config, compute_weights(weights), validation, settings.length, settings.batch, 0, device)
            done.curve.append((number, target, draft))
            done.validations.append((number, scores.bits))
            say(f"step {number}/{total}  target {target:.4f}  draft {draft:.4f}  validation {scores.bits:.4f} bits"
                f"  {time.perf_counter() - started:.0f} s")  # fmt: skip
            if scores.bits < best:
                best, done.best_step = scores.bits, number
                done.best = {n: w.detach().clone() for n, w in weights.items()}
                keep(done.best, number)
    done.steps, done.seconds = total, time.perf_counter() - started
    return done


def _rate(settings: Settings, number: int, total: int) -> float:
    warm = min(settings.warmup, max(total // 10, 1))
    if number <= warm:
        return settings.rate * number / warm
    return settings.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * (number - warm) / max(total - warm, 1))))


def _planned_steps(step: _Step, settings: Settings, started: float, say: Callable[[str], None]) -> int:
    """How many steps fit. The ones that measure it run at rate 0: they change the moments a little, not the weights."""
    begun = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        step.run(0.0)
    step.means()
    each = (time.perf_counter() - begun) / _TIMED_STEPS
    left = settings.seconds - _SPARE_SECONDS - (time.perf_counter() - started)
    total = max(int(left / each), 1)
    say(f"{1000 * each:.1f} ms a step, graph {step.graph is not None}: {total} steps in {settings.seconds:.0f} s")
    return total


class _Step:
    """One optimisation step over static buffers; `run` draws the windows, replays or executes."""

    def __init__(
        self, config: ModelConfig, settings: Settings, weights: dict[str, Tensor], text: Tensor, device: str
    ) -> None:
        self.config, self.settings, self.weights, self.text = config, settings, weights, text
        self.cuda = device.startswith("cuda")
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.offsets = torch.arange(settings.length + 1, device=device)
        self.windows = torch.zeros(settings.batch, settings.length + 1, dtype=torch.int64, device=device)
        self.sums, self.count = torch.zeros(2, device=device), 0
        matrices = [w for w in weights.values() if w.ndim == 2]
        others = [w for w in weights.values() if w.ndim != 2]
        # A tensor, so that a captured step reads the rate of its replay.
        self.rate = torch.zeros((), device=device)
        groups = [{"params": matrices, "weight_decay": settings.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate if self.cuda else 0.0, betas=(0.9, 0.95), fused=self.cuda, capturable=self.cuda
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.cuda and settings.graph:
            self._capture()

    def run(self, rate: float) -> None:
        """One step at a learning rate."""
        last = len(self.text) - self.settings.length - 1
        starts = torch.randint(last + 1, (self.settings.batch,), generator=self.generator)
        self.windows.copy_(self.text[starts.to(self.text.device)[:, None] + self.offsets])
        self._set_rate(rate)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._work()
        self.count += 1

    def means(self) -> Losses:
        """Mean losses since the last call."""
        target, draft = (self.sums / max(self.count, 1)).tolist()
        self.sums.zero_()
        self.count = 0
        return target, draft

    def _set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)
        if not self.cuda:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def _work(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        target, draft = joint_loss(self.config, self.settings, compute_weights(self.weights), self.windows)
        (target + self.settings.draft_weight * draft).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.settings.clip)
        self.optimizer.step()
        self.sums += torch.stack([target, draft]).detach()

    def _capture(self) -> None:
        """Capture a step; the warm-up ones run at rate 0."""
        self.windows.copy_(self.text[: self.settings.length + 1])
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_STEPS):
                self._work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._work()
        self.graph = graph
        self.means()
