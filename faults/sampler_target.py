"""Faults of the target rows: a right rule verifies against the wrong law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from faults.sampler_fault import SamplerFault
from faults.sampler_types import Change, Reading, StepSource
from lumotree.errors import InputError
from lumotree.select_types import Step

Rows = Callable[[Step, StepSource | None], Step]

TAIL_PARTS = 16


def read(reading: Reading) -> Rows:
    """The change that reads the step's logits in another way."""

    def rows(step: Step, source: StepSource | None) -> Step:
        if source is None:
            raise InputError(f"a fault that reads logits needs the step's source; reading: {reading}")
        return replace(step, target=source.target(reading))

    return rows


def rolled(step: Step, source: StepSource | None = None) -> Step:
    """Each active row reads the target of the active row before it, the first that of the last."""
    active = list(step.tree.active_rows)
    return _with_rows(step, active, step.target[active].roll(1, 0))


def tail_missing(step: Step, source: StepSource | None = None) -> Step:
    """Tokens of the last sixteenth of the vocabulary are never emitted; a row with nothing else stays as it is."""
    target = step.target.clone()
    vocab = target.shape[1]
    target[:, vocab - vocab // TAIL_PARTS :] = 0
    total = target.sum(1, keepdim=True)
    return replace(step, target=torch.where(total > 0, target / total.clamp(min=1e-300), step.target))


def inplace_zeroed(step: Step, source: StepSource | None = None) -> Step:
    """A row has lost the token that was drafted on the way to it: its slice was zeroed in place for the row before."""
    if step.laws is not None:  # its drafts change from walk to walk, its rows do not
        return step
    active = list(step.tree.active_rows[1:])
    rows = step.target[active].clone()
    rows[torch.arange(len(active)), torch.from_numpy(step.tree.tokens.copy())[active]] = 0
    total = rows.sum(1, keepdim=True)
    return _with_rows(step, active, torch.where(total > 0, rows / total.clamp(min=1e-300), step.target[active]))


def first_row_again(step: Step, source: StepSource | None = None) -> Step:
    """Every row at depth 2 or more reads the target of row 0."""
    deep = [row for row in step.tree.active_rows if step.tree.depth[row] >= 2]
    return _with_rows(step, deep, step.target[:1].expand(len(deep), -1))


def verified_greedily(step: Step, source: StepSource | None = None) -> Step:
    """Rows with children are one-hot at their first argmax; only the bonus at a leaf is sampled."""
    inner = [row for row in step.tree.active_rows if step.tree.active_children(row)]
    hot = torch.zeros_like(step.target[inner])
    best = torch.from_numpy(step.target[inner].cpu().numpy().argmax(1))  # NumPy promises the first of tied entries
    return _with_rows(step, inner, hot.scatter_(1, best[:, None], 1.0))


def _with_rows(step: Step, rows: list[int], values: Tensor) -> Step:
    target = step.target.clone()
    target[rows] = values
    return replace(step, target=target)


def _fault(name: str, statement: str, provenance: str, rows: Rows, needs: str = "") -> SamplerFault:
    return SamplerFault(
        name, statement, provenance, "target", Change(rows=rows), needs="fixed" if needs == "fixed" else ""
    )


FAULTS = [
    _fault("temperature_twice", "temperature is applied twice", "contract section 6", read(Reading(twice=True))),
    _fault("temperature_1_02", "temperature is 2% too high", "issue item 6", read(Reading(heat=1.02))),
    _fault("target_rolled", "target rows are rolled by one row", "contract section 6", rolled),
    _fault("top_k_after_top_p", "top-p is applied before top-k", "issue item 6", read(Reading(swapped=True))),
    _fault(
        "joint_top_k_top_p",
        "top-k and top-p look at one law where the plain sampler renormalises between them",
        "defect-classes M3 (topk_then_topp)",
        read(Reading(joint=True)),
    ),
    _fault(
        "tie_over_accept",
        "all tokens tied at the top-k boundary pass",
        "defect-classes M1 (tie_over_accept), M11",
        read(Reading(ties="all")),
    ),
    _fault("min_p_ignored", "min-p is ignored on the tree path", "contract section 6", read(Reading(min_p="none"))),
    _fault("min_p_bonus_only", "min-p applies at leaves only", "defect-classes M4", read(Reading(min_p="leaves"))),
    _fault(
        "penalties_flat",
        "penalties count all rows before a row in the flat buffer instead of its ancestors",
        "issue item 6; defect-classes M8",
        read(Reading(penalty="flat")),
    ),
    _fault(
        "penalty_last_only",
        "penalties count the last token of the path only",
        "defect-classes M6 (penalty_last_only)",
        read(Reading(penalty="last")),
    ),
    _fault(
        "penalty_twice_last",
        "penalties count the last token of the path twice",
        "defect-classes M7",
        read(Reading(penalty="twice-last")),
    ),
    _fault(
        "penalty_siblings",
        "penalties count refused siblings: their counter is shared",
        "defect-classes M8 (shared_counter)",
        read(Reading(penalty="siblings")),
    ),
    _fault("penalties_ignored", "penalties are ignored", "defect-classes M9", read(Reading(penalty="none"))),
    _fault("tail_missing", "the last sixteenth of the vocabulary is never emitted", "issue item 6; L6", tail_missing),
    _fault(
        "inplace_target",
        "the drafted token's target probability was zeroed in place in the next row too",
        "defect-classes K5 (inplace_target_probs)",
        inplace_zeroed,
        "fixed",
    ),
    _fault("first_row_again", "deep rows read row 0's target", "defect-classes K11 (row0_runnerups)", first_row_again),
    _fault(
        "verified_greedily",
        "verified rows are greedy, only the bonus at a leaf is sampled",
        "defect-classes K10, K2",
        verified_greedily,
    ),
]
