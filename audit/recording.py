"""What a backend left after every call of an audit, so that two backends can be held against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from audit.cases import CaseSpec
from audit.component import CaseResult, audit_case
from audit.distance import same_bits
from audit.tally import judged
from lumotree.backends.protocol import SURFACES
from lumotree.errors import InputError

#: What a NaN, or a number beyond, counts as in units of its tensor's root mean square.
UNKNOWN = 30.0


class OtherBitsError(InputError):
    """A recording that is compared while it is made has left the one that it is compared with."""


@dataclass
class Recording:
    """calls: (method, tensors that it left). failed: checks with a cell outside, in their order. refused: the message
    with which the audit ended early, or "". result: what the audit counted, None if it was refused."""

    calls: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    failed: tuple[str, ...] = ()
    refused: str = ""
    result: CaseResult | None = None

    def same(self, other: Recording) -> bool:
        """Whether every call left the same bits and the same checks failed."""
        ends = (self.failed, bool(self.refused), len(self.calls)) == (
            other.failed, bool(other.refused), len(other.calls),
        )  # fmt: skip
        return ends and all(_same_call(a, b) for a, b in zip(self.calls, other.calls, strict=True))

    def agreement(self, other: Recording) -> float:
        """Part of the calls that left the same bits."""
        pairs = list(zip(self.calls, other.calls, strict=False))
        return sum(_same_call(a, b) for a, b in pairs) / max(len(pairs), 1)

    def vector(self, clean: Recording) -> Tensor:
        """All that was left as one fp32 vector, each tensor in units of its root mean square in a clean recording and
        weighted so that it counts as much as any other. NaN becomes a large number; so does what an early end, or
        another order of calls, left out."""
        parts, along = [], True
        for at, (name, theirs) in enumerate(clean.calls):
            ours = self.calls[at] if at < len(self.calls) else ("", [])
            along = along and ours[0] == name and [t.shape for t in ours[1]] == [t.shape for t in theirs]
            left = ours[1] if along else [torch.full_like(t, torch.nan) for t in theirs]
            parts += [_scaled(x, y) for x, y in zip(left, theirs, strict=True)]
        return torch.cat(parts)


def _scaled(x: Tensor, clean: Tensor) -> Tensor:
    y = clean.double()
    known = torch.isfinite(y)
    size = y[known].square().mean().sqrt().clamp_min(1e-30) if bool(known.any()) else torch.tensor(1.0)
    units = (x.double() / size).nan_to_num(nan=UNKNOWN, posinf=UNKNOWN, neginf=-UNKNOWN).clamp(-UNKNOWN, UNKNOWN)
    return (units / math.sqrt(max(x.numel(), 1))).float().flatten()


def apart(a: Tensor, b: Tensor) -> float:
    """Distance of two vectors of recordings."""
    return float(torch.linalg.vector_norm(a - b))


def _same_call(a: tuple[str, list[Tensor]], b: tuple[str, list[Tensor]]) -> bool:
    return a[0] == b[0] and all(x.shape == y.shape and same_bits(x, y) for x, y in zip(a[1], b[1], strict=True))


class Recorder:
    """A backend with every call's remains kept; with `like`, it stops at the first call that left other bits."""

    def __init__(self, inner: Any, like: Recording | None = None) -> None:
        self.inner, self.recording = inner, Recording()
        self._like: Iterator[tuple[str, list[Tensor]]] | None = iter(like.calls) if like else None
        for surface, (verify, publish) in SURFACES.items():
            if callable(getattr(inner, verify, None)):
                setattr(self, verify, self._verify(surface, verify))
                setattr(self, publish, self._publish(publish))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def native_step(self, ops: Any, pools: Any, batch: Any, out: Any, layer: int) -> None:
        """The inner step; keeps outputs and pools of the surfaces that were stepped."""
        self.inner.native_step(ops, pools, batch, out, layer)
        pool = {"gdn": [pools.recurrent], "conv": [pools.conv], "attention": [pools.cache.k, pools.cache.v]}
        self._keep("native_step", [t for s in SURFACES if getattr(out, s) is not None
                                   for t in (getattr(out, s), *pool[s])])  # fmt: skip

    def _verify(self, surface: str, name: str) -> Any:
        def method(ops: Any, pool: Any, batch: Any, ws: Any, out: Tensor, layer: int) -> None:
            getattr(self.inner, name)(ops, pool, batch, ws, out, layer)
            self._keep(name, [out[batch.active], *_tensors(pool)])

        return method

    def _publish(self, name: str) -> Any:
        def method(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
            getattr(self.inner, name)(pool, batch, accepted, ws, layers)
            self._keep(name, _tensors(pool))

        return method

    def _keep(self, name: str, tensors: list[Tensor]) -> None:
        call = name, [t.clone() for t in tensors]
        self.recording.calls.append(call)
        if self._like is not None and not _same_call(call, next(self._like, ("", []))):
            raise OtherBitsError(f"call {len(self.recording.calls)}, {name}, left other bits")


def _tensors(pool: Any) -> list[Tensor]:
    return [pool] if isinstance(pool, Tensor) else [pool.k, pool.v]


def record(backend: Any, spec: CaseSpec, like: Recording | None = None) -> Recording:
    """Audit a case and keep what every call left. Raises OtherBitsError at the first call that is not as in `like`."""
    recorder = Recorder(backend, like)
    try:
        result = audit_case(recorder, spec)
    except OtherBitsError:
        raise
    except InputError as refusal:
        recorder.recording.refused = str(refusal)
        return recorder.recording
    recorder.recording.result = result
    recorder.recording.failed = tuple(
        t.check for t in result.tallies.values() if t.failed and judged(t.check, backend.contract)
    )
    return recorder.recording


def reproduces(backend: Any, spec: CaseSpec, seen: Recording) -> bool:
    """Whether a backend leaves the very bits of a recording on a case; stops at the first that are others."""
    try:
        return record(backend, spec, seen).same(seen)
    except OtherBitsError:
        return False
