"""Controls of a run of relations alone: each relation must break on one backend that is known to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from audit.metamorphic import RELATIONS, Relation
from audit.report import Control
from faults.catalogue import Fault
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES
from lumotree.contract import Contract, Dims


class _Forwarding:
    """A backend that is another one, but for what a subclass changes."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.contract = inner, inner.contract

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SpentRecord(_Forwarding):
    """What verification recorded is used up by the first publication: a second one leaves all as it is."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.spent: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        surface = next((s for s, methods in SURFACES.items() if name in methods), None)
        if surface is None or method is None:
            return method
        return partial(self._call, method, surface, name == SURFACES[surface][1])

    def _call(self, method: Callable[..., None], surface: str, publishes: bool, *args: Any) -> None:
        if not publishes:
            self.spent.discard(surface)
            method(*args)
        elif surface not in self.spent:
            self.spent.add(surface)
            method(*args)


def record_spent(spec: str) -> Any:
    """The backend `spec` as a `SpentRecord`."""
    return SpentRecord(load_backend(spec))


def wrapped(spec: str, fault: Fault) -> Any:
    """The backend `spec` with a fault in it."""
    return fault.wrap(load_backend(spec))


def one_layout_wrong(spec: str, fault: Fault) -> Any:
    """The backend `spec`, with `fault` in it only when made with another contract than its own, as its class makes it:
    `spec` may name an instance."""
    backend = load_backend(spec)
    own: Contract = backend.contract

    class Lopsided(_Forwarding):
        def __init__(self, contract: Contract = own) -> None:
            super().__init__(load_backend(spec) if contract == own else fault.wrap(type(backend)(contract=contract)))

    return Lopsided()


def relation_control(name: str, spec: str, faults: Sequence[Fault], seeds: Sequence[int], dims: Dims) -> Control:
    """Look for a defect that breaks a relation of the backend `spec`, on the seeds on which the backend was asked.

    cases: the backends that were asked.
    """
    relation, asked = RELATIONS[name], 0
    for label, make in _wrong(name, spec, faults):
        asked += 1
        if any(_breaks(relation, make, seed, dims) for seed in seeds):
            return Control(f"{label} under {name}", "detected", True, f"relation.{name}", None, asked)
    return Control(f"a known defect under {name}", "detected", False, None, None, asked)


def _wrong(name: str, spec: str, faults: Sequence[Fault]) -> Iterator[tuple[str, Callable[[], Any]]]:
    if name == "replay_twice":  # no fault of the catalogue lives outside pools and workspace
        yield "record spent", partial(record_spent, spec)
    for fault in faults:
        make = one_layout_wrong if name == "layouts" else wrapped
        yield fault.id, partial(make, spec, fault)


def _breaks(relation: Relation, make: Callable[[], Any], seed: int, dims: Dims) -> bool:
    backend = make()
    return not relation.why_not(backend) and bool(relation.run(backend, seed, dims))
