"""How well weights predict a text: bits per token, and how often the MTP head agrees with the target it drafts for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lumotree.model_config import ModelConfig
from lumotree.training.network import Weights, draft_steps, trunk


@dataclass(frozen=True)
class Scores:
    """bits: per token (bytes, and one END a document) of the target; tokens: how many were predicted; agreement: share
    of rows in which each step of the MTP head has the target's first choice, its earlier tokens being the text's;
    draft_bits: cross entropy of each step against the text."""

    bits: float
    tokens: int
    agreement: tuple[float, ...]
    draft_bits: tuple[float, ...]


@torch.no_grad()
def evaluate(
    config: ModelConfig,
    weights: Weights,
    stream: NDArray[np.int16],
    length: int,
    batch: int,
    steps: int = 0,
    device: str = "cpu",
) -> Scores:
    """Scores over windows of `length` tokens one after the other; each window starts from an empty state, its first
    token is given."""
    bits = count = 0.0
    hits, losses, rows = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for tokens in _windows(stream, length, batch, device):
        out = trunk(config, weights, tokens[:, :-1])
        bits += float(F.cross_entropy(out.logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
        count += tokens[:, 1:].numel()
        drafts = draft_steps(config, weights, tokens[:, :-1], out.hidden, steps) if steps else []
        for s, logits in enumerate(drafts):
            match = logits[:, s:].argmax(-1) == out.logits[:, 1 + s :].argmax(-1)
            hits[s] += float(match.sum())
            rows[s] += match.numel()
            losses[s] += float(
                F.cross_entropy(logits[:, s:].float().flatten(0, 1), tokens[:, 2 + s :].flatten(), reduction="sum")
            )
    return Scores(
        bits / count / math.log(2),
        int(count),
        tuple((hits / np.maximum(rows, 1)).tolist()),
        tuple((losses / np.maximum(rows, 1) / math.log(2)).tolist()),
    )


def _windows(stream: NDArray[np.int16], length: int, batch: int, device: str) -> Iterator[Tensor]:
    """int64 `[<= batch, length + 1]` windows overlapping by one token, so that every token but the first is predicted;
    the last, shorter one comes alone."""
    starts = list(range(0, len(stream) - length, length))
    for group in range(0, len(starts), batch):
        rows = [stream[start : start + length + 1] for start in starts[group : group + batch]]
        yield torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
    rest = stream[len(starts) * length :]
    if len(rest) > 2:
        yield torch.from_numpy(rest.astype(np.int64))[None].to(device)
