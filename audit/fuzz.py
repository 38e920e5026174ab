"""The fuzz audit: programs of a serving engine and metamorphic relations on one backend, with controls that must fail.

Stored failures are replayed first. Then programs are drawn in chunks, each from a seed of its own, by a team of
processes; so are the controls. What a run finds does not depend on how many processes there are. Each control is a
known fault wrapped round the same backend; a run that does not find one within `CONTROL_PROGRAMS` programs could not
have found a fault like it, and is inconclusive.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from audit.environment import environment
from audit.families import DIMS_MICRO
from audit.files import probe_writable
from audit.fuzz_hunt import AGAIN, STORED, Hunt, chunk, control, hunt, smallest_of, start_hunting
from audit.metamorphic import RELATIONS, Relation
from audit.processes import Team, one_thread, team
from audit.relation_controls import relation_control
from audit.render.progress import Progress
from audit.report import Check, Control, Finding, Report, decide
from audit.world import DIMS_NANO
from faults import CATALOGUE, CONTROLS, Fault
from lumotree.backends.loader import backend_maker, load_backend
from lumotree.backends.protocol import SURFACES, complete_surfaces
from lumotree.contract import Dims
from lumotree.errors import InputError

SHAPES: dict[str, Dims] = {"nano": DIMS_NANO, "micro": DIMS_MICRO}
#: Programs of one seed: what a process does at a time, and what is done between two looks at the clock.
CHUNK = 50
#: Programs within which each control must be found.
CONTROL_PROGRAMS = 300
#: Seeds from the run's on, on which every relation is asked; on one alone, no known defect may show.
RELATION_SEEDS = 3


@dataclass(frozen=True)
class FuzzOptions:
    """What a run was asked for. minutes: of new programs, in place of `examples`; database: folder of stored failures;
    relations: these alone, and no programs; workers: processes, 0 = this one."""

    backend: str = "torch"
    examples: int = 300
    minutes: float | None = None
    shape: str = "nano"
    seed: int = 1
    database: str = ".lumotree/fuzz"
    relations: tuple[str, ...] = ()
    command: str = "lumotree-audit fuzz"
    workers: int = 0

    @property
    def dims(self) -> Dims:
        """Of the shape."""
        return SHAPES[self.shape]

    @property
    def home(self) -> Path:
        """What Hypothesis keeps beside the stored failures."""
        return Path(self.database) / "hypothesis"


@dataclass(frozen=True)
class FuzzRun:
    """A finished run: the report, the smallest failing program as code (empty if there is none), `Hunt.rate`."""

    report: Report
    code: str = ""
    rate: tuple[float, float] | None = None


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
        result, controls = _hunted(options, backend, database)
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
        set_hypothesis_home_dir(options.home)  # or it would make a folder where the user stands
    except OSError as cause:
        raise InputError(f"--database {options.database}: expected a writable folder, found: {cause}") from cause
    return DirectoryBasedExampleDatabase(folder)


def _hunted(options: FuzzOptions, backend: Any, database: ExampleDatabase) -> tuple[Hunt, list[Control]]:
    """What is stored, then new programs, then the controls, until something fails."""
    spec, what = options.backend, f"backend {options.backend!r}"
    stored = hunt(backend_maker(spec), options.dims, options.seed, STORED, database, AGAIN)
    if stored.failed is not None:
        return stored, []
    with team(options.workers, what, start_hunting, (options.home,)) as others:
        result = _programs(options, stored, others)
        if result.failed is None:
            return result, _controls(options, backend, others)
        return smallest_of(result, *_job(options, result.chunks - 1), database), []


def _job(options: FuzzOptions, at: int) -> tuple[str, Dims, int, int]:
    """Chunk number `at`."""
    count = CHUNK if options.minutes is not None else min(CHUNK, options.examples - at * CHUNK)
    return options.backend, options.dims, options.seed * 100_003 + at, count


def _jobs(options: FuzzOptions, started: float) -> Iterator[tuple[str, Dims, int, int]]:
    """Chunks until there are enough, or until time is up."""
    at, limit = 0, options.minutes and options.minutes * 60
    while at * CHUNK < options.examples if limit is None else at == 0 or time.perf_counter() - started < limit:
        yield _job(options, at)
        at += 1


def _programs(options: FuzzOptions, stored: Hunt, others: Team) -> Hunt:
    """Chunks of programs until enough ran, time is up or one failed."""
    total, started, told = stored, time.perf_counter(), 0
    length = options.examples if options.minutes is None else max(int(options.minutes * 60), 1)
    with Progress(length, "programs") as progress:
        for part in others.each(chunk, _jobs(options, started)):
            total = total.with_chunk(part, stored.seconds + time.perf_counter() - started)
            done = min(total.chunks * CHUNK, length) if options.minutes is None else int(total.seconds)
            progress.advance(done - told, f"{total.ledger.programs} programs")
            told = done
            if part.failed is not None:
                break
    return total


def control_faults(surfaces: Sequence[str]) -> list[Fault]:
    """The faults that every run must find: those of every component run, and those that live between cycles."""
    chosen = {f.id: f for f in CONTROLS.values() if f.expect == "detected"}
    chosen |= {f.id: f for f in CATALOGUE.values() if f.stage == "between" and f.expect == "detected"}
    return [f for f in chosen.values() if f.surface in surfaces]


def _controls(options: FuzzOptions, backend: Any, others: Team) -> list[Control]:
    faults = [f.id for f in control_faults(complete_surfaces(backend)) if f.fits(backend)]
    jobs = [(fault, options.backend, options.dims, options.seed, CONTROL_PROGRAMS) for fault in faults]
    found = []
    with Progress(len(faults), "controls") as progress:
        for fault, one in zip(faults, others.each(control, jobs), strict=True):
            found += [] if one is None else [one]
            progress.advance(note=fault)
    return found


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
    seeds = _relation_seeds(options)
    checks, findings = [], []
    with Progress(len(names), "relations") as progress:
        for name in names:
            relation = RELATIONS[name]
            title, reason = relation.statement, relation.why_not(backend)
            if reason:
                checks.append(Check(f"relation.{name}", title, "all", "relation", "info", 0, None, None, None, reason))
            else:
                seen = [f for s in seeds for f in _asked(relation, backend, s, options)]
                status = "fail" if seen else "pass"
                note = f"{len(seen)} disagreements" if seen else ""
                checks.append(
                    Check(f"relation.{name}", title, "all", "relation", status, len(seeds), None, None, None, note)
                )
                findings += seen
            progress.advance(note=name)
    return checks, findings


def _asked(relation: Relation, backend: Any, seed: int, options: FuzzOptions) -> list[Finding]:
    """What breaks a relation. It makes legal calls alone: a backend that refuses one is wrong, as in a program."""
    name = relation.name
    words = ["--backend", options.backend, "--shape", options.shape, "--relation", name, "--seed", str(seed)]
    command = shlex.join(["lumotree-audit", "fuzz", *words])
    try:
        return [replace(f, reproduce=command) for f in relation.run(backend, seed, options.dims)]
    except InputError as refusal:
        return [Finding(f"refused.{name}", f"relation/{name}/{seed}", command, got=str(refusal))]


def _relation_seeds(options: FuzzOptions) -> list[int]:
    return [options.seed + i for i in range(RELATION_SEEDS)]


def _relation_controls(options: FuzzOptions, backend: Any, asked: Sequence[Check]) -> list[Control]:
    """One for each relation that the backend kept: what it keeps, a wrong backend must break."""
    faults = [f for f in control_faults(complete_surfaces(backend)) if f.fits(backend)]
    kept = [check.id.removeprefix("relation.") for check in asked if check.status == "pass"]
    seeds = _relation_seeds(options)
    return [relation_control(n, options.backend, faults, seeds, options.dims) for n in kept]


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
