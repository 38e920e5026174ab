"""The exact law of each sampler fault on a step: reachable or not, by what total variation, and the test against it.

    source = RecipeSource(recipe, step)                       # audit.fault_source: logits and parameters of a step
    found = fault_law(SAMPLER_FAULTS["residual_half"], step, source)
    found.tv, found.reachable, found.alternative              # alternative: for montecarlo.run_step(alternatives=...)
    faulty = SAMPLER_FAULTS["residual_half"].wrap(MULTI_ROUND, source)     # a ClosedSampler (and a CoinSampler)

`tv` is that of (last row, bonus) of one walk, drafts averaged over: a lower bound for that of the whole walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from audit.evidence import Alternative, LogRatio
from audit.fault_joint import LastRatio, cartesian, joint_of, joint_tv, shared_coin_last, table_ratio
from audit.fault_nodes import Drafts, Flaw, check_size, fixed_joint, node_law, sibling_joint
from audit.rule_law import Floats, RuleLaw, TokenLaw, multi_round_law, naive_law
from audit.sampler_cases import has_duplicates
from faults.sampler_fault import SamplerFault
from faults.sampler_types import StepSource
from lumotree.select_types import Step

UNREACHABLE = 1e-12
"""A total variation up to this is rounding."""

FLAWS: dict[str, Flaw] = {
    "residual_half": Flaw(draw="half"),
    "accept_zero": Flaw(accept="zero"),
    "accept_reused": Flaw(draw="accept"),
    "accept_is_draft": Flaw(accept="draft"),
    "residual_is_draft": Flaw(draw="draft"),
    "floor_24_bits": Flaw(accept="grid", draw="grid"),
    "accept_all": Flaw(accept="all"),
    "q_one": Flaw(accept="one"),
    "residual_unclamped": Flaw(residual="unclamped"),
    "residual_unnormalised": Flaw(residual="unnormalised"),
    "residual_from_p": Flaw(residual="target"),
    "resample_from_p": Flaw(draw="target"),
    "residual_softmax": Flaw(draw="softmax"),
    "renormalisation_forgotten": Flaw(declared="unrenormalised"),
    "q_with_replacement": Flaw(declared="replaced"),
    "sibling_order_ignored": Flaw(backwards=True),
    "duplicate_twice": Flaw(again=True),
}
"""What each fault of the coins or the arithmetic does at a row."""

_NOTES = {
    "floor_24_bits": "bonus after refusals of three redrawn siblings: taken with a full coin",
    "residual_softmax": "rows with several redrawn siblings: right",
    "one_stream_rows": "TV of the last row alone",
}


@dataclass(frozen=True, eq=False)
class FaultLaw:
    """What a fault does to a step.

    fault: its id. tv: exact total variation of (last row, bonus) from the clean rule, float64. reachable: it changes
    the law of a walk, makes walks depend on each other, or is harmless (to be run always). dependence: the second (then
    tv is 0 and the independence tests must see it). law: the faulty law row by row, None if the rows of a walk are not
    independent. alternative: log likelihood ratio, None where the fault is unreachable, harmless, or one of dependence.
    clean: to hand to run_step as `law`: of the clean rule or, for a harmless fault, the law that it follows. note: why
    it is unreachable, or what `tv` leaves out; "" if nothing.
    """

    fault: str
    tv: float
    reachable: bool
    dependence: bool
    law: RuleLaw | None
    alternative: Alternative | None
    clean: RuleLaw
    note: str = ""


def fault_law(
    fault: SamplerFault,
    step: Step,
    source: StepSource | None = None,
    clean: RuleLaw | None = None,
    greedy: bool = False,
) -> FaultLaw:
    """Return the law of a rule with the fault on a step: of multi-round rejection or of the greedy rule.

    clean: the rule's clean law, to save computing it. Raises InputError if the fault reads logits and there is no
    source, and if the draft laws are too wide to enumerate.
    """
    if greedy:
        return _greedy(fault, step, source)
    clean = multi_round_law(step) if clean is None else clean
    if fault.expect == "harmless":
        harmless = naive_law(step)
        return FaultLaw(fault.id, joint_tv(harmless, clean), True, False, harmless, None, harmless, "harmless")
    if fault.dependence:
        return FaultLaw(fault.id, 0.0, True, True, clean, None, clean, "walks or streams depend on each other")
    if fault.needs == "greedy" or (fault.needs and (fault.needs == "laws") != (step.laws is not None)):
        why = {"greedy": "the greedy rule", "laws": "redrawn drafts", "fixed": "fixed drafts"}[fault.needs]
        return FaultLaw(fault.id, 0.0, False, False, clean, None, clean, f"needs {why}")
    if fault.id == "duplicate_twice" and not has_duplicates(step):
        return FaultLaw(fault.id, 0.0, False, False, clean, None, clean, "no sibling repeats another")
    if fault.id in _WHOLE_WALK:
        return _WHOLE_WALK[fault.id](fault, step, clean)
    return _compared(fault, faulty_law(fault, step, source, clean), clean)


def _compared(fault: SamplerFault, law: RuleLaw, clean: RuleLaw) -> FaultLaw:
    tv = joint_tv(law, clean)
    if tv <= UNREACHABLE:
        return FaultLaw(fault.id, tv, False, False, law, None, clean, "the step's law is unchanged")
    return FaultLaw(fault.id, tv, True, False, law, LogRatio(law, clean), clean, _NOTES.get(fault.id, ""))


def faulty_law(fault: SamplerFault, step: Step, source: StepSource | None, clean: RuleLaw) -> RuleLaw:
    """Return the law of multi-round rejection with the fault, for faults whose rows stay independent."""
    change = fault.change
    if fault.id == "bonus_greedy":
        best = np.argmax(step.target.numpy(), axis=1)
        bonus = np.zeros_like(clean.bonus)
        bonus[np.arange(len(best)), best] = clean.bonus.sum(1)
        return replace(clean, bonus=bonus)
    if fault.id == "bonus_from_parent":
        return replace(clean, bonus=_from_parents(step, clean))
    verified = change.rows(step, source) if change.rows else step
    drawn = change.drawn(step) if change.drawn else step
    if fault.id not in FLAWS and drawn is step and verified.target is step.target and verified.laws is step.laws:
        return clean
    return flawed_law(verified, drawn, FLAWS.get(fault.id, Flaw()))


def _from_parents(step: Step, clean: RuleLaw) -> Floats:
    bonus = clean.bonus.copy()
    for row in step.tree.active_rows[1:]:
        if not step.tree.active_children(row):
            bonus[row] = step.target[step.tree.parents[row]].numpy()
    return bonus


def flawed_law(verified: Step, drawn: Step, flaw: Flaw) -> RuleLaw:
    """Return the law of a flawed rule that verifies one step while the drafts come from another."""
    tree, target = verified.tree, verified.target.numpy()
    child = [TokenLaw(np.zeros(0, np.int64), np.zeros(0))] * tree.n
    bonus = np.zeros(target.shape)
    for row in tree.active_rows:
        drafts = drafts_at(verified, drawn, row)
        accepted, bonus[row] = node_law(target[row], drafts, flaw)
        for index, mass in zip(tree.active_children(row), accepted, strict=True):
            child[index] = TokenLaw(drafts.tokens, mass)
    return RuleLaw(tree, tuple(child), bonus)


def drafts_at(verified: Step, drawn: Step, row: int) -> Drafts:
    """Return how the children of a row are drafted and declared. Raises InputError if there are too many drafts."""
    children = list(drawn.tree.active_children(row))
    declared = None if verified.laws is None else verified.laws[row].numpy()
    if not children:
        return Drafts(np.zeros(0, np.int64), None, np.ones(()))
    used = np.unique(drawn.tree.tokens[children]).astype(np.int64)
    if drawn.laws is not None:
        used = np.flatnonzero(drawn.laws[row].numpy())
    tokens = used if declared is None else np.union1d(used, np.flatnonzero(declared))
    check_size(len(tokens), len(children))
    if drawn.laws is None:
        joint = fixed_joint(np.searchsorted(tokens, drawn.tree.tokens[children]).tolist(), len(tokens))
    else:
        joint = sibling_joint(drawn.laws[row].numpy()[tokens], len(children))
    return Drafts(tokens, None if declared is None else declared[tokens], joint)


def _cartesian(fault: SamplerFault, step: Step, clean: RuleLaw) -> FaultLaw:
    joint, right = cartesian(clean), joint_of(clean)
    tv = float(np.abs(joint - right).sum() / 2)
    return FaultLaw(fault.id, tv, tv > UNREACHABLE, False, None, table_ratio(joint, right), clean)


def _one_stream(fault: SamplerFault, step: Step, clean: RuleLaw) -> FaultLaw:
    target, tree = step.target.numpy(), step.tree
    rows = {row: (target[row], drafts_at(step, step, row)) for row in tree.active_rows if tree.active_children(row)}
    stop, right = shared_coin_last(tree, rows), clean.reach * clean.bonus.sum(1)
    tv = float(np.abs(stop - right).sum() / 2)
    return FaultLaw(fault.id, tv, tv > UNREACHABLE, False, None, LastRatio(stop, right), clean, _NOTES[fault.id])


_WHOLE_WALK: dict[str, Callable[[SamplerFault, Step, RuleLaw], FaultLaw]] = {
    "cartesian_write": _cartesian,
    "one_stream_rows": _one_stream,
}


def _greedy(fault: SamplerFault, step: Step, source: StepSource | None) -> FaultLaw:
    """The greedy rule: what is emitted is certain, so a law is one path. Target faults and `argmax_last` alone."""
    clean = naive_law(greedy_step(step))
    if fault.needs == "greedy":
        return _compared(fault, naive_law(greedy_step(step, last=True)), clean)
    if fault.kind == "target" and fault.change.rows:
        return _compared(fault, naive_law(greedy_step(fault.change.rows(step, source))), clean)
    return FaultLaw(fault.id, 0.0, False, False, clean, None, clean, "not computed for the greedy rule")


def greedy_step(step: Step, last: bool = False) -> Step:
    """Return the step with every row a point mass on its first (or last) argmax, drafts fixed."""
    target = step.target.numpy()
    best = target.shape[1] - 1 - np.argmax(target[:, ::-1], axis=1) if last else np.argmax(target, axis=1)
    hot = np.zeros_like(target)
    hot[np.arange(len(best)), best] = 1.0
    return replace(step, target=torch.from_numpy(hot), laws=None)
