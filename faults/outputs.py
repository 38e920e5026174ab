"""Faults of what a verify call leaves behind: outputs, and memory that it had no business writing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from faults.catalogue import Fault, Knob, Wrap
from faults.slots import live_slots
from faults.wrap import Verified, on_verify
from lumotree.backends.protocol import SHARED_OPERANDS, SURFACES, Batch

After = Callable[[Verified], bool | None]


def active_of(batch: Batch) -> list[int]:
    """Global numbers of the active rows of live requests."""
    slots, request = batch.state_slot.tolist(), batch.row_request.tolist()
    return [row for row, on in enumerate(batch.active.tolist()) if on and slots[request[row]] >= 0]


def _last_row_unwritten(done: Verified) -> None:
    done.out[active_of(done.batch)[-1]] = torch.nan


def _upper_heads_unwritten(done: Verified) -> None:
    rows = active_of(done.batch)
    done.out[rows, done.out.shape[1] // 2 :] = torch.nan


def _rows_shifted(done: Verified) -> None:
    rows = active_of(done.batch)
    done.out[rows] = done.out[rows].roll(1, 0)


def _first_request_repeated(done: Verified) -> None:
    cu = done.batch.cu_rows.tolist()
    spans = [(cu[i], cu[i + 1]) for i in live_slots(done.batch)]
    lo, hi = spans[0]
    for a, b in spans[1:]:
        n = min(hi - lo, b - a)
        done.out[a : a + n] = done.out[lo : lo + n]


def _deepest_from_parent(done: Verified) -> None:
    """The last active row repeats its parent's output."""
    row = active_of(done.batch)[-1]
    lo = int(done.batch.cu_rows[int(done.batch.row_request[row])])
    parent = int(done.batch.parent[row])
    if parent >= 0:
        done.out[row] = done.out[lo + parent]


def _behind(done: Verified) -> bool:
    """One element behind the outputs is written, where the caller's memory goes on."""
    at = done.out.storage_offset() + done.out.numel()
    room = at < done.out.untyped_storage().nbytes() // done.out.element_size()
    if room:
        done.out.as_strided((1,), (1,), at).fill_(1.0)
    return room


def _operands_scaled(done: Verified) -> None:
    """Per-row operands are worked on in the caller's memory."""
    for name, value in vars(done.ops).items():
        if name not in SHARED_OPERANDS:
            value.mul_(0.5)


def _state_written(done: Verified) -> None:
    """The committed state of the live slots is advanced although nothing is accepted yet."""
    for slot in live_slots(done.batch).values():
        done.pool[done.layer, slot].mul_(1.5).add_(0.25)


def _prefix_key_written(done: Verified) -> None:
    """A committed key is overwritten with the last active row's."""
    batch = done.batch
    for i in live_slots(batch):
        if int(batch.prefix_len[i]):
            slot = int(batch.page_table[i, 0]) * batch.page_size
            done.pool.k[done.layer, slot] = done.pool.k[done.layer, int(batch.row_slot[active_of(batch)[-1]])]


def _positions_advanced(done: Verified) -> None:
    done.batch.position.add_(1)


def ulps(size: float) -> After:
    """One element of the last active row, moved by some bf16 values."""

    def after(done: Verified) -> None:
        row = done.out[active_of(done.batch)[-1]].view(torch.int16)
        row.view(-1)[-1] += int(size)

    return after


def noise(size: float) -> After:
    """Every active row's outputs larger by a relative size, rounded to bf16 again."""

    def after(done: Verified) -> None:
        rows = active_of(done.batch)
        done.out[rows] = (done.out[rows].to(torch.float32) * (1 + size)).to(torch.bfloat16)

    return after


def _at_random(surface: str, size: float) -> Wrap:
    """One element of a call is one bf16 value off with this probability; coins follow torch's seed, not its state."""

    def wrap(inner: object) -> object:
        coins = torch.Generator().manual_seed(torch.initial_seed() % 2**63)

        def after(done: Verified) -> None:
            if float(torch.rand((), generator=coins)) < size:
                ulps(1.0)(done)

        return on_verify(surface, after=after)(inner)

    return wrap


_OUTPUTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], After]] = {
    "last_row_unwritten": ("the last active row's output is never written", ("E4", "O2", "I3"), (),
                           _last_row_unwritten),
    "rows_shifted": ("each row's output lies in the next row's place", ("DF7", "H13", "K11"), ("rows>=2",),
                     _rows_shifted),
    "first_request_repeated": ("all requests are given the first one's outputs", ("G7", "E8", "DF20"),
                               ("requests>=2",), _first_request_repeated),
    "row_repeats_parent": ("the last row is given its parent's output", ("K9", "DF6"), ("depth>=1",),
                           _deepest_from_parent),
    "writes_behind_outputs": ("one element behind the outputs is overwritten", ("B12", "E8", "I6"), (), _behind),
    "operands_overwritten": ("operands are worked on in the caller's memory", ("K5", "M8"), (), _operands_scaled),
}  # fmt: skip


def _fault(kind: str, surface: str, entry: tuple[str, tuple[str, ...], tuple[str, ...], After]) -> Fault:
    statement, classes, needs, after = entry
    return Fault(f"{kind}.{surface}", statement, surface, "verify", classes, needs, on_verify(surface, after=after))


def _sized(
    kind: str, what: str, surface: str, sizes: tuple[float, ...], unit: str, at: Callable[[float], Wrap]
) -> Fault:
    return Fault(f"{kind}.{surface}", what, surface, "verify", ("DF19", "DF29"), (), at(sizes[0]),
                 knob=Knob(sizes, unit, at))  # fmt: skip


def _ulps(surface: str) -> Fault:
    return _sized("output_ulps", "one output element is a few bf16 values off", surface, (64, 16, 4, 2, 1),
                  "bf16 values", lambda n: on_verify(surface, after=ulps(n)))  # fmt: skip


def _noise(surface: str) -> Fault:
    return _sized("output_scaled", "outputs are a little too large", surface,
                  (0.1, 3e-2, 1e-2, 4e-3, 2e-3, 1e-3), "relative error",
                  lambda x: on_verify(surface, after=noise(x)))  # fmt: skip


def _races(surface: str) -> Fault:
    return _sized("sometimes_one_ulp", "now and then one output element is one bf16 value off", surface,
                  (1.0, 0.3, 0.1, 0.03, 0.01), "probability a call", lambda p: _at_random(surface, p))  # fmt: skip


FAULTS = [
    *(_fault(kind, s, entry) for kind, entry in _OUTPUTS.items() for s in SURFACES),
    _fault("upper_heads_unwritten", "gdn", ("outputs of the upper half of the heads are never written", ("O2", "O3"),
                                            ("hv>hk",), _upper_heads_unwritten)),
    *(_fault("state_written", s, ("verification advances the committed state", ("A12", "I1", "A11"), (),
                                  _state_written)) for s in ("gdn", "conv")),
    _fault("prefix_key_written", "attention", ("verification overwrites a committed key", ("F2", "I8"), ("prefix",),
                                               _prefix_key_written)),
    _fault("positions_advanced", "attention", ("verification advances the caller's positions in place", ("I1", "L5"),
                                               (), _positions_advanced)),
    *(_ulps(s) for s in SURFACES),
    *(_noise(s) for s in SURFACES),
    *(_races(s) for s in SURFACES),
]  # fmt: skip
