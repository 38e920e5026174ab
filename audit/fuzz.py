"""The fuzz audit: programs of a serving engine and metamorphic relations on one backend, with controls that must fail.

Stored failures are replayed first. Each control is a known fault wrapped round the same backend; a run that does not
find one within `CONTROL_PROGRAMS` programs could not have found a fault like it, and is inconclusive.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from audit.environment import environment
from audit.families import DIMS_MICRO
from audit.files import probe_writable
from audit.fuzz_judge import MismatchError
from audit.fuzz_machine import Ledger, machine
from audit.fuzz_program import Program
from audit.fuzz_shrink import shrunk
from audit.metamorphic import RELATIONS
from audit.processes import one_thread
from audit.relation_controls import relation_control
from audit.render.progress import Progress
from audit.report import Check, Control, Finding, Report, decide
from audit.world import DIMS_NANO
from faults import CATALOGUE, CONTROLS, Fault
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES, complete_surfaces
from lumotree.contract import Dims
from lumotree.errors import InputError

SHAPES: dict[str, Dims] = {"nano": DIMS_NANO, "micro": DIMS_MICRO}
#: Steps of a program behind its first requests.
STEPS = 7
#: Programs between two looks at the clock.
CHUNK = 50
#: Programs within which each control must be found.
CONTROL_PROGRAMS = 300
#: Seeds on which every relation is asked.
RELATION_SEEDS = 3


@dataclass(frozen=True)
class FuzzOptions:
    """What a run was asked for. minutes: of new programs, in place of `examples`; database: folder of stored failures;
    relations: these alone, and no programs."""

    backend: str = "torch"
    examples: int = 300
    minutes: float | None = None
    shape: str = "nano"
    seed: int = 1
    database: str = ".lumotree/fuzz"
    relations: tuple[str, ...] = ()
    command: str = "lumotree-audit fuzz"


@dataclass(frozen=True)
class Hunt:
    """What looking for a failing program gave. seconds, cpu: of the clock and of the processor; failed: the smallest
    one; flaky: whether it failed only in company."""

    ledger: Ledger
    seconds: float
    cpu: float
    failed: Program | None = None
    flaky: bool = False

    @property
    def rate(self) -> tuple[float, float]:
        """Programs a second, and a second of processor time."""
        return self.ledger.programs / max(self.seconds, 1e-9), self.ledger.programs / max(self.cpu, 1e-9)


@dataclass(frozen=True)
class FuzzRun:
    """A finished run: the report, the smallest failing program as code (empty if there is none), `Hunt.rate`."""

    report: Report
    code: str = ""
    rate: tuple[float, float] | None = None


def hunt(
    make: Callable[[], Any],
    dims: Dims,
    number: int,
    count: int,
    database: ExampleDatabase | None = None,
    shrink: bool = True,
) -> Hunt:
    """Run up to `count` new programs, stored failures first; stop at the first failure and shrink it.

    make: makes a backend; called for each program. number: seed.
    """
    ledger, clock, cpu = Ledger(), time.perf_counter(), time.process_time()
    phases = (Phase.reuse, Phase.generate, Phase.shrink) if shrink else (Phase.reuse, Phase.generate)
    chosen = settings(
        max_examples=count, stateful_step_count=STEPS, database=database, deadline=None, phases=phases,
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet, print_blob=False,
        report_multiple_bugs=False,
    )  # fmt: skip
    failed, flaky = False, False
    try:
        run_state_machine_as_test(seed(number)(machine(make, dims, ledger)), settings=chosen)
    except MismatchError:
        failed = True
    except Flaky:
        failed, flaky = True, True
    smallest = ledger.failed if failed else None
    if smallest is not None and shrink and not flaky:
        smallest = shrunk(smallest, make)
    return Hunt(ledger, time.perf_counter() - clock, time.process_time() - cpu, smallest, flaky)


def fuzz(options: FuzzOptions) -> FuzzRun:
    """Run the audit. Raises InputError for an unknown backend, shape or relation, or a database that cannot be kept."""
    if options.shape not in SHAPES:
        raise InputError(f"--shape: expected one of {', '.join(SHAPES)}, got {options.shape!r}")
    unknown = [name for name in options.relations if name not in RELATIONS]
    if unknown:
        raise InputError(f"--relation: expected one of {', '.join(RELATIONS)}, got {unknown[0]!r}")
    backend = load_backend(options.backend)
    if not complete_surfaces(backend):
        raise InputError(f"backend {options.backend!r}: expected a surface with verify and publish, got none")
    database = _database(options)
    started = time.perf_counter()
    with one_thread():
        relations, found = _relations(options, backend)
        if options.relations:
            shown = _relation_controls(options, backend, relations)
            return FuzzRun(_report(options, backend, relations, shown, found, started, "relations"))
        result = _programs(options, database)
        controls = _controls(options, backend) if result.failed is None else []
    checks = _program_checks(result, backend)
    code = result.failed.code(options.backend) if result.failed else ""
    findings = [*_program_findings(result, options), *found]
    programs = f"{result.ledger.programs:,} programs"
    return FuzzRun(
        _report(options, backend, [*checks, *relations], controls, findings, started, programs), code, result.rate
    )


def _database(options: FuzzOptions) -> ExampleDatabase:
    """One folder a backend and shape: Hypothesis does not know the one from the other."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{options.backend}-{options.shape}")
    folder = Path(options.database) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe_writable(folder)
        set_hypothesis_home_dir(folder.parent / "hypothesis")  # or it would make a folder where the user stands
    except OSError as cause:
        raise InputError(f"--database {options.database}: expected a writable folder, found: {cause}") from cause
    return DirectoryBasedExampleDatabase(folder)


def _programs(options: FuzzOptions, database: ExampleDatabase) -> Hunt:
    """Chunks of programs until enough ran, time is up or one failed."""
    total, seconds, cpu, chunk = Ledger(), 0.0, 0.0, 0
    limit = None if options.minutes is None else options.minutes * 60
    left, dims = options.examples, SHAPES[options.shape]
    with Progress(options.examples if limit is None else max(int(limit), 1), "programs") as progress:
        while True:
            count = CHUNK if limit is not None else min(CHUNK, left)
            part = hunt(lambda: load_backend(options.backend), dims, options.seed * 100_003 + chunk, count, database)
            total, seconds, cpu = _added(total, part.ledger), seconds + part.seconds, cpu + part.cpu
            chunk += 1
            left -= count
            progress.advance(count if limit is None else max(int(part.seconds), 1), f"{total.programs} programs")
            if part.failed is not None:
                return Hunt(total, seconds, cpu, part.failed, part.flaky)
            if (limit is None and left <= 0) or (limit is not None and seconds >= limit):
                return Hunt(total, seconds, cpu)


def _added(a: Ledger, b: Ledger) -> Ledger:
    return Ledger(a.programs + b.programs, a.steps + b.steps, by=a.by + b.by)


def control_faults(surfaces: Sequence[str]) -> list[Fault]:
    """The faults that every run must find: those of every component run, and those that live between cycles."""
    chosen = {f.id: f for f in CONTROLS.values() if f.expect == "detected"}
    chosen |= {f.id: f for f in CATALOGUE.values() if f.stage == "between" and f.expect == "detected"}
    return [f for f in chosen.values() if f.surface in surfaces]


def _controls(options: FuzzOptions, backend: Any) -> list[Control]:
    faults = [f for f in control_faults(complete_surfaces(backend)) if f.fits(backend)]
    found = []
    with Progress(len(faults), "controls") as progress:
        for fault in faults:
            control = inject(fault, options.backend, SHAPES[options.shape], options.seed)
            if control is not None:
                found.append(control)
            progress.advance(note=fault.id)
    return found


def inject(fault: Fault, spec: str, dims: Dims, number: int) -> Control | None:
    """Look for one fault. cases: programs it took, or all that were run; None if no program could reach it because the
    contract takes no trees."""
    result = hunt(lambda: fault.wrap(load_backend(spec)), dims, number, CONTROL_PROGRAMS, shrink=False)
    if result.failed is None:
        unreachable = not result.ledger.changed and not load_backend(spec).contract.trees
        return None if unreachable else Control(fault.id, fault.expect, False, None, None, result.ledger.programs)
    by = f"{result.failed.surface}.programs"
    return Control(fault.id, fault.expect, True, by, None, result.ledger.first_failure or 1)


def _program_checks(result: Hunt, backend: Any) -> list[Check]:
    """One check a surface, one for stray writes and refusals."""
    checks = []
    for surface in complete_surfaces(backend):
        rung = "bitwise" if backend.contract.claim(surface) == "bitwise" else "derived"
        title = "programs = sequential decoding" if rung == "bitwise" else "programs within bounds"
        checks.append(_check(f"{surface}.programs", title, surface, rung, result.ledger.by[surface], result))
    steps = result.ledger.steps
    checks.append(_check("stray.programs", "nothing else written", "all", "bitwise", steps, result))
    checks.append(_check("refused.programs", "legal steps accepted", "all", "protocol", steps, result))
    return checks


def _check(name: str, title: str, surface: str, rung: str, cells: int, result: Hunt) -> Check:
    failed = result.failed is not None and f"{result.failed.surface}.programs" == name
    bits = cells - int(failed) if rung == "bitwise" else None
    if failed and result.failed is not None:
        return Check(name, title, surface, rung, "fail", max(cells, 1), bits, None, None, result.failed.failure)
    if not cells:
        return Check(name, title, surface, rung, "inconclusive", 0, None, None, None, "no program compared anything")
    return Check(name, title, surface, rung, "pass", cells, bits)


def _program_findings(result: Hunt, options: FuzzOptions) -> list[Finding]:
    if result.failed is None:
        return []
    note = "; fails only behind other programs: something outlives the workspace" if result.flaky else ""
    words = ["lumotree-audit", "fuzz", "--backend", options.backend, "--shape", options.shape, "--seed",
             str(options.seed), "--database", options.database, "--examples", str(options.examples)]  # fmt: skip
    where = f"program of {len(result.failed.steps)} steps"
    return [Finding(f"{result.failed.surface}.programs", where, shlex.join(words), got=result.failed.failure + note)]


def _relations(options: FuzzOptions, backend: Any) -> tuple[list[Check], list[Finding]]:
    names = tuple(dict.fromkeys(options.relations)) or tuple(RELATIONS)
    seeds = [options.seed] if options.relations else [options.seed + i for i in range(RELATION_SEEDS)]
    checks, findings = [], []
    with Progress(len(names), "relations") as progress:
        for name in names:
            relation = RELATIONS[name]
            title, reason = relation.statement, relation.why_not(backend)
            if reason:
                checks.append(Check(f"relation.{name}", title, "all", "relation", "info", 0, None, None, None, reason))
            else:
                seen = [f for s in seeds for f in relation.run(backend, s, SHAPES[options.shape], options.backend)]
                status = "fail" if seen else "pass"
                note = f"{len(seen)} disagreements" if seen else ""
                checks.append(
                    Check(f"relation.{name}", title, "all", "relation", status, len(seeds), None, None, None, note)
                )
                findings += seen
            progress.advance(note=name)
    return checks, findings


def _relation_controls(options: FuzzOptions, backend: Any, asked: Sequence[Check]) -> list[Control]:
    """One for each relation that the backend kept: what it keeps, a wrong backend must break."""
    faults = [f for f in control_faults(complete_surfaces(backend)) if f.fits(backend)]
    kept = [check.id.removeprefix("relation.") for check in asked if check.status == "pass"]
    return [relation_control(n, options.backend, faults, options.seed, SHAPES[options.shape]) for n in kept]


def _report(
    options: FuzzOptions,
    backend: Any,
    checks: Sequence[Check],
    controls: Sequence[Control],
    findings: Sequence[Finding],
    started: float,
    what: str,
) -> Report:
    covered = complete_surfaces(backend)
    coverage = {s: "covered" if s in covered else "not covered" for s in SURFACES}
    verdict, reasons = decide(checks, controls, coverage)
    facts = environment()
    return Report(
        verdict=verdict,
        reasons=reasons,
        suite=f"fuzz {options.shape}, {what}",
        backend=options.backend,
        contract=backend.contract.as_dict(),
        environment={**facts, "gpu": None},
        envelope=None,
        coverage=coverage,
        checks=tuple(checks),
        controls=tuple(controls),
        findings=tuple(findings),
        seed=options.seed,
        command=options.command,
        wall_s=round(time.perf_counter() - started, 2),
        created=facts["date"],
    )


def programs_per_second(spec: str, seconds: float = 2.0) -> tuple[float, float]:
    """Programs a second and a second of processor time, at the smallest shape, without controls."""
    programs, clock, cpu, chunk = 0, 0.0, 0.0, 1
    with one_thread():
        hunt(lambda: load_backend(spec), DIMS_NANO, 0, 5, shrink=False)
        while clock < seconds:
            part = hunt(lambda: load_backend(spec), DIMS_NANO, chunk, CHUNK, shrink=False)
            programs, clock, cpu = programs + part.ledger.programs, clock + part.seconds, cpu + part.cpu
            chunk += 1
    return programs / clock, programs / cpu
