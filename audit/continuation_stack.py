"""What is decoded with: a model, a backend for each surface, and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audit.composite import Composite
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES, covered_surfaces
from lumotree.byte_tokens import VOCAB, encode
from lumotree.cycle_types import Stack
from lumotree.errors import InputError
from lumotree.model import load_model
from lumotree.prompts import prompt_set
from lumotree.shipped import shipped_folder

#: Tokens of a prompt. Long enough for a state with a past, short enough that 22 of them are fed in seconds.
PROMPT = 60
#: Serves the surfaces that a backend does not have, by kind of device.
FALLBACK = {"cpu": "torch", "cuda": "triton"}


@dataclass(frozen=True)
class StackSpec:
    """How a process makes its stack: folder of the model (None = the shipped one), backend, other backends by surface,
    torch device."""

    checkpoint: str | None = None
    backend: str = "torch"
    surfaces: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"


def model_folder(spec: StackSpec) -> Path:
    """The folder of the model. Raises InputError when the shipped one is not there."""
    if spec.checkpoint is not None:
        return Path(spec.checkpoint)
    folder = shipped_folder()
    if not (folder / "config.json").is_file():
        raise InputError(
            f"the shipped model is missing: expected {folder}/config.json; reinstall, or give --checkpoint"
        )
    return folder


def make_stack(spec: StackSpec) -> Stack:
    """Load model and backends. Raises InputError for anything that cannot be loaded or does not fit."""
    model = load_model(model_folder(spec), spec.device)
    backend = candidate(spec)
    head = model.draft_head(backend) if model.config.mtp_layers else None
    return Stack(model, backend, head)


def candidate(spec: StackSpec) -> Any:
    """The backend, or several put together. Raises BackendError."""
    base = load_backend(spec.backend)
    parts = served_by(spec, base)
    if all(name == spec.backend for name in parts.values()):
        return base
    loaded: dict[str, Any] = {spec.backend: base}
    for name in parts.values():
        if name not in loaded:
            loaded[name] = load_backend(name)
    return Composite({s: loaded[name] for s, name in parts.items()})


def served_by(spec: StackSpec, base: Any) -> dict[str, str]:
    """Surface -> name of the backend that serves it. Raises InputError for an unknown surface."""
    chosen: Mapping[str, str] = dict(spec.surfaces)
    unknown = [s for s in chosen if s not in SURFACES]
    if unknown:
        raise InputError(f"--surface: expected one of {', '.join(SURFACES)}, got {unknown[0]!r}")
    kind = spec.device.partition(":")[0]
    covered = covered_surfaces(base)
    own = {s: spec.backend if all(covered[s]) else FALLBACK.get(kind, "torch") for s in SURFACES}
    return {s: chosen.get(s, own[s]) for s in SURFACES}


def prompts(stack: Stack, count: int, which: str, seed: int) -> list[tuple[int, ...]]:
    """Token prompts of PROMPT tokens: texts held out of training for the shipped vocabulary, else random tokens.

    which: "heldout" or "calibration"; the two share no text.
    """
    if stack.model.vocab == VOCAB:
        texts = prompt_set({"heldout": "one", "calibration": "two"}[which])
        if count > len(texts):
            raise InputError(f"prompts: expected at most {len(texts)} of set {which!r}, got {count}")
        return [tuple(encode(p.text)[:PROMPT]) for p in texts[:count]]
    rng = np.random.default_rng(np.random.SeedSequence([seed, {"heldout": 47, "calibration": 53}[which]]))
    return [tuple(rng.integers(0, stack.model.vocab, PROMPT).tolist()) for _ in range(count)]
