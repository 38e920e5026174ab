"""What a training run leaves: bf16 weights, config.json, and a report of plain numbers."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lumotree.checkpoint import SINGLE, write_checkpoint
from lumotree.errors import InputError
from lumotree.model_config import ModelConfig
from lumotree.training.corpus import Source, corpus_hash, of_split
from lumotree.training.evaluate import Scores
from lumotree.training.loop import Trained
from lumotree.training.settings import Settings

REPORT = "training.json"
LARGEST_BYTES = 12_000_000


def save(folder: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Write weights, in the dtypes that a checkpoint holds them in, and config.json into `folder`.

    Raises CheckpointError for tensors that do not fit the configuration, InputError if they take more than 12 MB.
    """
    table = config.parameters()
    tensors = {name: w.detach().to("cpu", table[name].dtypes[0] if name in table else w.dtype)
               for name, w in weights.items()}  # fmt: skip
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > LARGEST_BYTES:
        raise InputError(f"export: the weights take {size} bytes; allowed: at most {LARGEST_BYTES}")
    write_checkpoint(folder, config, tensors)


def training_report(
    settings: Settings,
    sources: list[Source],
    trained: Trained,
    scores: Scores,
    baselines: dict[str, float],
    folder: Path,
    device: str,
    command: str,
) -> dict[str, Any]:
    """Everything that says how the weights came about and what they are worth, as JSON data."""
    held_out = of_split(sources, "held-out")
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "settings": asdict(settings),
        "steps": trained.steps,
        "tokens": trained.steps * settings.batch * settings.length,
        "seconds": round(trained.seconds, 1),
        "captured_graph": trained.captured,
        "best_step": trained.best_step,
        "text": {
            "sha256": corpus_hash(sources),
            "files": {split: len(of_split(sources, split)) for split in ("train", "validation", "held-out")},  # type: ignore[arg-type]
            "bytes": {
                split: sum(len(s.data) for s in of_split(sources, split))  # type: ignore[arg-type]
                for split in ("train", "validation", "held-out")
            },
            "held_out_sha256": corpus_hash(held_out),
        },
        "held_out_bits_per_byte": {"model": scores.bits, **baselines},
        "held_out_tokens": scores.tokens,
        "draft_agreement": list(scores.agreement),
        "draft_bits": list(scores.draft_bits),
        "curve": [{"step": s, "target_nats": t, "draft_nats": d} for s, t, d in trained.curve],
        "validation_bits": [{"step": s, "bits": b} for s, b in trained.validations],
        "weights": {
            "bytes": (folder / SINGLE).stat().st_size,
            "sha256": hashlib.sha256((folder / SINGLE).read_bytes()).hexdigest(),
        },
    }
