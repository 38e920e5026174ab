"""What a recording has told so far about each request: the next cycle must begin where the last one ended."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from audit.dump_chain import Entry
from audit.dump_drafter import first_entry
from lumotree.errors import RecordError
from lumotree.record_file import CycleRecord


@dataclass
class Held:
    """One request between two cycles: committed tokens, pending token (None before the first cycle), state of its slot
    `[Lg, ..]`, keys and values `[La, length, Hkv, dh]`; hidden and drafter rows as last recorded, None if never."""

    length: int
    pending: int | None
    recurrent: Tensor
    conv: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor | None = None
    drafter: tuple[Tensor, Tensor] | None = None


class Cursor:
    """Where the next request's rows begin in the tensors that hold one request after another."""

    def __init__(self, record: CycleRecord) -> None:
        self.record = record
        self.at = dict.fromkeys(("opening", "drafter.opening", "committed", "drafter"), 0)

    def take(self, kind: str, count: int, request: str) -> slice:
        """The next `count` rows. Raises RecordError when the tensor does not hold them."""
        name, dim = {"drafter.opening": ("drafter.opening_k", 0), "drafter": ("drafter.k", 0)}.get(
            kind, (f"{kind}.k", 1)
        )
        stop, size = self.at[kind] + count, self.record.tensors[name].shape[dim]
        if stop > size:
            raise RecordError(
                f"cycle {self.record.sequence}: {name} holds {size} tokens, expected at least {stop} for request "
                f"{request!r}"
            )
        start, self.at[kind] = self.at[kind], stop
        return slice(start, stop)


class Ledger:
    """All requests of a recording, by name."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}

    def opening(self, entry: Entry, cursor: Cursor) -> Held:
        """What a request held before the cycle. One seen for the first time brings its whole cache.

        Raises RecordError when it does not, or brings it twice.
        """
        t, i = entry.record.tensors, entry.index
        new = bool(t["opening.new"][i])
        if new == (entry.name in self.held):
            what = "was recorded before, and opens again" if new else "is seen for the first time but brings no cache"
            raise RecordError(f"cycle {entry.record.sequence}: request {entry.name!r} {what}; a cycle is missing")
        if not new:
            return self.held[entry.name]
        rows = cursor.take("opening", entry.prefix, entry.name)
        drafter = None
        if entry.record.has("drafter"):
            own = cursor.take("drafter.opening", first_entry(entry.prefix), entry.name)
            drafter = (t["drafter.opening_k"][own], t["drafter.opening_v"][own])
        hidden = t["hidden.before"][i] if "hidden.before" in t else None
        return Held(
            entry.prefix, None, t["before.recurrent"][:, i], t["before.conv"][:, i],
            t["opening.k"][:, rows], t["opening.v"][:, rows], hidden, drafter,
        )  # fmt: skip

    def close(self, entry: Entry, held: Held, committed: slice, drafted: slice) -> None:
        """Remember what the record says was there afterwards."""
        t, i = entry.record.tensors, entry.index
        drafter = held.drafter if entry.record.has("drafter") else None
        if drafter is not None:
            new = (t["drafter.k"][drafted], t["drafter.v"][drafted])
            drafter = (torch.cat([drafter[0], new[0]]), torch.cat([drafter[1], new[1]]))
        self.held[entry.name] = Held(
            int(t["path.length_after"][i]), int(t["path.pending"][i]), t["after.recurrent"][:, i],
            t["after.conv"][:, i], torch.cat([held.k, t["committed.k"][:, committed]], 1),
            torch.cat([held.v, t["committed.v"][:, committed]], 1),
            t["hidden.next"][i] if "hidden.next" in t else None, drafter,
        )  # fmt: skip
