"""Positive controls of a recording: its own cycles, told falsely in one way, must be called false."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from audit.dump_chain import Entry, entries
from audit.dump_judge import DumpJudge, judged_dump
from audit.report import Control
from lumotree.record_file import CycleRecord

Tensors = dict[str, Tensor]
#: Makes an edited copy of a cycle's tensors, None where this cycle does not reach the fault.
Edit = Callable[[Entry, Tensors], Mapping[str, Tensor] | None]


def _not_published(name: str) -> Edit:
    def edit(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
        return {f"after.{name}": t[f"before.{name}"]} if entry.accepted else None

    return edit


def _kv_remap(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
    if len(entry.accepted) < 2:
        return None
    return {f"committed.{n}": t[f"committed.{n}"].roll(1, 1) for n in ("k", "v")}


def _stale_root(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
    tokens = t["tree.tokens"].clone()
    tokens[entry.lo] += 1
    return None if bool(t["opening.new"][entry.index]) else {"tree.tokens": tokens}


def _sibling(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
    """The path is said to end at another row of the same depth; states, KV and lengths are those of the real one."""
    tree, path = entry.tree, entry.accepted
    others = [r for r in tree.active_rows if path and r != path[-1] and tree.depth[r] == tree.depth[path[-1]]]
    if not others:
        return None
    rows = t["path.rows"].clone()
    rows[entry.index, : len(path)] = torch.tensor(tree.path(others[0]), dtype=torch.int32)
    return {"path.rows": rows}


def _counts(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
    """The engine counts one token fewer than it accepted."""
    if len(entry.accepted) < 2:
        return None
    after = t["path.length_after"].clone()
    after[entry.index] -= 1
    return {"path.length_after": after}


def _hidden(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
    if "hidden.next" not in t or not entry.accepted or entry.accepted[-1] == 0:
        return None
    rows = t["hidden.next"].clone()
    rows[entry.index] = t["hidden.rows"][entry.lo]
    return {"hidden.next": rows}


def _drafter(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
    if "drafter.history" not in t:
        return None
    hashes = t["drafter.history"].clone()
    hashes[1, :, entry.index] ^= 1
    return {"drafter.history": hashes}


def _elsewhere(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
    if "untouched" not in t:
        return None
    hashes = t["untouched"].clone()
    hashes[1, 0] ^= 1
    return {"untouched": hashes}


def _outputs(surface: str) -> Edit:
    """The root's output is said to be that of the last row."""

    def edit(entry: Entry, t: Tensors) -> Mapping[str, Tensor] | None:
        if f"{surface}.out" not in t or len(entry.tree.active_rows) < 2:
            return None
        out = t[f"{surface}.out"].clone()
        out[:, entry.lo] = out[:, entry.lo + entry.tree.active_rows[-1]]
        return {f"{surface}.out": out}

    return edit


EDITS: dict[str, Edit] = {
    "gdn rows not published.gdn": _not_published("recurrent"),
    "conv rows not published.conv": _not_published("conv"),
    "kv remap off by one.kv_new": _kv_remap,
    "stale root token.topology": _stale_root,
    "sibling path committed.gdn": _sibling,
    "accepted counts of another row.topology": _counts,
    "hidden row of the wrong end.hidden": _hidden,
    "drafter state not rolled back.drafter": _drafter,
    "slot of a finished request.topology": _elsewhere,
    **{f"outputs of another row.{s}": _outputs(s) for s in ("gdn", "conv", "attention")},
}


class Controls:
    """Tries every edit on the first cycle that reaches it."""

    def __init__(self) -> None:
        self.open = dict(EDITS)
        self.found: dict[str, Control] = {}

    def try_on(self, judge: DumpJudge, record: CycleRecord) -> None:
        """judge: as it stands before `record`; it is not changed."""
        for entry in entries(record):
            for name, edit in list(self.open.items()):
                told = edit(entry, record.tensors)
                if told is not None and any(not torch.equal(record.tensors[n], x) for n, x in told.items()):
                    del self.open[name]
                    lie = replace(record, tensors={**record.tensors, **told})
                    self.found[name] = _try(name, judge, lie, entry.index)

    def results(self) -> list[Control]:
        """In the order of `EDITS`; what no cycle of the recording reached is left out."""
        return [self.found[name] for name in EDITS if name in self.found]


def _try(name: str, judge: DumpJudge, record: CycleRecord, request: int) -> Control:
    fork = judge.fork()
    fork.judge(record, only=request)
    seen = [c for c, t in fork.tallies.items() if t.failed and judged_dump(c, record)]
    ratios = [t.worst for c, t in fork.tallies.items() if c in seen and t.worst is not None and t.worst > 1]
    ratio = max(ratios, default=float("inf")) if seen else None
    return Control(name, "detected", bool(seen), seen[0] if seen else None, ratio, 1)
