"""Faults of the draft law: what the rule divides by is not what the drafts were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from faults.sampler_fault import SamplerFault
from faults.sampler_types import Change, StepSource
from lumotree.errors import InputError
from lumotree.select_types import Step
from lumotree.tree import Tree

PROCESSED = 16
SHARPER = 1.25


def _drawn_from(law: Callable[[Tensor, int], Tensor]) -> Callable[[Step], Step]:
    """Drafts come from law(row of q, children of the row) while q is declared."""

    def drawn(step: Step) -> Step:
        if step.laws is None:
            return step
        laws = step.laws.clone()
        for row in step.tree.active_rows:
            children = step.tree.active_children(row)
            if children:
                changed = law(step.laws[row], len(children))
                laws[row] = changed / changed.sum()
        return replace(step, laws=laws)

    return drawn


def sharper(law: Tensor, children: int) -> Tensor:
    """q^1.25."""
    return law**SHARPER


def processed(law: Tensor, children: int) -> Tensor:
    """The 16 largest of q, first ones among ties; half of its tokens where it has fewer than 32."""
    size = max(children, min(PROCESSED, int((law > 0).sum()) // 2))
    kept = torch.zeros_like(law)
    order = torch.argsort(law, descending=True, stable=True)[:size]
    kept[order] = law[order]
    return kept


def in_bf16(law: Tensor, children: int) -> Tensor:
    """q rounded to bf16."""
    return law.to(torch.bfloat16).to(torch.float64)


def largest(step: Step) -> Step:
    """The step with fixed drafts: the k-th child of a row carries the k-th largest token of its law."""
    if step.laws is None:
        return step
    tokens = step.tree.tokens.copy()
    for row in step.tree.active_rows:
        children = step.tree.active_children(row)
        order = torch.argsort(step.laws[row], descending=True, stable=True)[: len(children)]
        tokens[list(children)] = order.numpy()
    tree = Tree.make(step.tree.parents, tokens=tokens, vocab=step.target.shape[1], active=step.tree.active)
    return Step(tree, step.target)


def before_temperature(step: Step, source: StepSource | None) -> Step:
    """The rule divides by q^T, the draft's law before temperature, while drafts come from q."""
    if step.laws is None:
        return step
    if source is None:
        raise InputError("fault q_before_temperature: needs the step's source for its temperature")
    # The support stays what it is: 0^T = 0.
    cooled = step.laws**source.temperature
    total = cooled.sum(1, keepdim=True)
    return replace(step, laws=cooled / torch.where(total > 0, total, 1.0))


FAULTS = [
    SamplerFault(
        "q_sharper",
        "drafts are drawn from a sharper law (q^1.25) than the one declared",
        "issue item 6; defect-classes K3",
        "laws",
        Change(drawn=_drawn_from(sharper)),
        needs="laws",
    ),
    SamplerFault(
        "q_raw_vs_processed",
        "drafts are drawn from the top 16 of q, raw q is declared",
        "defect-classes K3 (q_raw_vs_processed)",
        "laws",
        Change(drawn=_drawn_from(processed)),
        needs="laws",
    ),
    SamplerFault(
        "argmax_draft_softmax_q",
        "drafts are the largest tokens of q, q is declared",
        "defect-classes K8 (argmax_draft_softmax_q), K2, K7",
        "laws",
        Change(drawn=largest),
        needs="laws",
    ),
    SamplerFault(
        "bf16_draw",
        "drafts are drawn from q in bf16, q is declared in full precision",
        "defect-classes K4",
        "laws",
        Change(drawn=_drawn_from(in_bf16)),
        needs="laws",
    ),
    SamplerFault(
        "q_before_temperature",
        "q is taken before temperature, drafts are drawn after it",
        "issue item 6",
        "laws",
        Change(rows=before_temperature),
        needs="laws",
    ),
]
