"""One captured-like step from end to end: controls, conventions, pairs, Monte Carlo. Runs in a worker process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from audit.conventions import Convention, conventions
from audit.evidence import Alternative
from audit.montecarlo import CHUNK, LOOKS, RUN_LEVEL, WALKS, StepResult, run_step, stream_seed
from audit.rule_law import Floats, RuleLaw, multi_round_law, naive_law
from audit.sampler_cases import CapturedCase, repeated_rows
from audit.sampler_control import (
    BATTERY_WALKS,
    MAX_WALKS,
    CachedSource,
    ControlPlan,
    ControlResult,
    checked_faults,
    run_controls,
)
from audit.sampler_greedy import GREEDY_WALKS, GreedyResult, greedy_controls, greedy_drafts, run_greedy
from audit.sampler_guard import CoinWalker, Guarded, PreparedRule
from audit.sampler_paired import PairedResult, paired
from audit.sampler_tests import MIN_VISITS
from lumotree.backends.sampler_loader import LoadedSampler, load_sampler
from lumotree.select import RULES
from lumotree.select_types import Coins, Step, Walks

PILOT = 16_384
"""Walks from which it is estimated which alternatives a run can decide; they are not used again."""

FEW = (1, 2, 3, 5, 8, 32, 33)
"""Small batches in which a sampler with coins must answer as in a large one."""

RARE = MIN_VISITS / WALKS
"""Part of the walks below which a row is not tested at the published size; multi-round visits every row more often."""


@dataclass(frozen=True)
class StepTask:
    """What to do on one step. level: false-alarm probability of the step; small numbers are for tests of the audit."""

    spec: str
    case: CapturedCase
    seed: int = 1
    walks: int = WALKS
    level: float = RUN_LEVEL / 6
    chunk: int = CHUNK
    looks: int = LOOKS
    min_visits: int = MIN_VISITS
    controls: bool = True
    harmless: bool = True
    faults: tuple[str, ...] = ()
    max_walks: int = MAX_WALKS
    battery_walks: int = BATTERY_WALKS


@dataclass(frozen=True)
class StepOutcome:
    """What one step showed. result: None for a greedy sampler or one with coins that is too slow for statistics;
    greedy: only for one. paired: None where the sampler is
    closed or the rule itself. out_of_reach: alternatives that `walks` walks cannot decide. changed: inputs that the
    sampler wrote to. unequal: how answers to the same coins differed, or "". rare: rows that the clean rule visits in
    less than RARE of the walks, so that a step of the published size cannot test them; certain: rows that need no test,
    as they are never visited or their law is one token; seconds: spent."""

    case: CapturedCase
    result: StepResult | None
    greedy: GreedyResult | None
    paired: PairedResult | None
    controls: tuple[ControlResult, ...]
    conventions: tuple[Convention, ...]
    out_of_reach: tuple[str, ...]
    changed: tuple[str, ...]
    unequal: str
    rare: tuple[int, ...]
    certain: tuple[int, ...]
    seconds: float


def audit_step(task: StepTask) -> StepOutcome:
    """Audit one step. Raises BackendError for a sampler that does not fit the protocol."""
    start = time.perf_counter()
    loaded = load_sampler(task.spec)
    sampler = Guarded(loaded)
    step = task.case.make()
    if loaded.claims.rule == "greedy":
        return _greedy(task, sampler, step, start)
    law = clean_law(loaded.claims.rule, step)
    # A row whose law is one token has nothing to test, and a repeated sibling no walk: anything else is impossible.
    single = tuple(row for row in step.tree.active_rows if bool((step.target[row] > 0).sum() == 1))
    certain = (*single, *repeated_rows(step))
    rare = tuple(row for row in rare_rows(loaded.claims.rule, step, law, task) if row not in certain)
    controls, readings, alternatives = _prepared_controls(task, step, law, loaded)
    result, pairs, missed, unequal = _judged(task, loaded, sampler, step, law, alternatives)
    return StepOutcome(
        task.case, result, None, pairs, controls, readings, missed, tuple(sampler.changed), unequal,
        rare,
        certain,
        time.perf_counter() - start,
    )  # fmt: skip


def _greedy(task: StepTask, sampler: Guarded, step: Step, start: float) -> StepOutcome:
    walks = min(task.walks, sampler.loaded.claims.walks or GREEDY_WALKS, GREEDY_WALKS)
    found, unequal = run_greedy(sampler, step, walks, task.seed), ""
    if sampler.loaded.coins and sampler.loaded.spec not in RULES:
        tokens = greedy_drafts(step, walks, task.seed)
        unequal = repeated(sampler, step, tokens, CoinWalker(sampler).inputs(step, walks, task.seed)[1])
    whole = task.case.whole() if task.case.chain else step
    read = task.case.source(whole)
    source = None if read is None else CachedSource(read)
    faults = checked_faults(task.faults) if task.controls else {}
    controls = greedy_controls(task.case.name, whole, source, faults, walks, task.seed)
    return StepOutcome(
        task.case, None, found, None, tuple(controls), (), (), tuple(sampler.changed), unequal, (), (),
        time.perf_counter() - start,
    )  # fmt: skip


def rare_rows(rule: str, step: Step, law: RuleLaw | None, task: StepTask) -> tuple[int, ...]:
    """Return the rows that the clean rule visits in less than RARE of the walks, a tenth more allowed for, as counts
    scatter (4 sigma of the published number of walks). Without a law of walks that is counted on the rule's own.
    """
    rows = step.tree.active_rows
    if law is not None:
        return tuple(row for row in rows if law.reach[row] < 1.1 * RARE)
    drawn = CoinWalker(PreparedRule(RULES[rule])).walk(step, task.chunk, stream_seed(task.seed, 3))
    visits = step.tree.ancestors[drawn.last.numpy()].sum(0)
    return tuple(row for row in rows if visits[row] < 1.1 * RARE * task.chunk)


def clean_law(rule: str, step: Step) -> RuleLaw | None:
    """Return the law of a walk under a rule; None where the rule has no law row by row (traversal, redrawn drafts).

    With fixed drafts every lossless rule has the same law of walks: a bonus is never a drafted token, so what is
    emitted tells where the walk ended.
    """
    if step.laws is None or rule == "multi-round":
        return multi_round_law(step)
    return naive_law(step) if rule == "naive" else None


def _prepared_controls(
    task: StepTask, step: Step, law: RuleLaw | None, loaded: LoadedSampler
) -> tuple[tuple[ControlResult, ...], tuple[Convention, ...], dict[str, Stopping]]:
    """Controls, conventions, and the alternatives that hold for the audited sampler's clean law.

    Faults are those of multi-round rejection on the whole tree; with fixed drafts other rules have its law.
    """
    whole = task.case.whole() if task.case.chain else step
    clean = law if law is not None and whole is step and loaded.claims.rule == "multi-round" else multi_round_law(whole)
    read = task.case.source(whole)
    readings = () if read is None else tuple(conventions(whole, read, clean))
    source = None if read is None else CachedSource(read)
    if not task.controls:
        return (), readings, {}
    faults = checked_faults(task.faults)
    plan = ControlPlan(
        task.case.name, whole, source, clean, task.level / (2 * max(1, len(faults))), task.seed + 1,
        harmless=task.harmless, max_walks=task.max_walks, battery_walks=task.battery_walks, min_visits=task.min_visits,
    )  # fmt: skip
    found, alternatives = [], {}
    usable = whole is step and (step.laws is None or loaded.claims.rule == "multi-round")
    for control, alternative in run_controls(plan, faults):
        found.append(control)
        if usable and alternative is not None and control.expect == "detected":
            alternatives[control.fault] = Stopping(alternative, task.level / (4 * len(faults)))
    return tuple(found), readings, alternatives


class Stopping:
    """An alternative that is watched no longer once it is excluded: a stopped e-process is one still.

    level: at most that of the e-process that it feeds, so that it never stops before that one has decided. Saves nearly
    all of the time: most faults are excluded within a few hundred walks.
    """

    FIRST = 2_048

    def __init__(self, alternative: Alternative, level: float) -> None:
        self.alternative, self._limit, self._log_e = alternative, log(1 / level), 0.0

    def __call__(self, walks: Walks) -> Floats:
        """Return log likelihood ratios [W], 0 from the portion of walks on in which exclusion is already certain."""
        total = np.zeros(len(walks.last))
        start = 0
        while start < len(total) and self._log_e > -self._limit:
            part = slice(start, start + max(self.FIRST, start))
            tokens = walks.tokens if walks.tokens.shape[0] == 1 else walks.tokens[part]
            total[part] = self.alternative(Walks(walks.last[part], walks.bonus[part], walks.refused[part], tokens))
            self._log_e += float(total[part].sum())
            start = part.stop
        return total


def _judged(
    task: StepTask,
    loaded: LoadedSampler,
    sampler: Guarded,
    step: Step,
    law: RuleLaw | None,
    alternatives: dict[str, Stopping],
) -> tuple[StepResult | None, PairedResult | None, tuple[str, ...], str]:
    walker = CoinWalker(sampler) if loaded.coins else sampler
    walks = min(task.walks, loaded.claims.walks or task.walks)
    pairs, unequal = None, ""
    if loaded.coins and loaded.spec not in RULES:
        rule = PreparedRule(RULES[loaded.claims.rule])
        pairs = paired(sampler, rule, step, min(walks, task.chunk), task.level / 2, stream_seed(task.seed, 1))
        tokens, coins = CoinWalker(sampler).inputs(step, min(walks, 1_024), stream_seed(task.seed, 2))
        unequal = repeated(sampler, step, tokens, coins)
    if loaded.coins and loaded.claims.walks is not None and walks < 10 * task.min_visits:
        return None, pairs, (), unequal  # too slow for statistics: pairs and the summed law judge it
    within, beyond = _within_reach(task, walker, step, alternatives, walks)
    # A closed sampler has nothing else to rule these faults out with: the run goes on until it can.
    chosen = alternatives if not loaded.coins else within
    result = run_step(
        walker, step, walks=walks, level=task.level if pairs is None else task.level / 2, law=law,
        alternatives=chosen, seed=task.seed, looks=1 if loaded.claims.walks else task.looks,
        chunk=min(task.chunk, max(1, walks // 2)), min_visits=task.min_visits,
    )  # fmt: skip
    return result, pairs, beyond, unequal


def _within_reach(
    task: StepTask, walker: CoinWalker | Guarded, step: Step, alternatives: dict[str, Stopping], walks: int
) -> tuple[dict[str, Stopping], tuple[str, ...]]:
    """Split alternatives into those that `walks` clean walks are expected to exclude, with half to spare, and others.

    The pilot's walks are drawn with a seed of their own, so the choice depends on none that are tested.
    """
    if not alternatives:
        return {}, ()
    need = 1.5 * log(2 * len(alternatives) / task.level)
    drawn = walker.walk(step, min(PILOT, walks), stream_seed(task.seed + 2, 0))
    if not _inside(step, drawn.last, drawn.bonus, drawn.tokens):
        return {}, ()  # the run itself will say what is wrong
    rates = {name: -float(np.mean(ratio.alternative(drawn))) for name, ratio in alternatives.items()}
    within = {name: alternatives[name] for name, rate in rates.items() if rate == inf or rate * walks >= need}
    return within, tuple(name for name in alternatives if name not in within)


def _inside(step: Step, last: torch.Tensor, bonus: torch.Tensor, tokens: torch.Tensor) -> bool:
    n, vocab = step.target.shape
    rows = bool(((last >= 0) & (last < n)).all())
    drafts = tokens[:, list(step.tree.active_rows[1:])]
    return rows and all(bool(((x >= 0) & (x < vocab)).all()) for x in (bonus, drafts))


def repeated(sampler: Guarded, step: Step, tokens: Tensor, coins: Coins) -> str:
    """Ask a sampler with coins twice, for the first half alone in reverse, and for batches of few: same coins, same
    answer. Return what differs, or ""."""
    first, again = sampler.select(step, tokens, coins), sampler.select(step, tokens, coins)
    if not _inside(step, first.last, first.bonus, tokens):
        return ""  # no answers at all: the comparison with what can be will say so
    names, walks = ("last", "bonus", "refused"), len(coins.accept)
    for name in names:
        if not torch.equal(getattr(first, name), getattr(again, name)):
            return f"asked twice with the same coins, {name} differs"
    for some in (torch.arange(walks // 2 - 1, -1, -1), *_small_batches(walks)):
        part = tokens if tokens.shape[0] == 1 else tokens[some]
        alone = sampler.select(step, part, Coins(coins.accept[some], coins.residual[some]))
        for name in names:
            if not torch.equal(getattr(first, name)[some], getattr(alone, name)):
                return f"{name} of a walk depends on its batch or its place in it (here {len(some)} of {walks} walks)"
    return ""


def _small_batches(walks: int) -> list[Tensor]:
    """Walks that are asked for together, of each size in FEW: a server's batches, which the long runs never have."""
    starts = np.cumsum([0, *FEW]).tolist()
    return [torch.arange(a, b) for a, b in pairwise(starts) if b <= walks]
