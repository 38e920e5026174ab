"""Snapshots on disk, so that an arm in another process, or on another day, can be compared: safetensors, no pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from audit.continuation_native import Snapshot, Trace
from lumotree.surfaces import Surfaces

_PARTS = ("recurrent", "conv", "k", "v", "draft_k", "draft_v", "hidden")


def save_trace(trace: Trace, path: Path) -> None:
    """Write all snapshots of an arm to one file."""
    tensors: dict[str, Tensor] = {}
    for name, snapshots in trace.items():
        for i, snapshot in enumerate(snapshots):
            found = {p: getattr(snapshot.surfaces, p) for p in _PARTS}
            found |= {"logits": snapshot.logits, "rows": snapshot.hidden}
            tensors |= {f"{name}|{i}|{p}": x.contiguous().clone() for p, x in found.items() if x is not None}
    save_file(tensors, path, metadata={f"{n}": str(len(s)) for n, s in trace.items()})


def load_trace(path: Path) -> Trace:
    """Read what `save_trace` wrote."""
    trace: Trace = {}
    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
        for name, count in file.metadata().items():
            trace[name] = [_snapshot(file, keys, f"{name}|{i}|") for i in range(int(count))]
    return trace


def _snapshot(file: Any, keys: set[str], start: str) -> Snapshot:
    parts = {p: file.get_tensor(start + p) for p in _PARTS if start + p in keys}
    surfaces = Surfaces(committed=parts["k"].shape[1], **parts)
    return Snapshot(surfaces, file.get_tensor(start + "logits"), file.get_tensor(start + "rows"))
