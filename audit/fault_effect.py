"""Whether a fault that no check sees has any effect on a kernel: what every call left, with the fault and without.

What a kernel does next follows from its arguments, its pools, its workspace and itself. Where all of these hold the
same bits behind every call, the fault has not changed what the kernel does.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from audit.cases import CaseSpec
from audit.fault_programs import PROGRAMS
from audit.fault_trial import Trial, component_trial, program_trial, relation_trial
from audit.guard import items_of
from audit.metamorphic import RELATIONS
from faults import Fault, Faulty
from faults.catalogue import Wrap
from faults.wrap import Kept
from lumotree.backends.protocol import SURFACES

_METHODS = (*(method for methods in SURFACES.values() for method in methods), "native_step", "export")


class Watched(Faulty):
    """A faulty backend; `log` is given a digest of all that each call left: arguments, result, the kernel itself.

    What a fault remembers for itself is no part of the kernel: it counts where it changes what a later call leaves.
    """

    def __init__(self, faulty: Faulty, log: list[str]) -> None:
        super().__init__(faulty)
        self.changed = faulty.changed
        kernel = faulty
        while isinstance(kernel, Faulty):
            kernel = kernel.inner
        for name in _METHODS:
            if callable(method := getattr(faulty, name, None)):
                setattr(self, name, _logged(name, method, kernel, log))


def _logged(name: str, method: Callable[..., Any], kernel: Any, log: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        result = method(*args)
        log.append(f"{name} {digest([args, result, kernel])}")
        return result

    return call


def digest(nest: Any) -> str:
    """SHA-256 of the tensors (dtype, shape, bits) and plain values of a nest, in its order."""
    found = hashlib.sha256()
    _feed(found.update, nest, [])
    return found.hexdigest()


def _feed(take: Callable[[bytes], None], value: Any, above: list[int]) -> None:
    if isinstance(value, Tensor):
        take(f"{value.dtype} {list(value.shape)}".encode())
        take(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Kept):
        _feed(take, value.inner, above)
    elif (items := items_of(value)) is None:
        take((repr(value) if isinstance(value, int | float | str | None) else type(value).__name__).encode())
    elif id(value) not in above:  # a nest may hold itself
        for key, part in items:
            take(str(key).encode())
            _feed(take, part, [*above, id(value)])


def same_with_and_without(backend: Any, fault: Fault, specs: Sequence[CaseSpec], seed: int) -> int:
    """How many calls left the same with the fault and without, over cases, relations and programs.

    0 if one did not, or if the kernel holds what cannot be copied: both runs start from the same kernel, scratch
    memory included.
    """
    logs: list[list[str]] = []
    for wrap in (fault.wrap, Faulty):
        try:
            kernel = copy.deepcopy(backend)
        except (TypeError, RuntimeError):
            return 0
        log: list[str] = []
        _run(kernel, replace(fault, wrap=_watching(wrap, log), knob=None), specs, seed)
        logs.append(log)
    return len(logs[0]) if logs[0] == logs[1] else 0


def _watching(wrap: Wrap, log: list[str]) -> Wrap:
    return lambda inner: Watched(wrap(inner), log)


def _run(backend: Any, fault: Fault, specs: Sequence[CaseSpec], seed: int) -> list[Trial]:
    trials = [component_trial(backend, fault, spec) for spec in specs]
    related = [relation_trial(backend, fault, name, seed) for name in RELATIONS]
    return [*trials, *(t for t in related if t), *(program_trial(backend, fault, name, seed) for name in PROGRAMS)]
