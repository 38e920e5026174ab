"""How far two arms are apart behind a cycle, surface by surface, and where they first differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from audit.continuation_native import Snapshot
from audit.distance import differing, kl_rows, relative_l2

#: Surfaces in the order of publication; "next" is the law of the token behind each committed row.
SURFACES = ("gdn", "conv", "kv_new", "kv_history", "next", "hidden", "drafter", "lengths")


@dataclass(frozen=True)
class Apart:
    """One surface of one cycle. distance: largest relative L2 over layers (nats for "next"; 0 or infinity for
    lengths). cells: compared tensors of one layer; bitwise: those equal in every bit. layer: the first that is not (-1:
    none, or no layers). part: the tensor; elements: how many of it differ, of how many."""

    surface: str
    distance: float
    cells: int
    bitwise: int
    layer: int = -1
    part: str = ""
    elements: int = 0
    of: int = 0


@dataclass(frozen=True)
class Greedy:
    """The token behind the last committed row. same: both arms choose it. margin: of the reference's two largest
    logits; spread: largest difference of a logit between the arms."""

    same: bool
    margin: float
    spread: float


@dataclass(frozen=True)
class Compared:
    """One cycle of one request in two arms, `apart` by surface; greedy is None where nothing was to be chosen."""

    apart: dict[str, Apart]
    greedy: Greedy


Cell = tuple[int, str, Tensor, Tensor]


def compare(got: Snapshot, want: Snapshot, before: int, *, signed_zeros: bool = True) -> Compared:
    """`got` against the reference `want`; before: tokens committed before the cycle. signed_zeros: whether the sign of
    a zero of the recurrent state is one of its bits (`Contract.zeros`).

    KV of positions from `before` on is new, that before it history. Arms of different length differ in every surface.
    """
    if got.surfaces.committed != want.surfaces.committed:
        odd = {s: Apart(s, float("inf"), 1, 0, part="committed tokens") for s in SURFACES}
        return Compared(odd, Greedy(False, 0.0, float("inf")))
    if not signed_zeros:
        got, want = _unsigned(got), _unsigned(want)
    apart = {s: _apart(s, list(_cells(s, got, want, before))) for s in SURFACES if s not in ("next", "lengths")}
    apart["next"] = _next(got.logits, want.logits)
    apart["lengths"] = Apart("lengths", 0.0, 1, 1)
    return Compared(apart, _greedy(got.logits[-1], want.logits[-1]))


def _unsigned(snapshot: Snapshot) -> Snapshot:
    surfaces = replace(snapshot.surfaces, recurrent=snapshot.surfaces.recurrent + 0.0)
    return replace(snapshot, surfaces=surfaces)


def _cells(surface: str, got: Snapshot, want: Snapshot, before: int) -> Iterator[Cell]:
    """(layer, part, got, want) of a surface."""
    a, b = got.surfaces, want.surfaces
    if surface == "gdn":
        yield from _layers("recurrent", a.recurrent, b.recurrent)
    elif surface == "conv":
        yield from _layers("conv", a.conv, b.conv)
    elif surface in ("kv_new", "kv_history"):
        part = slice(before, None) if surface == "kv_new" else slice(0, before)
        for name in ("k", "v"):
            x, y = getattr(a, name)[:, part], getattr(b, name)[:, part]
            if x.shape[1]:
                yield from _layers(name, x, y)
    elif surface == "hidden":
        yield -1, "rows", got.hidden, want.hidden
        yield from _optional("hidden", a.hidden, b.hidden)
    else:
        for name in ("draft_k", "draft_v"):
            yield from _optional(name, getattr(a, name), getattr(b, name))


def _layers(part: str, a: Tensor, b: Tensor) -> Iterator[Cell]:
    for layer, (x, y) in enumerate(zip(a, b, strict=True)):
        yield layer, part, x, y


def _optional(part: str, a: Tensor | None, b: Tensor | None) -> Iterator[Cell]:
    if a is not None and b is not None and b.numel():
        yield -1, part, a, b
    elif (a is None) != (b is None):
        yield -1, part, torch.zeros(1), torch.full((1,), float("nan"))


def _apart(surface: str, cells: list[Cell]) -> Apart:
    worst, same, first = 0.0, 0, None
    for layer, part, x, y in cells:
        count = differing(x, y)
        same += count == 0
        if count:
            # A NaN on either side is no distance, so it is an infinite one.
            far = float(relative_l2(x, y))
            worst = max(worst, far if far == far else float("inf"))
            if first is None or layer < first[0]:
                first = (layer, part, count, x.numel())
    if first is None:
        return Apart(surface, worst, len(cells), same)
    return Apart(surface, worst, len(cells), same, first[0], first[1], first[2], first[3])


def _next(got: Tensor, want: Tensor) -> Apart:
    """KL(reference || arm) of the last row; bits of the logits of every row."""
    same = sum(differing(x, y) == 0 for x, y in zip(got, want, strict=True))
    count = differing(got, want)
    if not count:
        return Apart("next", 0.0, len(want), same)
    nats = float("inf")
    if bool(got[-1].isfinite().all()) and bool(want[-1].isfinite().all()):
        p, q = (torch.softmax(x[-1:].double(), -1) for x in (want, got))
        nats = float(kl_rows(p, q)[0])
    return Apart("next", nats, len(want), same, -1, "logits", count, got.numel())


def _greedy(got: Tensor, want: Tensor) -> Greedy:
    top = torch.topk(want.double(), 2).values
    spread = float((got.double() - want.double()).abs().amax())
    return Greedy(
        int(got.argmax()) == int(want.argmax()), float(top[0] - top[1]), spread if spread == spread else float("inf")
    )
