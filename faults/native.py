"""Faults of one-token decoding: the plain step disagrees with verification and publication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from faults.catalogue import Fault
from faults.slots import live_slots
from faults.wrap import Stepped, on_native

After = Callable[[Stepped], None]


def _not_advanced(done: Stepped) -> None:
    done.pool.copy_(done.pool_before)


def _rounded(done: Stepped) -> None:
    slots = list(live_slots(done.batch).values())
    done.pool[done.layer, slots] = done.pool[done.layer, slots].to(torch.bfloat16).to(done.pool.dtype)


def _neighbour_touched(done: Stepped) -> None:
    for slot in live_slots(done.batch).values():
        other = (slot + 1) % done.pool.shape[1]
        done.pool[done.layer, other] = done.pool[done.layer, slot]


def _shifted_twice(done: Stepped) -> None:
    for slot in live_slots(done.batch).values():
        window = done.pool[done.layer, slot]
        window.copy_(torch.cat([window[:, 1:], window[:, -1:]], 1))


def _key_missing(done: Stepped) -> None:
    at = done.batch.row_slot.long()
    done.pool.k[done.layer, at] = done.pool_before.k[done.layer, at]


def _other_layer(done: Stepped) -> None:
    layers = done.pool.shape[0]
    for slot in live_slots(done.batch).values():
        done.pool[(done.layer + 1) % layers, slot] = done.pool[done.layer, slot]


_AFTER: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...], After]] = {
    "step_not_stored": ("gdn", "the plain step computes its output but leaves the state behind", ("A1", "DF33"), (),
                        _not_advanced),
    "step_stores_bf16": ("gdn", "the plain step stores its state in bf16", ("N14",), (), _rounded),
    "step_writes_next_slot": ("gdn", "the plain step also writes the slot behind its own", ("C6", "E1"), (),
                              _neighbour_touched),
    "step_writes_next_layer": ("gdn", "the plain step also writes another layer", ("DF36",), ("layers>=2",),
                               _other_layer),
    "window_not_stored": ("conv", "the plain step does not advance the window", ("A1", "B14"), (), _not_advanced),
    "window_shifted_twice": ("conv", "the plain step shifts the window by two", ("B13", "M7"), (), _shifted_twice),
    "window_in_next_slot": ("conv", "the plain step also writes the window of the slot behind its own", ("C6",), (),
                            _neighbour_touched),
    "key_not_cached": ("attention", "the plain step does not cache its key", ("J3",), ("depth>=1",), _key_missing),
}  # fmt: skip

FAULTS = [
    *(
        Fault(f"{kind}.{s}", what, s, "between", classes, needs, on_native(s, after=after))
        for kind, (s, what, classes, needs, after) in _AFTER.items()
    ),
    Fault(
        "step_position_ahead.attention",
        "the plain step stands one position too far",
        "attention",
        "between",
        ("I1", "DF13"),
        (),
        on_native("attention", batch=lambda b: replace(b, position=b.position + 1)),
    ),
    Fault(
        "step_forgets_last_key.attention",
        "the plain step does not see the last committed token",
        "attention",
        "between",
        ("I4", "I7"),
        ("prefix",),
        on_native("attention", batch=lambda b: replace(b, prefix_len=(b.prefix_len - 1).clamp(min=0))),
    ),
]
