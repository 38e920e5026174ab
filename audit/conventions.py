"""Conventions quantified: how far two readings of the same parameters are apart on a step, exactly.

For each captured-like step: the two tie conventions at the top-k boundary, min-p honoured and ignored, top-k and top-p
one after the other and jointly (what the published audit left open, contract section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from audit.fault_joint import joint_tv
from audit.fault_source import LogitsSource
from audit.rule_law import RuleLaw, multi_round_law
from faults.sampler_types import Reading
from lumotree.sampling import SamplingParams
from lumotree.select_types import Step


@dataclass(frozen=True)
class Convention:
    """One pair of conventions on one step.

    name: "top-k ties: index / all", "min-p: honoured / ignored" or "top-k and top-p: sequential / joint"; the first is
    the step's own. tv: exact TV of (last row, bonus) of a walk of multi-round rejection under either, float64. row_tv:
    the largest TV of one target row, at `row`. applies: whether the step sets the parameters at all.
    """

    name: str
    tv: float
    row_tv: float
    row: int
    applies: bool


_PAIRS: tuple[tuple[str, Reading, Callable[[SamplingParams], bool]], ...] = (
    ("top-k ties: index / all", Reading(ties="all"), lambda params: params.top_k > 0),
    ("min-p: honoured / ignored", Reading(min_p="none"), lambda params: params.min_p > 0),
    (
        "top-k and top-p: sequential / joint",
        Reading(joint=True),
        lambda params: params.top_k > 0 and params.top_p < 1,
    ),
)


def conventions(step: Step, source: LogitsSource, clean: RuleLaw | None = None) -> list[Convention]:
    """Return the three pairs on a step; a pair whose parameters are not set has a TV of 0 without being computed.

    clean: the step's clean multi-round law, to save computing it. Raises InputError as `rule_law` does.
    """
    clean = multi_round_law(step) if clean is None else clean
    return [
        _compared(name, step, source, reading, clean)
        if applies(source.params)
        else Convention(name, 0.0, 0.0, 0, False)
        for name, reading, applies in _PAIRS
    ]


def _compared(name: str, step: Step, source: LogitsSource, reading: Reading, clean: RuleLaw) -> Convention:
    other = source.target(reading)
    rows = np.array(step.tree.active_rows)
    gaps = np.array([float((other[row] - step.target[row]).abs().sum()) / 2 for row in rows])
    tv = joint_tv(multi_round_law(replace(step, target=other)), clean) if gaps.any() else 0.0
    worst = int(np.argmax(gaps))
    return Convention(name, tv, float(gaps[worst]), int(rows[worst]), True)
