"""The rules, and the sampler faults whose law is rational, each a `Rule` with one field changed.

The definitions here are what "the exact law of fault X" means in a report. A fault that needs more than one row of
coins (one stream for all rows) or more than one step (generator not advanced) has no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from audit.law_rows import Rule, Vector, point, without_replacement


def first_argmax(row: Vector) -> Vector:
    """Return the point mass on the first of the largest entries."""
    return point(len(row), int(np.argmax(row)), row)


def last_argmax(row: Vector) -> Vector:
    """Return the point mass on the last of the largest entries."""
    return point(len(row), len(row) - 1 - int(np.argmax(row[::-1])), row)


def tempered(power: int | float) -> Callable[[Vector], Vector]:
    """Return the map p -> p^power / sum(p^power), that is a further temperature of 1/power."""

    def reshape(row: Vector) -> Vector:
        raised: Vector = row**power
        raised /= raised.sum()
        return raised

    return reshape


def without_tail(row: Vector) -> Vector:
    """Return the row without the tokens of the second half of the vocabulary (as a block that is never scanned).

    A row that has nothing in the first half stays as it is.
    """
    kept = row.copy()
    kept[(len(row) + 1) // 2 :] = kept[(len(row) + 1) // 2 :] * 0
    total = kept.sum()
    return kept / total if total > 0 else row


def unrenormalised(law: Vector, earlier: Sequence[int]) -> Vector | None:
    """Return the law with the earlier siblings' tokens removed, its sum left below 1."""
    left = without_replacement(law, earlier)
    return None if left is None else left * (1 - law[list(set(earlier))].sum())


def with_replacement(law: Vector, earlier: Sequence[int]) -> Vector | None:
    """Return the first child's law for every sibling."""
    return None if without_replacement(law, earlier) is None else law


def top_k(law: Vector, earlier: Sequence[int]) -> Vector | None:
    """Draft deterministically: the largest entry that no earlier sibling has (first of ties)."""
    left = without_replacement(law, earlier)
    return None if left is None else first_argmax(left)


def sharpened_draft(law: Vector, earlier: Sequence[int]) -> Vector | None:
    """Draft from q^2 / sum(q^2) while q is declared."""
    return without_replacement(tempered(2)(law), earlier)


def unclamped(residual: Vector, target: Vector, law: Vector) -> Vector:
    """Return p - q with its negative entries."""
    return residual - law


def target_again(residual: Vector, target: Vector, law: Vector) -> Vector:
    """Return the target row: later siblings and the correction token do not know of the refusal."""
    return target


GREEDY = Rule("greedy", "follow the first argmax", "naive", truth=first_argmax, reshape=first_argmax)
NAIVE = Rule("naive", "draw from the target, follow the first child that carries the token", "naive")
MULTIROUND = Rule("multiround", "multi-round rejection over siblings drawn without replacement")
DETERMINISTIC = Rule("deterministic", "multi-round rejection of point-mass proposals", certain=True)
TRAVERSAL = Rule("traversal", "bottom-up verification (arXiv 2505.12398)", "traversal")

RULES: dict[str, Rule] = {rule.name: rule for rule in (GREEDY, NAIVE, MULTIROUND, DETERMINISTIC, TRAVERSAL)}
"""The lossless rules. "deterministic" is one for fixed drafts only, "multiround" for sampled ones."""


def faults_of(rule: Rule) -> dict[str, Rule]:
    """Return the faults of a rule by name; not every one is reachable (differs in law) in every step."""
    changes: dict[str, tuple[str, dict[str, object]]] = dict(_ANY)
    if rule.kind == "rejection":
        changes |= _REJECTION
    if rule.name == "greedy":
        changes = {"argmax-last": ("the last of tied maxima is taken", {"reshape": last_argmax})}
    return {
        name: replace(rule, name=f"{rule.name}/{name}", summary=summary, **fields)  # type: ignore[arg-type]
        for name, (summary, fields) in changes.items()
    }


_ANY: dict[str, tuple[str, dict[str, object]]] = {
    "temperature-twice": ("temperature 1/2 applied a second time: p^2", {"reshape": tempered(2)}),
    "rolled-rows": ("row r reads the target row of row r - 1", {"roll": 1}),
    "residual-half": ("the coin of every token drawn is 0.5", {"bonus_coin": "half"}),
    "bonus-parent": ("a bonus without a refusal is drawn from the parent's row", {"bonus_row": "parent"}),
    "tail-missing": ("the second half of the vocabulary is never emitted", {"reshape": without_tail}),
    "temperature-1.02": ("temperature 1.02 (float64 only)", {"reshape": tempered(1 / 1.02)}),
}

_REJECTION: dict[str, tuple[str, dict[str, object]]] = {
    "accept-zero": ("the accept coin is 0", {"accept_coin": "zero"}),
    "accept-reused": ("after a refusal the refused coin draws the token", {"bonus_coin": "accept"}),
    "accept-is-draft": ("the coin that drew a token accepts it", {"accept_coin": "draft"}),
    "unclamped": ("the residual p - q keeps its negative entries", {"residual": unclamped}),
    "residual-unnormalised": ("the residual is not divided by its sum", {"normalise": False}),
    "residual-from-p": ("after a refusal the target row is used again", {"residual": target_again}),
    "q-one": ("the accept test divides by 1 instead of q; the residual subtracts q", {"ratio_one": True}),
    "point-mass": ("a control, lossless: the drafted token is taken for a point mass throughout", {"certain": True}),
    "q-undeclared": ("drafts come from q^2, q is declared", {"draw": sharpened_draft}),
    "q-top-k": ("drafts are the k largest, q is declared", {"draw": top_k}),
    "bonus-greedy": ("the token drawn is the argmax of its weights", {"bonus_greedy": True}),
    "order-reversed": ("siblings are tried last to first, with laws conditioned in that order", {"reverse": True}),
    "duplicate-twice": ("a duplicate sibling gets a second chance", {"second_try": True}),
    "q-unrenormalised": ("later siblings' law is not renormalised", {"declare": unrenormalised}),
    "q-with-replacement": ("later siblings are scored with the first one's law", {"declare": with_replacement}),
}

FLOAT_ONLY = ("temperature-1.02",)
"""Faults whose law is not rational."""

_NOTHING_TO_GET_WRONG = ("accept-is-draft", "q-undeclared", "q-top-k", "q-one")
_NO_ORDER = ("order-reversed", "q-unrenormalised", "q-with-replacement")

LOSSLESS_FAULTS = frozenset(
    {
        "multiround/point-mass",  # accepts less, emits the same
        "multiround/duplicate-twice",  # siblings drawn without replacement never repeat
        "deterministic/point-mass",
        *(f"deterministic/{name}" for name in (*_NOTHING_TO_GET_WRONG, *_NO_ORDER)),  # fixed drafts have no law
    }
)
"""Faults that change no emitted law anywhere: as controls they must come out lossless."""


def controls() -> list[Rule]:
    """Return every fault that the exact engine can judge, as controls of a run."""
    faults = [fault for rule in RULES.values() if rule.kind != "traversal" for fault in faults_of(rule).values()]
    return [fault for fault in faults if not fault.roll and not fault.name.endswith(FLOAT_ONLY)]
