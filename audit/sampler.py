"""The sampler suite as a user runs it: exact laws, summed laws, Monte Carlo on captured-like steps, their controls.

What judges which sampler:

* every run: the rules themselves, exactly, on `exact` configurations of the bounded domain, with faulty rules beside;
* a sampler with coins: its law summed over the coins on small steps; on each captured-like step sign tests beside the
  rule on the same coins (unless it is the rule), and 200,000 walks;
* a closed sampler: 200,000 walks a step, more until every catalogued fault of that step is ruled out;
* a greedy one: its answers, which have to be the first argmax.

A fault of exact TV 0.002 or more in a step that goes unseen there makes the run INCONCLUSIVE; so does a row that too
few walks visit, or a fault that a closed sampler's walks could not rule out.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from audit import sampler_report as render
from audit.environment import environment
from audit.exact_run import ExactResult
from audit.frame import cells_frame
from audit.law_domain import DEFAULT_COUNT
from audit.montecarlo import CHUNK, RUN_LEVEL, WALKS
from audit.processes import one_thread, peak_mib
from audit.render.progress import Progress
from audit.report import Check, Finding, Report, decide
from audit.runner import default_workers
from audit.sampler_cases import CapturedCase, captured_cases, file_cases
from audit.sampler_control import BATTERY_WALKS, MAX_WALKS, ControlResult, checked_faults
from audit.sampler_law import (
    BUDGET,
    ExactTask,
    SummedResult,
    SummedTask,
    exact_controls,
    merged,
    run_exact_task,
    run_summed_task,
    summed_controls,
)
from audit.sampler_step import StepOutcome, StepTask, audit_step
from audit.sampler_steps import VOCAB
from audit.sampler_tests import MIN_VISITS
from lumotree.backends.sampler_loader import LoadedSampler, load_sampler
from lumotree.errors import BackendError, InputError
from lumotree.select import RULES

EXACT_CONTROLS = 250
"""Configurations on which each faulty rule is tried; every one is lossy somewhere among the first 250."""

EXACT_PARTS = 4

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's malloc.h."""


@dataclass(frozen=True)
class Options:
    """What a run was asked for. exact: configurations, 0 = none. only: names of steps, and then nothing but these;
    steps: files of captured ones instead of the built-in. level: of the run. The rest is for tests of the audit."""

    sampler: str = "multi-round"
    seed: int = 1
    walks: int = WALKS
    exact: int = DEFAULT_COUNT
    only: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    level: float = RUN_LEVEL
    workers: int | None = None
    command: str = "lumotree-audit sample"
    vocab: int = VOCAB
    min_visits: int = MIN_VISITS
    chunk: int = CHUNK
    faults: tuple[str, ...] = ()
    budget: int = 4 * BUDGET
    max_walks: int = MAX_WALKS
    battery_walks: int = BATTERY_WALKS


@dataclass
class Run:
    """A finished run: the report and the frame of per-test values."""

    report: Report
    frame: Any = None
    outcomes: list[StepOutcome] = field(default_factory=list)


@dataclass
class _Found:
    """What the tasks came to."""

    steps: list[StepOutcome] = field(default_factory=list)
    exact: list[list[ExactResult]] = field(default_factory=list)
    faulty: list[list[ExactResult]] = field(default_factory=list)
    summed: dict[str, list[SummedResult]] = field(default_factory=dict)
    controls: list[ControlResult] = field(default_factory=list)


def check(options: Options) -> Run:
    """Audit a sampler.

    Raises InputError for an unknown step or fault, a step file that no sampler may be given, or a sampler that cannot
    be loaded or does not fit the protocol.
    """
    started = time.perf_counter()
    loaded = load_sampler(options.sampler)
    checked_faults(options.faults)
    if options.steps and options.only:
        raise InputError("--step and --only: expected one of them; a file is a step by itself")
    cases = file_cases(loaded.claims, options.steps) or captured_cases(loaded.claims, options.only, options.vocab)
    tasks = _tasks(options, loaded, cases)
    found = _run(tasks, options)
    found.steps.sort(key=lambda outcome: [case.name for case in cases].index(outcome.case.name))
    return _finished(options, loaded, found, started)


Task = Any
_JOBS: dict[type, Callable[[Any], Any]] = {
    StepTask: audit_step,
    ExactTask: run_exact_task,
    SummedTask: run_summed_task,
}


@dataclass(frozen=True)
class _SummedControls:
    """The summed law of the faulty samplers."""


def _tasks(options: Options, loaded: LoadedSampler, cases: Sequence[CapturedCase]) -> list[Task]:
    """Longest first, so that the last ones to end are short."""
    level = options.level / len(cases)
    tasks: list[Task] = [
        StepTask(
            options.sampler, case, options.seed, options.walks, level, options.chunk, min_visits=options.min_visits,
            harmless=case in _first_of_kind(cases), faults=options.faults, max_walks=options.max_walks,
            battery_walks=options.battery_walks,
        )
        for case in sorted(cases, key=_is_fixed)
    ]  # fmt: skip
    if options.only or options.steps:
        return tasks
    if options.exact:
        tasks += [ExactTask(options.exact, part, EXACT_PARTS) for part in range(EXACT_PARTS)]
        tasks += [ExactTask(EXACT_CONTROLS, 0, 1, True)]
    if loaded.coins:
        tasks += [SummedTask(options.sampler, options.budget), _SummedControls()]
    return tasks + [
        SummedTask(name, max(BUDGET // 2, options.budget // 8)) for name in RULES if name != options.sampler
    ]


def _is_fixed(case: CapturedCase) -> bool:
    return not case.redrawn


def _first_of_kind(cases: Sequence[CapturedCase]) -> list[CapturedCase]:
    """Harmless variants are run in the first step of each kind of draft: they need the whole battery."""
    return [next(case for case in cases if _is_fixed(case) == kind) for kind in {_is_fixed(case) for case in cases}]


def _work(task: Task) -> Any:
    try:
        return summed_controls() if isinstance(task, _SummedControls) else _JOBS[type(task)](task)
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # see `keep_memory`: what is kept must not add up over the tasks


def _run(tasks: Sequence[Task], options: Options) -> _Found:
    count = default_workers("cpu") if options.workers is None else options.workers
    found = _Found()
    with Progress(len(tasks), "sampler") as progress:
        inline = count == 0 or len(tasks) == 1
        for task, result in _inline(tasks) if inline else _pooled(tasks, count, options.sampler):
            _sort(found, task, result)
            progress.advance(note=task.case.name if isinstance(task, StepTask) else "")
    return found


def _sort(found: _Found, task: Task, result: Any) -> None:
    if isinstance(task, StepTask):
        found.steps.append(result)
        found.controls += result.controls
    elif isinstance(task, ExactTask):
        (found.faulty if task.faulty else found.exact).append(result)
    elif isinstance(task, SummedTask):
        found.summed[task.spec] = result
    else:
        found.controls += result


def _start() -> None:
    torch.set_num_threads(1)
    keep_memory()


def keep_memory() -> None:
    """Ask glibc to keep freed blocks: rows of 39 MB come and go, and fresh pages would take a fifth of the time."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _inline(tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
    with one_thread():
        for task in tasks:
            yield task, _work(task)


def _pooled(tasks: Sequence[Task], workers: int, spec: str) -> Iterator[tuple[Task, Any]]:
    # spawn: a forked child of a process that has used torch's thread pool can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool:
        futures = {pool.submit(_work, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as died:
            raise BackendError(
                f"sampler {spec!r}: a worker process died (out of memory, or a crash in the kernel). "
                "Run in this process to see where: add --workers 0"
            ) from died
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # an error is not to wait for the steps that still run
            raise


def _finished(options: Options, loaded: LoadedSampler, found: _Found, started: float) -> Run:
    exact = merged(found.exact) if found.exact else []
    controls = [*found.controls, *(exact_controls(merged(found.faulty)) if found.faulty else [])]
    summed = [result for results in found.summed.values() for result in results]
    checks = _checks(options, loaded, found, exact)
    shown = render.controls_of(controls)
    verdict, reasons = decide(checks, shown, {"sampler": "covered"})
    report = Report(
        verdict=verdict,
        reasons=reasons,
        suite="sampler",
        backend=options.sampler,
        contract={**asdict(loaded.claims), "drafts": list(loaded.claims.drafts), "coins": loaded.coins},
        environment=_environment(loaded),
        envelope=None,
        coverage={"sampler": "covered"},
        checks=tuple(checks),
        controls=tuple(shown),
        findings=tuple(_findings(options, found)),
        seed=options.seed,
        command=options.command,
        wall_s=round(time.perf_counter() - started, 2),
        peak_mib=peak_mib(),
        facts=render.facts_of(found.steps, exact, summed, controls, options.exact),
        warnings=tuple(_warnings(found.steps, controls, loaded)),
        created=environment()["date"],
    )
    records = render.frame_records(found.steps, controls)
    return Run(report, cells_frame(records) if records else None, found.steps)


def _environment(loaded: LoadedSampler) -> dict[str, Any]:
    """As `environment`; a GPU is named only if the sampler runs on it."""
    found = environment()
    return found if getattr(loaded.sampler, "device", "cpu") != "cpu" else {**found, "gpu": None}


def _checks(options: Options, loaded: LoadedSampler, found: _Found, exact: Sequence[ExactResult]) -> list[Check]:
    own = found.summed.get(options.sampler, [])
    checks = render.exact_checks(exact)
    checks += [
        render.summed_check(spec, found.summed[spec], spec == options.sampler)
        for spec in sorted(found.summed, key=lambda name: name != options.sampler)
    ]
    for outcome in found.steps:
        checks += render.step_checks(outcome, not loaded.coins)
    return checks + render.guard_checks(found.steps, own, loaded.coins, options.sampler in RULES)


def _findings(options: Options, found: _Found) -> list[Finding]:
    findings = []
    for results in found.summed.values():
        findings += render.summed_findings(results, _reproduce(options, None))
    for outcome in found.steps:
        findings += render.step_findings(outcome, _reproduce(options, outcome.case))
    return findings


def _reproduce(options: Options, case: CapturedCase | None) -> str:
    words = ["lumotree-audit", "sample", "--sampler", options.sampler, "--seed", str(options.seed)]
    for name, default in (("walks", WALKS), ("exact", DEFAULT_COUNT), ("vocab", VOCAB), ("min_visits", MIN_VISITS)):
        if getattr(options, name) != default:
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if case is not None:
        words += ["--step", case.path] if case.path else ["--only", case.name]
    return shlex.join(words)


def _warnings(
    outcomes: Sequence[StepOutcome], controls: Sequence[ControlResult], loaded: LoadedSampler
) -> Iterator[str]:
    beyond = [f"{name} in {o.case.name}" for o in outcomes for name in o.out_of_reach]
    if beyond and not loaded.coins:
        yield f"needed more walks than the first look to be ruled out: {', '.join(beyond)}"
    seen = {c.fault for c in controls if c.due}
    captured = [c for c in controls if not c.fault.startswith(("exact law ", "summed law "))]
    never = sorted({c.fault for c in captured} - seen)
    if never:
        yield f"not reachable in these steps (exact TV below 0.002): {', '.join(never)}"
    rare = {o.case.name: len(o.rare) for o in outcomes if o.rare}
    if rare:
        rows = ", ".join(f"{count} in {name}" for name, count in rare.items())
        yield f"rows that this rule visits in less than 1% of the walks are not tested: {rows}"
    largest = max((o.case.vocab for o in outcomes), default=VOCAB)
    if loaded.claims.vocab and largest < VOCAB:
        yield f"the sampler takes a vocabulary of {largest} at most: nothing was seen of a larger one"
    if any(o.result is None and o.greedy is None for o in outcomes):
        yield f"{loaded.claims.walks} walks are too few for statistics: the summed law and pairs of walks judge it"
