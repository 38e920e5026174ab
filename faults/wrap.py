"""Ways to put a change in front of or behind a backend's methods; the wrapper keeps account of what it changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Wrap
from lumotree.backends.protocol import SURFACES, Accepted, Batch, StepOps, StepOut


class Faulty:
    """A backend in front of which some methods have been replaced; all others are the inner backend's.

    changed: name of each tensor that a wrapper has made different from what it would have been -> how often. Empty
    after a run means that the fault was not reached.
    """

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self.inner = inner
        self.changed: dict[str, int] = {}
        for name, method in methods.items():
            setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def note(self, name: str, before: Any, after: Any) -> None:
        """Record that `after` is not what it would have been, if it differs from `before` in any bit."""
        if differs(before, after):
            self.changed[name] = self.changed.get(name, 0) + 1


def differs(a: Any, b: Any) -> bool:
    """Whether two nests of tensors and plain values differ; NaN equals NaN here."""
    if a is b:
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape != b.shape or a.dtype != b.dtype or not torch.equal(_numbers(a), _numbers(b))
    if is_dataclass(a):
        return type(a) is not type(b) or any(differs(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) != len(b) or any(differs(x, y) for x, y in zip(a, b, strict=True))
    return bool(a != b)


def _numbers(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def copied(pool: Any) -> Any:
    """A copy of a pool tensor or of a KV cache."""
    return pool.clone() if isinstance(pool, Tensor) else replace(pool, k=pool.k.clone(), v=pool.v.clone())


def duplicate(ops: Any) -> Any:
    """A copy of a set of operands."""
    return type(ops)(**{name: value.clone() for name, value in vars(ops).items()})


def within(batch: Batch, ops: Any) -> Batch:
    """The batch with positions that the tables of the rotation have: a real table is longer than any request."""
    return replace(batch, position=batch.position.clamp(max=len(ops.cos) - 1))


@dataclass(frozen=True)
class Verified:
    """One verify call and what it left. pool_before: as it was before the call."""

    ops: Any
    pool: Any
    pool_before: Any
    batch: Batch
    out: Tensor
    layer: int


@dataclass(frozen=True)
class Published:
    """One publish call and what it left."""

    pool: Any
    pool_before: Any
    batch: Batch
    accepted: Accepted
    layers: Sequence[int]


@dataclass(frozen=True)
class Stepped:
    """One native step of one surface and what it left. ops, out: of the surface."""

    ops: Any
    pool: Any
    pool_before: Any
    batch: Batch
    out: Tensor
    layer: int


def on_verify(
    surface: str,
    *,
    ops: Callable[[Any, Batch], Any] | None = None,
    batch: Callable[[Batch], Batch] | None = None,
    pool: Callable[[Tensor, Batch, int], Tensor] | None = None,
    after: Callable[[Verified], bool | None] | None = None,
) -> Wrap:
    """Change what verification of a surface reads (operands, metadata, a copy of the pool) or what it left behind.

    after returns True when it wrote to memory that is none of the call's own.
    """
    verify = SURFACES[surface][0]

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)

        def method(given: Any, pool_: Any, batch_: Batch, ws: Any, out: Tensor, layer: int) -> None:
            o, b, p = ops(given, batch_) if ops else given, batch(batch_) if batch else batch_, pool_
            if pool is not None:
                p = pool(pool_, batch_, layer)
            if batch is not None and surface == "attention":
                b = within(b, o)
            for name, x, y in (("ops", given, o), ("batch", batch_, b), ("pool", pool_, p)):
                faulty.note(f"{verify}.{name}", x, y)
            before = copied(pool_) if after else None
            getattr(inner, verify)(o, p, b, ws, out, layer)
            if after is not None:
                left = copied(pool_), out.clone(), duplicate(given), batch_.position.clone()
                elsewhere = after(Verified(given, pool_, before, batch_, out, layer))
                faulty.note(f"{verify}.left", left, (pool_, out, given, batch_.position))
                faulty.note(f"{verify}.elsewhere", False, bool(elsewhere))

        setattr(faulty, verify, method)
        return faulty

    return wrap


def on_publish(
    surface: str,
    *,
    batch: Callable[[Batch], Batch] | None = None,
    accepted: Callable[[Accepted, Batch], Accepted | tuple[Accepted, Batch]] | None = None,
    layers: Callable[[Sequence[int], Any], Sequence[int]] | None = None,
    after: Callable[[Published], None] | None = None,
    times: int = 1,
) -> Wrap:
    """Change what publication of a surface is told, how often it is done, or what it left behind.

    accepted may return a batch too, in which its paths are linked. layers is given the pool as well.
    """
    publish = SURFACES[surface][1]

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)

        def method(pool: Any, given: Batch, accepted_: Accepted, ws: Any, layers_: Sequence[int]) -> None:
            b, a, chosen = batch(given) if batch else given, accepted_, layers_
            if accepted is not None:
                new = accepted(accepted_, given)
                a, b = new if isinstance(new, tuple) else (new, b)
            if layers is not None:
                chosen = layers(layers_, pool)
            told = (("batch", given, b), ("accepted", accepted_, a), ("layers", list(layers_), list(chosen)))
            for name, x, y in told:
                faulty.note(f"{publish}.{name}", x, y)
            before = copied(pool) if after else None
            for again in range(times):
                left = copied(pool) if again else None
                getattr(inner, publish)(pool, b, a, ws, chosen)
                if again:
                    faulty.note(f"{publish}.again", left, pool)
            if not times:
                faulty.note(f"{publish}.missing", torch.zeros_like(accepted_.length), accepted_.length)
            if after is not None:
                left = copied(pool)
                after(Published(pool, before, given, accepted_, list(layers_)))
                faulty.note(f"{publish}.left", left, pool)

        setattr(faulty, publish, method)
        return faulty

    return wrap


def on_native(
    surface: str,
    *,
    ops: Callable[[Any, Batch], Any] | None = None,
    batch: Callable[[Batch], Batch] | None = None,
    after: Callable[[Stepped], None] | None = None,
) -> Wrap:
    """Change what the one-token step of a surface reads or what it left behind; the other surfaces step as they are."""

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)

        def method(given: StepOps, pools: Any, batch_: Batch, out: StepOut, layer: int) -> None:
            own = getattr(given, surface)
            if own is None:
                inner.native_step(given, pools, batch_, out, layer)
                return
            rest = replace(given, **{surface: None})
            if any(v is not None for v in vars(rest).values()):
                inner.native_step(rest, pools, batch_, replace(out, **{surface: None}), layer)
            o, b = ops(own, batch_) if ops else own, batch(batch_) if batch else batch_
            if batch is not None and surface == "attention":
                b = within(b, o)
            faulty.note("native_step.ops", own, o)
            faulty.note("native_step.batch", batch_, b)
            pool = {"gdn": pools.recurrent, "conv": pools.conv, "attention": pools.cache}[surface]
            before = copied(pool) if after else None
            own_out = getattr(out, surface)
            inner.native_step(StepOps(**{surface: o}), pools, b, StepOut(**{surface: own_out}), layer)
            if after is not None:
                left = copied(pool), own_out.clone()
                after(Stepped(own, pool, before, batch_, own_out, layer))
                faulty.note("native_step.left", left, (pool, own_out))

        setattr(faulty, "native_step", method)  # noqa: B010
        return faulty

    return wrap


def together(*wraps: Wrap) -> Wrap:
    """Several changes at once, one account."""

    def wrap(inner: Any) -> Any:
        backend: Any = inner
        account: dict[str, int] = {}
        for one in wraps:
            backend = one(backend)
            backend.changed = account
        return backend

    return wrap


def everywhere(surface: str, ops: Callable[[Any, Batch], Any]) -> Wrap:
    """Change the operands of a surface in verification and in the one-token step alike: the kernel agrees with itself
    and only something that knows the contract can see it."""
    return together(on_verify(surface, ops=ops), on_native(surface, ops=ops))


@dataclass
class Kept:
    """A backend's workspace and what a fault keeps beside it, rewound together."""

    inner: Any
    memory: dict[str, Any]


def remembering(inner: Any, methods: Callable[[Faulty], dict[str, Callable[..., Any]]]) -> Faulty:
    """A faulty backend whose workspace also holds a fault's memory; replaced methods are given the `Kept`."""
    faulty = Faulty(inner)

    def passing(name: str, at: int) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            return getattr(inner, name)(*args[:at], args[at].inner, *args[at + 1 :])

        return method

    def allocate(dims: Any, limits: Any, device: Any) -> Kept:
        return Kept(inner.allocate(dims, limits, device), {})

    setattr(faulty, "allocate", allocate)  # noqa: B010
    places = {v: 3 for v, _ in SURFACES.values()} | {p: 3 for _, p in SURFACES.values()} | {"export": 1}
    for name, at in places.items():
        if callable(getattr(inner, name, None)):
            setattr(faulty, name, passing(name, at))
    for name, method in methods(faulty).items():
        setattr(faulty, name, method)
    return faulty
