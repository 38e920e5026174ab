"""Six steps captured from real decoding of the shipped model, stored in `audit/captured`.

Each is one cycle of one request: its `hydra27` tree as drafted (candidates that nobody proposed are inactive), the
target's logits, the law of each row after temperature and filters, and the laws that drafts were drawn from. NAME.npz
has the layout of `audit.sampler_file`, NAME.context.npz the logits and the tokens before row 0. Written by
`audit.record_steps`.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from audit.files import archive_fault
from audit.sampler_file import load_step
from lumotree.errors import InputError
from lumotree.sampling import SamplingParams
from lumotree.select_types import Step


@dataclass(frozen=True)
class Capture:
    """How a step was captured. prompts, prompt: name of a set and number of a prompt in it; params: no penalties, so
    that rows depend on logits alone."""

    name: str
    note: str
    prompts: str
    prompt: int
    drafter: str
    params: SamplingParams

    @property
    def stochastic(self) -> bool:
        """Whether drafts are drawn from declared laws."""
        return self.drafter.endswith("-sampled")


CAPTURES: tuple[Capture, ...] = (
    Capture("code-fixed", "temperature 1, no filter", "one", 0, "hydra27", SamplingParams(temperature=1.0)),
    Capture("code-hot-fixed", "temperature 1.5, no filter", "two", 1, "hydra27", SamplingParams(temperature=1.5)),
    Capture(
        "code-top-fixed", "temperature 1.2, top-k 8, then top-p 0.95", "one", 2, "hydra27",
        SamplingParams(temperature=1.2, top_k=8, top_p=0.95),
    ),
    Capture(
        "code-min-p-fixed", "temperature 1.3, min-p 0.02", "two", 3, "hydra27",
        SamplingParams(temperature=1.3, min_p=0.02),
    ),
    Capture(
        "code-sampled", "temperature 1, drafts drawn", "one", 4, "hydra27-sampled", SamplingParams(temperature=1.0)
    ),
    Capture(
        "code-top-sampled", "temperature 1.3, top-k 10, min-p 0.01, drafts drawn", "two", 5, "hydra27-sampled",
        SamplingParams(temperature=1.3, top_k=10, min_p=0.01),
    ),
)  # fmt: skip

FOLDER = Path(str(resources.files("audit").joinpath("captured")))


@dataclass(frozen=True)
class CapturedStep:
    """A captured step. logits fp32 `[N, V]` before temperature and filters; history: committed tokens before row 0."""

    capture: Capture
    step: Step
    logits: torch.Tensor
    history: NDArray[np.int64]


def capture_of(name: str) -> Capture:
    """The capture of that name. Raises InputError listing the known ones."""
    for capture in CAPTURES:
        if capture.name == name:
            return capture
    raise InputError(f"captured step: unknown name {name!r}; allowed: {', '.join(c.name for c in CAPTURES)}")


def captured(name: str, folder: Path = FOLDER) -> CapturedStep:
    """The stored step of that name. Raises InputError for an unknown name, or files that are missing or damaged."""
    capture = capture_of(name)
    step = load_step(folder / f"{name}.npz").step
    path = folder / f"{name}.context.npz"
    try:
        with np.load(path, allow_pickle=False) as archive:
            logits, history = archive["logits"], archive["history"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as cause:
        found = archive_fault(cause)
        raise InputError(f"captured step {path}: expected logits and history, found: {found}; reinstall") from cause
    if logits.shape != tuple(step.target.shape):
        raise InputError(f"captured step {path}: expected logits {list(step.target.shape)}, got {list(logits.shape)}")
    return CapturedStep(capture, step, torch.from_numpy(logits), history.astype(np.int64))
