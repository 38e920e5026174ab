"""A cycle on disk: one safetensors file with everything needed to judge it without the engine that ran it.

Every file holds one verification and its publication for a batch of B requests with T tree rows. Layers count within
their kind: Lg recurrent and convolution layers, La attention layers. Tensors, with the symbols of
`lumotree.contract.Dims` (HK, HV, dk, dv, D, W, Hq, Hkv, dh), R = rotary_dim / 2:

    tree.cu_rows [B+1] parent [T] position [T] row_slot [T] state_slot [B] prefix_len [B] page_table [B,pages] int32,
    tree.active [T] bool, tree.tokens [T] int64      the batch as verified; see `lumotree.backends.protocol.Batch`
    path.rows [B,longest] length [B] int32           accepted rows of each request, padding -1
    path.pending [B] int64                           the new pending token b* (-1 for a padding request)
    path.length_after [B] int32                      committed tokens that the engine holds afterwards
    gdn.q k v a b A_log dt_bias out, conv.x weight out, attention.q k v cos sin out
                                                     operands and outputs of each layer, stacked over layers
    before.recurrent, after.recurrent [Lg,B,HV,dv,dk] fp32, before.conv, after.conv [Lg,B,D,W-1] bf16
                                                     canonical state of each request's slot (`Backend.export`)
    candidate.k v [La,T,Hkv,dh]                      what verification left at `tree.row_slot`
    committed.k v [La,accepted,Hkv,dh]               the accepted positions after publication, request after request
    opening.new [B] bool, opening.k v [La,tokens,Hkv,dh]
                                                     the whole committed cache of requests seen for the first time
    history.k v [2,La,B,32] uint8                    SHA-256 of the committed prefix, before and after the cycle
    untouched [2,4,32] uint8                         SHA-256 of all that no request of the batch owns (recurrent, conv,
                                                     k, v), before and after; absent if the engine did not record it
    hidden.before rows next, bf16                    the target's hidden row at the last committed position [B,H], the
                                                     rows of the forward [T,H], the row handed to the drafter [B,H]
    drafter.k v [entries,Hkv,dh]                     entries of the draft head's cache that the cycle committed: those
                                                     of positions m-1 .. m-2+accepted (see `lumotree.draft_types`)
    drafter.opening_k opening_v [tokens,Hkv,dh]      its entries 0 .. m-2 of requests seen for the first time
    drafter.history [2,2,B,32] uint8                 SHA-256 of entries 0 .. m-2, before and after, of k and v
    logits [T,V] fp32                                absent if the engine did not record them

`before`, `after`, `tree`, `path`, `opening` and `history` are always there; the groups gdn, conv, attention, hidden,
drafter, untouched and logits may be missing as a whole, and then from every cycle of a recording. Metadata (text):
`META`. `content` is the SHA-256 of all else in the file, `previous` that of the file before. Damage and mixed-up files
are refused (`RecordError`); a file that is whole but tells of wrong states is a finding of the audit, not a refusal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lumotree.contract import Contract, Dims
from lumotree.errors import ContractError, RecordError

FORMAT, VERSION = "lumotree-cycle", "1"
META = (
    "format", "version", "run", "sequence", "previous", "content", "contract", "dims", "backend", "page_size",
    "requests",
)  # fmt: skip
SUFFIX = ".safetensors"

_BF16, _FP32, _I32, _I64, _BOOL, _U8 = (
    torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool, torch.uint8,
)  # fmt: skip

#: Name -> dtype and shape; letters are bound by the dims, the metadata or the first tensor that has them.
LAYOUT: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "tree.cu_rows": (_I32, ("B+1",)),
    "tree.parent": (_I32, ("T",)),
    "tree.active": (_BOOL, ("T",)),
    "tree.position": (_I32, ("T",)),
    "tree.row_slot": (_I32, ("T",)),
    "tree.tokens": (_I64, ("T",)),
    "tree.state_slot": (_I32, ("B",)),
    "tree.prefix_len": (_I32, ("B",)),
    "tree.page_table": (_I32, ("B", "pages")),
    "path.rows": (_I32, ("B", "longest")),
    "path.length": (_I32, ("B",)),
    "path.pending": (_I64, ("B",)),
    "path.length_after": (_I32, ("B",)),
    "gdn.q": (_BF16, ("Lg", "T", "HK", "dk")),
    "gdn.k": (_BF16, ("Lg", "T", "HK", "dk")),
    "gdn.v": (_BF16, ("Lg", "T", "HV", "dv")),
    "gdn.a": (_BF16, ("Lg", "T", "HV")),
    "gdn.b": (_BF16, ("Lg", "T", "HV")),
    "gdn.A_log": (_FP32, ("Lg", "HV")),
    "gdn.dt_bias": (_FP32, ("Lg", "HV")),
    "gdn.out": (_BF16, ("Lg", "T", "HV", "dv")),
    "conv.x": (_BF16, ("Lg", "T", "D")),
    "conv.weight": (_BF16, ("Lg", "D", "W")),
    "conv.out": (_BF16, ("Lg", "T", "D")),
    "attention.q": (_BF16, ("La", "T", "Hq", "dh")),
    "attention.k": (_BF16, ("La", "T", "Hkv", "dh")),
    "attention.v": (_BF16, ("La", "T", "Hkv", "dh")),
    "attention.cos": (_FP32, ("positions", "R")),
    "attention.sin": (_FP32, ("positions", "R")),
    "attention.out": (_BF16, ("La", "T", "Hq", "dh")),
    "before.recurrent": (_FP32, ("Lg", "B", "HV", "dv", "dk")),
    "after.recurrent": (_FP32, ("Lg", "B", "HV", "dv", "dk")),
    "before.conv": (_BF16, ("Lg", "B", "D", "W-1")),
    "after.conv": (_BF16, ("Lg", "B", "D", "W-1")),
    "candidate.k": (_BF16, ("La", "T", "Hkv", "dh")),
    "candidate.v": (_BF16, ("La", "T", "Hkv", "dh")),
    "committed.k": (_BF16, ("La", "accepted", "Hkv", "dh")),
    "committed.v": (_BF16, ("La", "accepted", "Hkv", "dh")),
    "opening.new": (_BOOL, ("B",)),
    "opening.k": (_BF16, ("La", "opened", "Hkv", "dh")),
    "opening.v": (_BF16, ("La", "opened", "Hkv", "dh")),
    "history.k": (_U8, ("2", "La", "B", "32")),
    "history.v": (_U8, ("2", "La", "B", "32")),
    "untouched": (_U8, ("2", "4", "32")),
    "hidden.before": (_BF16, ("B", "H")),
    "hidden.rows": (_BF16, ("T", "H")),
    "hidden.next": (_BF16, ("B", "H")),
    "drafter.k": (_BF16, ("entries", "Hkv", "dh")),
    "drafter.v": (_BF16, ("entries", "Hkv", "dh")),
    "drafter.opening_k": (_BF16, ("drafted", "Hkv", "dh")),
    "drafter.opening_v": (_BF16, ("drafted", "Hkv", "dh")),
    "drafter.history": (_U8, ("2", "2", "B", "32")),
    "logits": (_FP32, ("T", "V")),
}

#: Groups (first part of a name) that may be missing as a whole.
OPTIONAL = ("gdn", "conv", "attention", "untouched", "hidden", "drafter", "logits")


@dataclass(frozen=True)
class CycleRecord:
    """One recorded cycle. requests: name of each request of the batch, "" for padding; tensors as in the module."""

    run: str
    sequence: int
    previous: str
    contract: Contract
    dims: Dims
    backend: str
    page_size: int
    requests: tuple[str, ...]
    tensors: dict[str, Tensor]
    content: str = ""

    def has(self, group: str) -> bool:
        """Whether a group of tensors was recorded."""
        return any(name.partition(".")[0] == group for name in self.tensors)


def record_name(sequence: int) -> str:
    """File name of a cycle."""
    return f"cycle-{sequence:06d}{SUFFIX}"


def write_record(record: CycleRecord, folder: Path) -> tuple[Path, str]:
    """Write a cycle, all of it or nothing, and return its path and content hash. Raises RecordError, OSError."""
    # Copies: a file may not hold two names of one memory.
    tensors = {name: _copy(value) for name, value in record.tensors.items()}
    meta = _meta(record)
    check_layout(tensors, record.dims, len(record.requests), record_name(record.sequence))
    meta["content"] = content_sha256(tensors, meta)
    path = folder / record_name(record.sequence)
    _write(path, save(tensors, metadata=meta))
    return path, meta["content"]


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def read_record(path: Path) -> CycleRecord:
    """Read one cycle. Raises RecordError for a file that is no cycle, is damaged, or does not have the layout."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = dict(file.metadata() or {})
            # Read before the tensors, so that a foreign file of any size is refused at once.
            _check_meta(meta, path.name)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as cause:
        raise RecordError(f"{path.name}: expected a whole safetensors file, found: {cause}; record it again") from cause
    found = content_sha256(tensors, meta)
    if found != meta["content"]:
        raise RecordError(
            f"{path.name}: content hash is {found[:12]}.., the file says {meta['content'][:12]}..; it was damaged or "
            "edited: record it again"
        )
    record = _restore(meta, tensors, path.name)
    check_layout(tensors, record.dims, len(record.requests), path.name)
    return record


def content_sha256(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, and all metadata except `content`."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name}\0{value.dtype}\0{list(value.shape)}\0".encode())
        digest.update(tensor_bytes(value))
    kept = {key: value for key, value in meta.items() if key != "content"}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    return digest.hexdigest()


def tensor_bytes(value: Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def check_layout(tensors: Mapping[str, Tensor], dims: Dims, requests: int, where: str) -> None:
    """Raise RecordError, naming the tensor, unless names, dtypes and shapes are those of `LAYOUT`."""
    unknown = sorted(set(tensors) - set(LAYOUT))
    if unknown:
        raise RecordError(f"{where}: unknown tensor {unknown[0]!r}; see lumotree/record_file.py for the layout")
    present = {name.partition(".")[0] for name in tensors}
    for name in LAYOUT:
        group = name.partition(".")[0]
        if name not in tensors and (group in present or group not in OPTIONAL):
            raise RecordError(f"{where}: expected a tensor {name!r}, found none")
    sizes = _known_sizes(dims, requests)
    for name, value in tensors.items():
        dtype, shape = LAYOUT[name]
        if value.dtype != dtype:
            raise RecordError(f"{where}: expected {name} in {dtype}, got {value.dtype}")
        fits = len(value.shape) == len(shape) and all(
            sizes.setdefault(symbol, size) == size for symbol, size in zip(shape, value.shape, strict=False)
        )
        if not fits:
            want = ", ".join(f"{s}={sizes[s]}" if s in sizes and not s.isdigit() else s for s in shape)
            raise RecordError(f"{where}: expected {name} of shape [{want}], got {list(value.shape)}")


def _known_sizes(d: Dims, requests: int) -> dict[str, int]:
    literal = {"2": 2, "4": 4, "32": 32}
    return literal | {
        "B": requests, "B+1": requests + 1, "HK": d.hk, "HV": d.hv, "dk": d.dk, "dv": d.dv, "D": d.conv_channels,
        "W": d.conv_width, "W-1": d.conv_width - 1, "Hq": d.q_heads, "Hkv": d.kv_heads, "dh": d.head_dim,
        "R": d.rotary_dim // 2,
    }  # fmt: skip


def _meta(record: CycleRecord) -> dict[str, str]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "run": record.run,
        "sequence": str(record.sequence),
        "previous": record.previous,
        "contract": json.dumps(record.contract.as_dict(), sort_keys=True),
        "dims": json.dumps(asdict(record.dims), sort_keys=True),
        "backend": record.backend,
        "page_size": str(record.page_size),
        "requests": json.dumps(list(record.requests)),
    }


def _check_meta(meta: Mapping[str, str], where: str) -> None:
    if meta.get("format") != FORMAT:
        raise RecordError(f"{where}: expected format {FORMAT!r}, got {meta.get('format')!r}: not a recorded cycle")
    if meta.get("version") != VERSION:
        raise RecordError(f"{where}: expected version {VERSION}, got {meta.get('version')!r}")
    odd = sorted(set(META) ^ set(meta))
    if odd:
        raise RecordError(f"{where}: missing or unknown metadata: {', '.join(odd)}")


def _restore(meta: Mapping[str, str], tensors: dict[str, Tensor], where: str) -> CycleRecord:
    requests = _json(meta, "requests", list, where)
    if not all(isinstance(name, str) for name in requests):
        raise RecordError(f"{where}: expected metadata requests to be a list of names, got {meta['requests']!r}")
    return CycleRecord(
        run=meta["run"],
        sequence=_integer(meta, "sequence", 0, where),
        previous=meta["previous"],
        contract=_contract(_json(meta, "contract", dict, where), where),
        dims=_dims(_json(meta, "dims", dict, where), where),
        backend=meta["backend"],
        page_size=_integer(meta, "page_size", 1, where),
        requests=tuple(requests),
        tensors=tensors,
        content=meta["content"],
    )


def _json(meta: Mapping[str, str], name: str, kind: type, where: str) -> Any:
    try:
        value = json.loads(meta[name])
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise RecordError(f"{where}: expected metadata {name} to be a JSON {kind.__name__}, got {meta[name]!r}")
    return value


def _integer(meta: Mapping[str, str], name: str, least: int, where: str) -> int:
    text = meta[name]
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise RecordError(f"{where}: expected metadata {name} to be an integer >= {least}, got {text!r}")
    return int(text)


def _contract(fields: dict[str, Any], where: str) -> Contract:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    try:
        algebra = tuple(fields.get("algebra", ()))
        return Contract(**{**fields, "state_dtype": dtypes.get(fields.get("state_dtype", "")), "algebra": algebra})
    except (TypeError, ContractError) as cause:
        raise RecordError(f"{where}: metadata contract is not one: {cause}") from cause


def _dims(fields: dict[str, Any], where: str) -> Dims:
    try:
        return Dims(**fields)
    except (TypeError, ContractError) as cause:
        raise RecordError(f"{where}: metadata dims are not dims of a model: {cause}") from cause


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
