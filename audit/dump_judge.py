"""Judges recorded cycles, one after another: what was published against what the recorded operands demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from audit.distance import differing_cells, differing_mask, same_bits
from audit.dump_chain import Chain, ChainRow, Entry, LayerChain, entries
from audit.dump_drafter import drafter_entries, entry_count
from audit.dump_ledger import Cursor, Held, Ledger
from audit.dump_oracle import DumpOracle
from audit.tally import Place, Tallies
from audit.truth import canonical
from lumotree.errors import PathError, RecordError
from lumotree.record_file import CycleRecord
from lumotree.recorder import sha256_of

#: Check id -> title, surface, rung. In this order they are reported.
DUMP_CHECKS: dict[str, tuple[str, str, str]] = {
    "dump.path": ("accepted path, pending token", "topology", "exact"),
    "dump.lengths": ("positions and lengths", "topology", "exact"),
    "dump.elsewhere": ("other slots untouched", "topology", "bitwise"),
    "dump.weights": ("weights as before", "topology", "bitwise"),
    "dump.gdn.before": ("begins where it ended", "gdn", "bitwise"),
    "dump.conv.before": ("begins where it ended", "conv", "bitwise"),
    "dump.gdn.out": ("tree outputs = chain", "gdn", "bitwise"),
    "dump.conv.out": ("tree outputs = chain", "conv", "bitwise"),
    "dump.attention.out": ("tree outputs = chain", "attention", "bitwise"),
    "dump.gdn.state": ("published states = chain", "gdn", "bitwise"),
    "dump.conv.state": ("published history = chain", "conv", "bitwise"),
    "dump.kv_new.candidate": ("candidates' KV = chain", "kv_new", "bitwise"),
    "dump.kv_new.values": ("candidates' values = operands", "kv_new", "bitwise"),
    "dump.kv_new.committed": ("committed KV = candidates'", "kv_new", "bitwise"),
    "dump.kv_history": ("earlier KV unchanged", "kv_history", "bitwise"),
    "dump.hidden": ("hidden row of the end", "hidden", "bitwise"),
    "dump.drafter": ("drafter's earlier entries", "drafter", "bitwise"),
    "dump.drafter.new": ("drafter's new entries", "drafter", "bitwise"),
    "dump.gdn.derived": ("against float64", "gdn", "derived"),
    "dump.conv.derived": ("against float64", "conv", "derived"),
    "dump.attention.derived": ("against float64", "attention", "derived"),
}

#: What a model's layers hold, the same in every cycle; of tables the positions that both cycles have.
TABLES = ("attention.cos", "attention.sin")
WEIGHTS = ("gdn.A_log", "gdn.dt_bias", "conv.weight", *TABLES)

#: Groups of a record that something is judged by; a cycle without one that others have was not judged by it.
JUDGED_GROUPS = ("gdn", "conv", "attention", "untouched", "hidden", "drafter")

#: Checks that a surface which claims only "algebra" is not held to.
_CLAIMED = {
    "dump.gdn.out": "gdn",
    "dump.gdn.state": "gdn",
    "dump.conv.out": "conv",
    "dump.attention.out": "attention",
    "dump.kv_new.candidate": "attention",
}


def judged_dump(check: str, record: CycleRecord) -> bool:
    """Whether a check can fail under the recorded contract."""
    surface = _CLAIMED.get(check)
    return surface is None or record.contract.claim(surface) == "bitwise"


class DumpJudge:
    """Judges one recording. backend: whose `native_step` makes the chain, None to judge by float64 bounds alone.

    head: the model's draft head, if the drafter's entries are to be recomputed. device: where both run.
    """

    def __init__(self, backend: Any | None, head: Any | None = None, device: str = "cpu") -> None:
        self.backend, self.head, self.device = backend, head, device
        self.tallies, self.ledger = Tallies(), Ledger()
        self.first: CycleRecord | None = None
        self.previous, self.expected = "", 0
        self.case = ""
        self.carried = 0
        self.lacking: dict[str, int] = {}
        self._weights: dict[str, Tensor] = {}
        self._moved = {"gdn": False, "conv": False}

    def fork(self) -> DumpJudge:
        """A judge that knows what this one knows and has judged nothing yet."""
        copy = DumpJudge(self.backend, self.head, self.device)
        copy.ledger.held = dict(self.ledger.held)
        copy.first, copy.previous, copy.expected = self.first, self.previous, self.expected
        copy._weights = dict(self._weights)
        return copy

    @property
    def still(self) -> list[str]:
        """Surfaces whose recorded state never changed: a recording of nothing passes every comparison."""
        return [surface for surface, moved in self._moved.items() if not moved]

    def judge(self, record: CycleRecord, only: int | None = None) -> None:
        """Judge the next cycle, or of its requests `only` one.

        Raises InputError for a record that does not follow the last one or is none.
        """
        self._follows(record)
        self.case = f"cycle {record.sequence}"
        cursor = Cursor(record)
        opened = [(e, self.ledger.opening(e, cursor), bool(record.tensors["opening.new"][e.index]))
                  for e in entries(record)]  # fmt: skip
        self.carried += sum(not new for _, _, new in opened)
        self._untouched(record)
        self._same_weights(record)
        for surface, name in (("gdn", "recurrent"), ("conv", "conv")):
            before, after = record.tensors[f"before.{name}"], record.tensors[f"after.{name}"]
            self._moved[surface] |= not same_bits(before, after)
        for entry, held, new in opened:
            # Rows of all requests lie one after another: those of a request that is not judged are taken all the same.
            rows = self._taken(entry, cursor)
            if only in (None, entry.index):
                self._judge_request(entry, held, rows, new)

    def _follows(self, record: CycleRecord) -> None:
        where = f"cycle {record.sequence}"
        first = self.first = self.first or record
        if record.run != first.run:
            raise RecordError(f"{where}: recorded in run {record.run}, the ones before in {first.run}; keep them apart")
        for name in ("contract", "dims", "backend"):
            got, want = getattr(record, name), getattr(first, name)
            if got != want:
                raise RecordError(f"{where}: {name} is {got}, in cycle {first.sequence} {want}; one recording has one")
        if record.sequence != self.expected:
            raise RecordError(f"{where}: expected cycle {self.expected} here; a file is missing or was renamed")
        if record.previous != self.previous:
            raise RecordError(f"{where}: follows {record.previous[:12] or 'none'}.., the file before it is "
                              f"{self.previous[:12] or 'none'}..; files of two recordings are mixed")  # fmt: skip
        self.expected, self.previous = record.sequence + 1, record.content
        for group in JUDGED_GROUPS:
            if record.has(group) != first.has(group):
                self.lacking.setdefault(group, record.sequence if first.has(group) else first.sequence)

    def _taken(self, entry: Entry, cursor: Cursor) -> tuple[slice, slice]:
        """Where a request's committed rows lie, and its drafter's entries."""
        count = len(entry.accepted)
        committed = cursor.take("committed", count, entry.name)
        if not entry.record.has("drafter"):
            return committed, slice(0)
        return committed, cursor.take("drafter", entry_count(entry.prefix, count), entry.name)

    def _judge_request(self, entry: Entry, held: Held, rows: tuple[slice, slice], new: bool) -> None:
        committed, drafted = rows
        path = self._path(entry, held)
        if path is not None and self._lengths(entry, held, path):
            if not new:  # what a request opens with was recorded once: it would be compared with itself
                self._begins(entry, held)
            self._surfaces(entry, held, path, committed)
            self._hidden(entry, path)
            if entry.record.has("drafter") and held.drafter is not None:
                self._drafter(entry, held.drafter, path, drafted)
        self.ledger.close(entry, held, committed, drafted)

    def _begins(self, entry: Entry, held: Held) -> None:
        t, i = entry.record.tensors, entry.index
        self._same("dump.gdn.before", entry, t["before.recurrent"][:, i], held.recurrent)
        self._same("dump.conv.before", entry, t["before.conv"][:, i], held.conv)
        if held.hidden is not None and entry.record.has("hidden"):
            self._same("dump.hidden", entry, t["hidden.before"][i][None], held.hidden[None])

    def _surfaces(self, entry: Entry, held: Held, path: Sequence[int], new: slice) -> None:
        t = entry.record.tensors
        oracle = DumpOracle(entry)
        chain = LayerChain(self.backend, entry, self.device) if self.backend is not None else None
        steps = chain is not None and (entry.record.has("gdn") or entry.record.has("conv"))
        for layer in range(t["before.recurrent"].shape[0]):
            rows = chain.recurrent(layer) if chain is not None and steps else {}
            self._recurrent(entry, layer, rows, path, oracle)
        for layer in range(t["candidate.k"].shape[0]):
            self._cache(entry, layer, held, path, new)
            if entry.record.has("attention"):
                self._attention(entry, layer, chain, held, oracle)

    def _path(self, entry: Entry, held: Held) -> tuple[int, ...] | None:
        """The accepted path, None if it is none of this tree; also whether row 0 is the pending token."""
        tree = entry.tree
        try:
            path = tree.check_path(entry.accepted, allow_empty=entry.record.contract.empty_path)
        except PathError as wrong:
            self._verdict("dump.path", entry, False, got=str(wrong), allowed="a path of this tree")
            return None
        told = int(entry.record.tensors["path.length"][entry.index])
        self._verdict("dump.path", entry, told == len(path), got=f"length {told}", allowed=f"{len(path)} rows")
        root = int(tree.tokens[0])
        right = held.pending is None or root == held.pending
        self._verdict("dump.path", entry, right, row=0, got=f"root token {root}", allowed=f"pending {held.pending}")
        return path

    def _lengths(self, entry: Entry, held: Held, path: Sequence[int]) -> bool:
        """Whether positions and lengths are right; without the right prefix nothing else can be judged."""
        t, i = entry.record.tensors, entry.index
        positions: list[int] = t["tree.position"][entry.rows].tolist()
        want = entry.tree.position.tolist()
        wrong = [r for r in entry.tree.active_rows if positions[r] != want[r]]
        at = wrong[0] if wrong else 0
        self._verdict("dump.lengths", entry, not wrong, row=at, got=positions[at], allowed=want[at])
        for what, got, allowed in (
            ("prefix", entry.prefix, held.length),
            ("length after", int(t["path.length_after"][i]), entry.prefix + len(path)),
        ):
            self._verdict("dump.lengths", entry, got == allowed, got=f"{what} {got}", allowed=allowed)
        return entry.prefix == held.k.shape[1]

    def _untouched(self, record: CycleRecord) -> None:
        if not record.has("untouched"):
            return
        before, after = record.tensors["untouched"]
        for name, a, b in zip(("recurrent", "conv", "k", "v"), before, after, strict=True):
            same = torch.equal(a, b)
            self.tallies["dump.elsewhere"].add(1, int(same))
            if not same:
                self.tallies["dump.elsewhere"].fail(
                    Place("dump.elsewhere", self.case, got=f"{name} changed", allowed="unchanged")
                )

    def _same_weights(self, record: CycleRecord) -> None:
        """What belongs to the model, not to a cycle: operands of another layer bring their layer's weights along."""
        for name in WEIGHTS:
            now = record.tensors.get(name)
            if now is None:
                continue
            then = self._weights.setdefault(name, now)
            shared = min(len(now), len(then))
            same = same_bits(now[:shared], then[:shared])
            self.tallies["dump.weights"].add(1, int(same))
            if not same:
                first = int(differing_mask(now[:shared], then[:shared]).nonzero()[0][0])
                layer = None if name in TABLES else first
                place = Place("dump.weights", self.case, layer=layer, got=f"{name} changed", allowed="unchanged")
                self.tallies["dump.weights"].fail(place)
            if len(now) > len(then):  # a table up to a later position
                self._weights[name] = now

    def _recurrent(
        self, entry: Entry, layer: int, chain: Chain, path: Sequence[int], oracle: DumpOracle
    ) -> None:  # fmt: skip
        t, i, rows = entry.record.tensors, entry.index, entry.tree.active_rows
        last = path[-1] if path else -1
        if entry.record.has("gdn"):
            if chain:
                got = t["gdn.out"][layer, entry.rows]
                self._rows("dump.gdn.out", entry, layer, got, {r: chain[r].gdn_out for r in rows})
                want = self._state_after(entry, layer, chain.get(last))
                self._rows("dump.gdn.state", entry, layer, t["after.recurrent"][layer, i][None], {0: want}, last)
            elif not path:
                kept: dict[int, Tensor | None] = {0: t["before.recurrent"][layer, i]}
                self._rows("dump.gdn.state", entry, layer, t["after.recurrent"][layer, i][None], kept, last)
            self._derived("dump.gdn.derived", entry, layer, oracle.gdn(layer, path))
        if entry.record.has("conv"):
            if chain:
                got = t["conv.out"][layer, entry.rows]
                self._rows("dump.conv.out", entry, layer, got, {r: chain[r].conv_out for r in rows})
            self._rows("dump.conv.state", entry, layer, t["after.conv"][layer, i][None],
                       {0: _history(entry, layer, path)}, last)  # fmt: skip
            self._derived("dump.conv.derived", entry, layer, oracle.conv(layer))

    def _state_after(self, entry: Entry, layer: int, end: ChainRow | None) -> Tensor:
        if end is None or end.recurrent is None:
            return entry.record.tensors["before.recurrent"][layer, entry.index]
        return canonical(end.recurrent, entry.record.contract).contiguous()

    def _cache(self, entry: Entry, layer: int, held: Held, path: Sequence[int], new: slice) -> None:
        """The committed prefix before and after, and the accepted rows' way from candidate to committed slots."""
        t = entry.record.tensors
        for name, cache in (("k", held.k[layer]), ("v", held.v[layer])):
            hashed = sha256_of(cache)
            for when, stored in zip(("before", "after"), t[f"history.{name}"][:, layer, entry.index], strict=True):
                same = torch.equal(stored, hashed)
                what = {"layer": layer, "got": f"{name} {when} the cycle", "allowed": "as committed"}
                self._verdict("dump.kv_history", entry, same, **what)
            candidate = t[f"candidate.{name}"][layer, entry.rows]
            for row, got in zip(path, t[f"committed.{name}"][layer, new], strict=True):
                self._rows("dump.kv_new.committed", entry, layer, got[None], {0: candidate[row]}, row)

    def _attention(self, entry: Entry, layer: int, chain: LayerChain | None, held: Held, oracle: DumpOracle) -> None:
        t, rows = entry.record.tensors, entry.tree.active_rows
        k, v = held.k[layer], held.v[layer]
        given: dict[int, Tensor | None] = {r: t["attention.v"][layer, entry.lo + r] for r in rows}
        self._rows("dump.kv_new.values", entry, layer, t["candidate.v"][layer, entry.rows], given)
        if chain is not None:
            walked = chain.attention(layer, k, v)
            got = t["attention.out"][layer, entry.rows]
            self._rows("dump.attention.out", entry, layer, got, {r: walked[r].attention_out for r in rows})
            for name in ("k", "v"):
                candidate = t[f"candidate.{name}"][layer, entry.rows]
                wanted = {r: getattr(walked[r], name) for r in rows}
                self._rows("dump.kv_new.candidate", entry, layer, candidate, wanted)
        self._derived("dump.attention.derived", entry, layer, oracle.attention(layer, k, v))

    def _drafter(self, entry: Entry, held: tuple[Tensor, Tensor], path: Sequence[int], new: slice) -> None:
        """Earlier entries as they were, and with the model's head the new ones as its hidden rows demand."""
        t = entry.record.tensors
        for which, name in enumerate(("k", "v")):
            hashed = sha256_of(held[which])
            for when, stored in zip(("before", "after"), t["drafter.history"][:, which, entry.index], strict=True):
                same = torch.equal(stored, hashed)
                self._verdict("dump.drafter", entry, same, got=f"{name} {when} the cycle", allowed="as committed")
        if self.head is not None and path:
            for name, want in zip(("k", "v"), drafter_entries(self.head, entry, path, self.device), strict=True):
                for at, got in enumerate(t[f"drafter.{name}"][new]):
                    row = path[at - (len(want) - len(path))]
                    self._rows("dump.drafter.new", entry, 0, got[None], {0: want[at]}, row)

    def _hidden(self, entry: Entry, path: Sequence[int]) -> None:
        t, i = entry.record.tensors, entry.index
        if not entry.record.has("hidden"):
            return
        want = t["hidden.rows"][entry.rows][path[-1]] if path else t["hidden.before"][i]
        self._same("dump.hidden", entry, t["hidden.next"][i][None], want[None], row=path[-1] if path else None)

    def _same(self, check: str, entry: Entry, got: Tensor, want: Tensor, row: int | None = None) -> None:
        """Layer by layer (first dimension), bit by bit."""
        for layer in range(got.shape[0]):
            same = same_bits(got[layer], want[layer])
            self.tallies[check].add(1, int(same))
            if not same:
                at = differing_mask(got[layer], want[layer]).nonzero()[0].tolist()
                values = {"got": float(got[layer][tuple(at)]), "allowed": float(want[layer][tuple(at)])}
                layer_at = layer if got.shape[0] > 1 or check.startswith(("dump.gdn", "dump.conv")) else None
                self._fail(check, entry, layer=layer_at, row=row, **values)

    def _rows(
        self, check: str, entry: Entry, layer: int, got: Tensor, want: dict[int, Tensor | None], name: int | None = None
    ) -> None:
        """Rows `want` of `got`, bit by bit. name: the row to report instead."""
        rows = [r for r, value in want.items() if value is not None]
        wanted = torch.stack([value for value in want.values() if value is not None])
        taken = got[rows]
        if entry.record.contract.zeros == "unsigned" and check.startswith("dump.gdn"):
            taken, wanted = taken + 0.0, wanted + 0.0
        if same_bits(taken, wanted):
            self.tallies[check].add(len(rows), len(rows))
            return
        differing = differing_cells(taken, wanted, 1)
        self.tallies[check].add(len(rows), int((differing == 0).sum()))
        for i in differing.nonzero()[:, 0].tolist():
            at = tuple(differing_mask(taken[i], wanted[i]).nonzero()[0].tolist())
            values = {"got": float(taken[i][at]), "allowed": float(wanted[i][at])}
            head = int(at[0]) if len(at) > 1 else None
            self._fail(check, entry, layer=layer, row=rows[i] if name is None else name, head=head, **values)

    def _derived(self, check: str, entry: Entry, layer: int, found: Sequence[tuple[int, float, int]]) -> None:
        """found: (row, worst error / bound, head)."""
        for row, ratio, head in found:
            self.tallies[check].add(1, ratio=ratio)
            if not ratio <= 1:
                self._fail(check, entry, layer=layer, row=row, head=head, got=f"{ratio:.4g} x the bound", allowed=1)

    def _verdict(self, check: str, entry: Entry, right: bool, **where: Any) -> None:
        self.tallies[check].add(1, int(right))
        if not right:
            self._fail(check, entry, **where)

    def _fail(self, check: str, entry: Entry, **where: Any) -> None:
        self.tallies[check].fail(Place(check, self.case, request=entry.index, **where))


def _history(entry: Entry, layer: int, path: Sequence[int]) -> Tensor:
    """The last W-1 inputs of prefix and path: moved data, so bits whatever the arithmetic."""
    t = entry.record.tensors
    before = t["before.conv"][layer, entry.index]
    line = torch.cat([before, t["conv.x"][layer, entry.rows][list(path)].T], 1)
    return line[:, -before.shape[1] :].contiguous()
