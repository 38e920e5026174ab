"""The public defect classes that the catalogue is drawn from, and what is not in it, with the reason.

Ids A to R and X: classes of defects seen in public serving stacks, numbered as in the project's field notes (gaps are
classes that were merged there). DF: failure modes met while a design of this kind was first built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from faults.catalogue import Fault
from faults.sampler_fault import SamplerFault

_NUMBERS: dict[str, tuple[int, ...]] = {
    "A": (1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14),
    "B": (1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14),
    "C": (1, 3, 4, 6, 7, 8, 9),
    "D": (1, 2, 3, 4),
    "E": (1, 3, 4, 5, 7, 8),
    "F": (1, 2, 4, 5, 6, 7),
    "G": (1, 2, 3, 5, 6, 7),
    "H": (1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 13, 14),
    "I": (1, 2, 3, 4, 6, 7, 8),
    "J": (1, 3, 4),
    "K": tuple(range(1, 17)),
    "L": tuple(range(1, 8)),
    "M": (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13),
    "N": (1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 14, 16, 17, 18),
    "O": (2, 3, 4, 6),
    "P": (2, 3, 4),
    "Q": (2, 3),
    "R": (2, 3),
    "X": (1, 2, 3, 4, 5),
    "DF": tuple(range(1, 37)),
}

#: Every class, in order.
CLASSES: tuple[str, ...] = tuple(f"{letter}{n}" for letter, numbers in _NUMBERS.items() for n in numbers)

#: Classes that no fault carries, and why.
NOT_EXPRESSED: dict[str, str] = {
    "A14": "roll back on a cache without snapshots: a call that this protocol does not have",
    "F7": "KV restored without recurrent state: a partial restore is a call that this protocol does not have",
    "H4": "missing, self, forward and cyclic parents are refused as bad input by `Tree` (see reports/refusals.md)",
    "H5": "a row with two parents cannot be written down in a parent array",
    "H9": "a grammar mask belongs to the logits; the sampler suite has the masks of penalties along a path instead",
    "J4": "the drafter's pending hidden row is no surface of a kernel; the decoding cycle owns it and is audited apart",
    "K6": "a block rule's own condition has no law row by row; judged on the exact domain of the sampler suite",
    "K13": "cause unknown in public; its trigger, rows that sum to 0, is refused as bad input",
    "K14": "a draft of -1 is refused as bad input before any sampler sees it",
    "K15": "NaN rows are refused as bad input",
    "M5": "temperature 0 beside others divides by nothing here: rows are the audit's own",
    "M13": "as M5, temperature 1e-6",
    "Q2": "tokens behind the end of a text are a matter of the scheduler, which cuts the accepted path",
    "X3": "near-ties under another reduction order are right; split_k, sqrt_norm, kv_layout and wy are the controls",
    "DF1": "the penalty history of a chain applied to a tree: expressed in the sampler suite as penalties_flat",
    "DF2": "one generator for a process: expressed in the sampler suite as fixed_seed",
    "DF17": "scales of a quantised projection belong to no audited surface",
    "DF21": "a global generator in the path of a request: expressed in the sampler suite as late_generator",
    "DF25": "allocation under capture shows only on a GPU: `check --graph`",
    "DF28": "a gate that passes while the fix never ran: every wrapper keeps account of what it changed instead",
    "DF34": "duplicate siblings with the largest logit: expressed in the sampler suite as duplicate_twice",
    "DF35": "a splice that never touched what is judged: as DF28",
}


def covered(faults: Mapping[str, Fault], sampler: Mapping[str, SamplerFault]) -> dict[str, list[str]]:
    """Class -> ids of the faults that are drawn from it, for every class that has one."""
    found: dict[str, list[str]] = {}
    for name, classes in [(f.id, f.classes) for f in faults.values()] + [
        (f.id, tuple(re.findall(r"\b[A-RX]\d+\b", f.provenance))) for f in sampler.values()
    ]:
        for one in classes:
            found.setdefault(one, []).append(name)
    return {one: found[one] for one in CLASSES if one in found}
