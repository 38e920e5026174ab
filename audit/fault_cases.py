"""Small cases, from the smallest on, on which the faults of the catalogue are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from audit.cases import SPLITS, CaseSpec
from audit.families import DIMS_MICRO, DIMS_MICRO_EXACT
from lumotree.contract import Dims

#: Head maps matter: two key heads, four value heads, two KV heads, four query heads; K != V.
DIMS_HEADS = Dims(2, 4, 8, 12, 20, 4, 2, 16, 8, name="micro-heads")

_THREE = {"trees": ("comb:3", "star:4", "random:6"), "prefixes": (5, 2, 9), "page_size": 4, "inactive_fraction": 0.2}

#: Name -> what differs from a comb of six rows behind five committed tokens. In the order of what they cost.
LADDER: dict[str, dict[str, object]] = {
    "comb": {},
    "deep": {"trees": ("comb:5",), "prefixes": (6,)},
    "heads": {"dims": DIMS_HEADS, "trees": ("comb:3",)},
    "shuffled": {"trees": ("comb:4",), "placement": "shuffled"},
    "pages": {"trees": ("comb:4",), "prefixes": (7,), "page_size": 4, "inactive_fraction": 0.3},
    "inactive": {"trees": ("random:9",), "inactive_fraction": 0.4},
    "long": {"trees": ("comb:3",), "prefixes": (33,), "page_size": 8},
    "near_one": {"regime": "near_one"},
    "near_zero": {"regime": "near_zero"},
    "large_gates": {"regime": "large_gates"},
    "mid_gates": {"regime": "mid_gates"},
    "zero_keys": {"regime": "zero_keys"},
    "tiny_keys": {"regime": "tiny_keys"},
    "cold": {"regime": "cold"},
    "exact": {"dims": DIMS_MICRO_EXACT, "prefixes": (9,), "regime": "exact"},
    "start": {"prefixes": (0,)},
    "alike": {"trees": ("comb:3", "binary:2", "random:6", "random:6"), "prefixes": (4, 3, 6, 2)},
    "three": {**_THREE},
    "slots": {**_THREE, "trees": ("comb:2", "star:3", "comb:3"), "spare_slots": 12},
    "padding": {"trees": ("comb:3", "star:4"), "prefixes": (5, 3), "padding": 1, "padding_at": "start"},
    "layers": {"dims": replace(DIMS_MICRO, layers=3), "trees": ("comb:3", "star:4"), "prefixes": (5, 3), "padding": 1},
}


def ladder(seed: int, split: str = "heldout") -> Iterator[CaseSpec]:
    """The cases in order; seeds and splits draw other trees' shapes, operands, slots and pages."""
    for i, (name, fields) in enumerate(LADDER.items()):
        yield CaseSpec(**{
            "id": f"faults/{split}/{name}", "dims": DIMS_MICRO, "trees": ("comb:3",), "prefixes": (5,),
            "entropy": (seed, SPLITS[split], 5000 + i), "spare_slots": 3, "slack": 2 * (i % 2), **fields,
        })  # type: ignore[arg-type]  # fmt: skip
