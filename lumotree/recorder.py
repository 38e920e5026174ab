"""Records cycles of a running engine, so that `lumotree-audit continue --dump DIR` can judge them elsewhere.

What an engine adds to its cycle:

    recorder = Recorder(folder, backend.contract, dims, "my_adapter:MyKernel")      # once
    cycle = recorder.begin(batch, tokens, pools, ws, backend, requests)             # before the verification
    forward = model.verify(tokens, batch, pools, ws, cycle.watch(backend))          # operands and outputs pass through
    cycle.verified(hidden=forward.hidden, logits=forward.logits)                    # before the publication
    ...select and publish...
    cycle.end(accepted, pending, lengths, hidden=rows_for_the_drafter)              # writes one file

An engine that does not run through the protocol's backends gives `cycle.operands` what `watch` would have seen. The
recorder only reads; it copies to the host and synchronises, so it is for captures, not for benchmarks. Every change of
a request's state between its first recorded cycle and its last must be recorded: a plain step is a tree of one row, a
prefill chunk a chain of which every row is accepted.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.batch import flat_slots
from lumotree.backends.protocol import Accepted, Batch, Workspace
from lumotree.contract import Contract, Dims
from lumotree.errors import RecordError
from lumotree.record_file import SUFFIX, CycleRecord, tensor_bytes, write_record
from lumotree.state import KVCache, Pools

_VERIFY = {"gdn_verify": "gdn", "conv_verify": "conv", "attention_verify": "attention"}
#: Operands that all layers of a model share.
_OF_THE_MODEL = ("attention.cos", "attention.sin")


class Recorder:
    """Writes one file a cycle to `folder`. Raises RecordError when cycles lie there already, or it cannot be made.

    backend: name under which the judge can load the backend (`module:object`), "" if it cannot. untouched: also hash
    everything that the requests of the batch do not own; needs a pass over all pools each cycle.
    """

    def __init__(
        self, folder: Path | str, contract: Contract, dims: Dims, backend: str = "", *, untouched: bool = True
    ) -> None:
        self.folder, self.contract, self.dims, self.backend = Path(folder), contract, dims, backend
        self.untouched = untouched
        self.run, self.sequence, self.previous = secrets.token_hex(8), 0, ""
        self.known: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            there = sorted(p.name for p in self.folder.glob(f"*{SUFFIX}"))
        except OSError as cause:
            raise RecordError(f"record folder {folder}: cannot be made: {cause}; choose another") from cause
        if there:
            raise RecordError(f"record folder {folder}: expected an empty folder, found {there[0]}; choose another")

    def begin(
        self,
        batch: Batch,
        tokens: Tensor,
        pools: Pools,
        ws: Workspace,
        backend: Any,
        requests: Sequence[str],
        drafter: Drafted | None = None,
    ) -> CycleRecorder:
        """Start a cycle before its verification. requests: a name for each request of the batch, "" for padding.

        drafter: the drafter's state, if the engine has one. Raises RecordError when the names do not fit the batch.
        """
        live = [slot >= 0 for slot in batch.state_slot.tolist()]
        if [bool(name) for name in requests] != live:
            raise RecordError(
                f"recorder: expected one name for each live request and '' for padding, got {list(requests)} for "
                f"state slots {batch.state_slot.tolist()}"
            )
        return CycleRecorder(self, batch, tokens, pools, ws, backend, tuple(requests), drafter)

    def write(self, requests: tuple[str, ...], page_size: int, tensors: dict[str, Tensor]) -> Path:
        """Write the next file. Raises RecordError, also when the disk refuses."""
        record = CycleRecord(
            self.run, self.sequence, self.previous, self.contract, self.dims, self.backend, page_size, requests, tensors
        )
        try:
            path, self.previous = write_record(record, self.folder)
        except OSError as cause:
            raise RecordError(f"record folder {self.folder}: cycle {self.sequence} not written: {cause}") from cause
        self.sequence += 1
        self.known |= set(requests)
        return path


@dataclass(frozen=True)
class Drafted:
    """The drafter's state as the engine holds it: the head's cache of one layer, in the target's pages, and the
    target's hidden row at each request's last committed position, bf16 `[B, H]`."""

    cache: KVCache
    hidden: Tensor


class CycleRecorder:
    """One cycle being recorded; made by `Recorder.begin`."""

    def __init__(
        self,
        recorder: Recorder,
        batch: Batch,
        tokens: Tensor,
        pools: Pools,
        ws: Workspace,
        backend: Any,
        requests: tuple[str, ...],
        drafter: Drafted | None,
    ) -> None:
        self.recorder, self.batch, self.pools, self.ws, self.backend = recorder, batch, pools, ws, backend
        self.requests, self.drafter = requests, drafter
        self.slots, self.prefix = batch.state_slot.tolist(), batch.prefix_len.tolist()
        self.live = [i for i, slot in enumerate(self.slots) if slot >= 0]
        self.layers: dict[str, dict[int, Tensor]] = {}
        names = ("cu_rows", "parent", "active", "position", "row_slot", "state_slot", "prefix_len", "page_table")
        self.tensors = {f"tree.{name}": _copy(getattr(batch, name)) for name in names}
        self.tensors["tree.tokens"] = _copy(tokens.to(torch.int64))
        self._states("before")
        self._opening()
        self.hashes_before = self._hashes()

    def watch(self, backend: Any) -> Any:
        """The backend with its verify methods overheard. A surface that it does not have stays unrecorded."""
        return _Watched(backend, self)

    def operands(self, surface: str, layer: int, ops: Any, out: Tensor) -> None:
        """Operands (`GdnOps`, `ConvOps` or `AttentionOps`) and output of one layer of "gdn", "conv" or "attention"."""
        for name, value in (*vars(ops).items(), ("out", out)):
            part = f"{surface}.{name}"
            self.layers.setdefault(part, {})[layer] = _copy(self.kept(part, layer, value))

    def kept(self, name: str, layer: int, value: Tensor) -> Tensor:
        """The part of an operand that is recorded, a view: all of it, but of cos and sin, which all layers share, layer
        0's rows up to the last position of the batch."""
        if name not in _OF_THE_MODEL:
            return value
        return value[: 0 if layer else int(self.tensors["tree.position"].max()) + 1]

    def verified(self, hidden: Tensor | None = None, logits: Tensor | None = None) -> None:
        """Between verification and publication: candidate KV, and what the forward returned."""
        where = self.batch.row_slot.to(torch.int64)
        self.tensors["candidate.k"] = _copy(self.pools.cache.k[:, where])
        self.tensors["candidate.v"] = _copy(self.pools.cache.v[:, where])
        if hidden is not None:
            self.tensors["hidden.rows"] = _copy(hidden)
        if logits is not None:
            self.tensors["logits"] = _copy(logits.to(torch.float32))

    def end(self, accepted: Accepted, pending: Tensor, lengths: Tensor, hidden: Tensor | None = None) -> Path:
        """After publication, the drafter's included: write the file and return its path.

        pending: int64 `[B]`, new pending tokens. lengths: committed tokens `[B]` as the engine now counts them.
        hidden: bf16 `[B, H]`, the rows that the drafter reads next. Raises RecordError.
        """
        if "candidate.k" not in self.tensors:
            raise RecordError("recorder: end() before verified(); call verified() between verification and publication")
        for name, value in (("rows", accepted.rows), ("length", accepted.length), ("length_after", lengths)):
            self.tensors[f"path.{name}"] = _copy(value.to(torch.int32))
        self.tensors["path.pending"] = _copy(pending.to(torch.int64))
        self._states("after")
        taken = self.tensors["path.length"].tolist()
        new = self._flat([range(self.prefix[i], self.prefix[i] + taken[i]) for i in self.live])
        self._keep("committed", self.pools.cache, new)
        for name, value in self._hashes().items():
            self.tensors[name] = torch.stack([self.hashes_before[name], value])
        if self.drafter is not None:
            entries = [range(max(self.prefix[i] - 1, 0), self.prefix[i] + taken[i] - 1) for i in self.live]
            where = self._flat(entries)
            self.tensors["drafter.k"] = _copy(self.drafter.cache.k[0, where])
            self.tensors["drafter.v"] = _copy(self.drafter.cache.v[0, where])
        if hidden is not None:
            self.tensors["hidden.next"] = _copy(hidden)
        for name, parts in self.layers.items():
            self.tensors[name] = parts[0] if name in _OF_THE_MODEL else _stacked(name, parts)
        return self.recorder.write(self.requests, self.batch.page_size, self.tensors)

    def _states(self, when: str) -> None:
        """Canonical state of each request's slot, zeros for padding."""
        layers, dims = self.pools.recurrent.shape[0], self.recorder.dims
        recurrent = torch.zeros((layers, len(self.slots), dims.hv, dims.dv, dims.dk))
        conv = torch.zeros((layers, len(self.slots), dims.conv_channels, dims.conv_width - 1), dtype=torch.bfloat16)
        for i in self.live:
            for layer in range(layers):
                state = self.backend.export(self.pools, self.ws, self.slots[i], layer)
                recurrent[layer, i], conv[layer, i] = state.recurrent.cpu(), state.conv.cpu()
        self.tensors[f"{when}.recurrent"], self.tensors[f"{when}.conv"] = recurrent, conv

    def _opening(self) -> None:
        new = [bool(name) and name not in self.recorder.known for name in self.requests]
        self.tensors["opening.new"] = torch.tensor(new, dtype=torch.bool)
        where = self._flat([range(self.prefix[i]) if new[i] else range(0) for i in self.live])
        self._keep("opening", self.pools.cache, where)
        if self.drafter is not None:
            self.tensors["hidden.before"] = _copy(self.drafter.hidden)
            entries = self._flat([range(max(self.prefix[i] - 1, 0)) if new[i] else range(0) for i in self.live])
            self.tensors["drafter.opening_k"] = _copy(self.drafter.cache.k[0, entries])
            self.tensors["drafter.opening_v"] = _copy(self.drafter.cache.v[0, entries])

    def _keep(self, name: str, cache: KVCache, where: Tensor) -> None:
        self.tensors[f"{name}.k"], self.tensors[f"{name}.v"] = _copy(cache.k[:, where]), _copy(cache.v[:, where])

    def _flat(self, positions: Sequence[range]) -> Tensor:
        """Flat KV slots of positions of each live request, one request after another."""
        table, size = self.batch.page_table, self.batch.page_size
        parts = [flat_slots(table, size, i, list(p)) for i, p in zip(self.live, positions, strict=True)]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=table.device), *parts])

    def _hashes(self) -> dict[str, Tensor]:
        cache = self.pools.cache
        found = {f"history.{n}": self._prefix_hashes(x, 0) for n, x in (("k", cache.k), ("v", cache.v))}
        if self.drafter is not None:
            pairs = (self.drafter.cache.k[:1], self.drafter.cache.v[:1])
            found["drafter.history"] = torch.cat([self._prefix_hashes(x, 1) for x in pairs])
        if self.recorder.untouched:
            found["untouched"] = self._others()
        return found

    def _prefix_hashes(self, cache: Tensor, behind: int) -> Tensor:
        """uint8 `[layers, B, 32]`: hash of the first `prefix_len - behind` entries; zeros for padding."""
        found = torch.zeros((cache.shape[0], len(self.slots), 32), dtype=torch.uint8)
        for i in self.live:
            where = flat_slots(
                self.batch.page_table, self.batch.page_size, i, list(range(max(self.prefix[i] - behind, 0)))
            )
            for layer in range(cache.shape[0]):
                found[layer, i] = sha256_of(cache[layer, where])
        return found

    def _others(self) -> Tensor:
        """uint8 `[4, 32]`: what no request of the batch owns, that is free slots, and KV outside the batch's pages."""
        cache, size = self.pools.cache, self.batch.page_size
        free = torch.ones(self.pools.recurrent.shape[1], dtype=torch.bool)
        free[[self.slots[i] for i in self.live]] = False
        pages = self.batch.page_table[self.live].cpu().to(torch.int64)
        own = (pages[pages >= 0][:, None] * size + torch.arange(size)).flatten()
        outside = torch.ones(cache.k.shape[1], dtype=torch.bool)
        outside[own] = False
        outside[self.batch.row_slot.cpu().to(torch.int64)] = False
        parts = (self.pools.recurrent, free), (self.pools.conv, free), (cache.k, outside), (cache.v, outside)
        return torch.stack([sha256_of(pool[:, mask.to(pool.device)]) for pool, mask in parts])


class _Watched:
    """A backend in front of which the verify methods are overheard; all else is the backend's own."""

    def __init__(self, inner: Any, cycle: CycleRecorder) -> None:
        self._inner, self._cycle = inner, cycle
        for method, surface in _VERIFY.items():
            if callable(getattr(inner, method, None)):
                setattr(self, method, self._overheard(method, surface))

    def _overheard(self, method: str, surface: str) -> Any:
        def call(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            parts = {name: self._cycle.kept(f"{surface}.{name}", layer, value) for name, value in vars(ops).items()}
            given = type(ops)(**{name: part.clone() for name, part in parts.items()})
            getattr(self._inner, method)(ops, pool, batch, ws, out, layer)
            self._cycle.operands(surface, layer, given, out)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def sha256_of(value: Tensor) -> Tensor:
    """uint8 `[32]`: SHA-256 of a tensor's bytes."""
    return torch.frombuffer(bytearray(hashlib.sha256(tensor_bytes(value)).digest()), dtype=torch.uint8)


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def _stacked(name: str, parts: dict[int, Tensor]) -> Tensor:
    missing = sorted(set(range(len(parts))) - set(parts))
    if missing:
        raise RecordError(f"recorder: {name}: layer {missing[0]} was not recorded, others were: {sorted(parts)}")
    return torch.stack([parts[layer] for layer in range(len(parts))])
