"""Rows of the matrix for sampler faults: each in the made steps at a small vocabulary and in the captured ones."""

from __future__ import annotations

from collections.abc import Sequence

from audit.fault_matrix import Rate, Row
from audit.render.progress import Progress
from audit.sampler_cases import captured_cases
from audit.sampler_control import LEAST_TV, CachedSource, ControlPlan, ControlResult, run_controls
from audit.sampler_step import clean_law
from faults.sampler import SAMPLER_FAULTS
from lumotree.backends.sampler_loader import load_sampler
from lumotree.errors import BackendError

VOCAB = 512
LEVEL = 1e-6
BATTERY_WALKS = 8_000
MIN_VISITS = 50


def sampler_rows(
    seed: int, vocab: int = VOCAB, steps: tuple[str, ...] = (), faults: Sequence[str] = tuple(SAMPLER_FAULTS)
) -> list[Row]:
    """One row a sampler fault. A fault counts as reached in a step whose law it moves by LEAST_TV or more (or whose
    walks it makes depend on each other); the size of a rate is the least exact total variation that was seen.
    steps: names of steps to try, all by default. faults: which of them."""
    loaded = load_sampler("multi-round")
    found: dict[str, list[ControlResult]] = {fault: [] for fault in faults}
    cases = captured_cases(loaded.claims, steps, vocab)
    with Progress(len(cases), "sampler faults") as progress:
        for case in cases:
            step = case.make()
            clean, read = clean_law("multi-round", step), case.source(step)
            if clean is None or read is None:
                raise BackendError(f"sampler faults: expected a step with logits and a law, got {case.name}")
            source = CachedSource(read)
            plan = ControlPlan(case.name, step, source, clean, LEVEL, seed, True, battery_walks=BATTERY_WALKS,
                               min_visits=MIN_VISITS)  # fmt: skip
            for result, _ in run_controls(plan, {fault: SAMPLER_FAULTS[fault] for fault in faults}):
                found[result.fault].append(result)
            progress.advance(note=case.name)
    return [_row(fault, results) for fault, results in found.items() if results]


def _row(fault: str, results: Sequence[ControlResult]) -> Row:
    due = [r for r in results if r.due]
    seen = [r for r in due if r.detected]
    harmless = SAMPLER_FAULTS[fault].expect == "harmless"
    largest = max((r.tv for r in results), default=0.0)
    if harmless:
        state = "Missed" if seen else "Equivalent"
    else:
        state = "NotReached" if not due else "Caught" if len(seen) == len(due) else "Missed"
    checks = {f"sampler.{r.by}": "Caught" for r in seen}
    rates = (Rate(len(seen), len(due), min((r.tv for r in seen), default=None)),) if due and not harmless else ()
    note = f"total variation {largest:.1g} at most, must be seen from {LEAST_TV:g}" if state == "NotReached" else ""
    return Row(fault, "sampler", state, due[0].step if due else "", checks,
               f"sampler.{seen[0].by}" if seen else None, rates, note=note)  # fmt: skip
