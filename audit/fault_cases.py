"""Small cases on which the faults of the catalogue are tried, from the smallest on.

Two families that share neither seeds, nor trees, nor sizes: the one on which checks and faults were written, and the
held-out one on which probabilities, sizes and diagnoses are measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from audit.cases import SPLITS, CaseSpec
from audit.families import DIMS_MICRO, DIMS_MICRO_EXACT
from lumotree.contract import Dims

#: Head maps matter: two key heads, four value heads, two KV heads, four query heads; K != V.
DIMS_HEADS = Dims(2, 4, 8, 12, 20, 4, 2, 16, 8, name="micro-heads")

#: No dimension is a multiple of 4, and those that tiles run over are longer than one of 8.
DIMS_RAGGED = Dims(2, 4, 11, 13, 21, 4, 2, 14, 6, name="micro-ragged")

#: The same for the held-out family: other heads, widths and ratios.
DIMS_OTHER = Dims(1, 2, 12, 8, 14, 3, 1, 12, 8, name="other")
DIMS_OTHER_HEADS = Dims(3, 6, 12, 10, 18, 6, 3, 12, 8, name="other-heads")
DIMS_OTHER_RAGGED = Dims(1, 3, 13, 9, 19, 3, 1, 18, 10, name="other-ragged")
DIMS_OTHER_EXACT = Dims(1, 2, 16, 8, 14, 3, 1, 64, 8, name="other-exact")

_THREE: dict[str, object] = {
    "trees": ("comb:3", "star:4", "random:6"), "prefixes": (5, 2, 9), "page_size": 4, "inactive_fraction": 0.2,
}  # fmt: skip

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
    "ragged": {"dims": DIMS_RAGGED},
    "five": {
        "trees": ("random:6", "comb:3", "star:3", "chain:2", "comb:2"),
        "prefixes": (4, 6, 3, 0, 7),
        "page_size": 4,
        "inactive_fraction": 0.34,
        "padding": 1,
        "padding_at": "start",
    },
}

_BASE: dict[str, object] = {"dims": DIMS_OTHER, "trees": ("random:8",), "prefixes": (11,)}
_OTHER_THREE: dict[str, object] = {
    "dims": DIMS_OTHER, "trees": ("random:7", "random:5", "binary:2"), "prefixes": (8, 3, 14), "page_size": 2,
    "inactive_fraction": 0.1,
}  # fmt: skip

#: The same names for the held-out family; trees are random, so that a seed may lack what a fault needs.
MEASURE: dict[str, dict[str, object]] = {
    "comb": _BASE,
    "deep": {**_BASE, "trees": ("random:14",), "prefixes": (4,)},
    "heads": {**_BASE, "dims": DIMS_OTHER_HEADS},
    "shuffled": {**_BASE, "trees": ("random:12",), "placement": "shuffled"},
    "pages": {**_BASE, "prefixes": (10,), "page_size": 2, "inactive_fraction": 0.2},
    "inactive": {**_BASE, "trees": ("random:13",), "inactive_fraction": 0.3},
    "long": {**_BASE, "prefixes": (45,), "page_size": 16},
    **{name: {**_BASE, "regime": name}
       for name in ("near_one", "near_zero", "large_gates", "mid_gates", "zero_keys", "tiny_keys", "cold")},
    "exact": {"dims": DIMS_OTHER_EXACT, "trees": ("random:8",), "prefixes": (12,), "regime": "exact"},
    "start": {**_BASE, "prefixes": (0,)},
    "alike": {"dims": DIMS_OTHER, "trees": ("random:7",) * 3 + ("binary:2",), "prefixes": (6, 2, 9, 4)},
    "three": _OTHER_THREE,
    "slots": {**_OTHER_THREE, "trees": ("random:4", "random:5", "random:7"), "spare_slots": 14},
    "padding": {**_BASE, "trees": ("random:7", "random:5"), "prefixes": (6, 8), "padding": 2, "padding_at": "middle"},
    "layers": {"dims": replace(DIMS_OTHER, layers=3), "trees": ("random:7", "random:6"), "prefixes": (6, 8),
               "padding": 1, "padding_at": "start"},
    "ragged": {**_BASE, "dims": DIMS_OTHER_RAGGED},
    "five": {"dims": DIMS_OTHER, "trees": ("random:7", "random:8", "random:3", "random:5", "binary:2"),
             "prefixes": (7, 2, 5, 0, 10), "page_size": 2, "inactive_fraction": 0.3, "padding": 1,
             "padding_at": "start"},
}  # fmt: skip


def ladder(seed: int, split: str = "heldout") -> Iterator[CaseSpec]:
    """The cases on which faults were written, in order; a seed draws operands, slots, pages and random trees."""
    return _specs(LADDER, "faults", 5000, seed, split)


def heldout_ladder(seed: int) -> Iterator[CaseSpec]:
    """The cases of the measurements, in order."""
    return _specs(MEASURE, "measure", 6000, seed, "heldout")


def _specs(family: dict[str, dict[str, object]], name: str, stream: int, seed: int, split: str) -> Iterator[CaseSpec]:
    for i, (kind, fields) in enumerate(family.items()):
        yield CaseSpec(**{
            "id": f"{name}/{split}/{kind}", "dims": DIMS_MICRO, "trees": ("comb:3",), "prefixes": (5,),
            "entropy": (seed, SPLITS[split], stream + i), "spare_slots": 3, "slack": 2 * (i % 2), **fields,
        })  # type: ignore[arg-type]  # fmt: skip
