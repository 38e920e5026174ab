"""The continuation suite as a user runs it: does what was published carry the next cycles, for every accepted end?"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audit import continuation_report as render
from audit.continuation_facts import facts_of, frame_records
from audit.continuation_harvest import BATCH_SCRIPTS, courses
from audit.continuation_judge import Cell, Judged, cells_of
from audit.continuation_native import ARMS
from audit.continuation_plan import Script
from audit.continuation_run import PROMPTS_FILE, Found, Task, collect, workspace
from audit.continuation_stack import StackSpec, make_stack, model_folder, prompts, served_by
from audit.environment import environment, environment_on
from audit.frame import cells_frame
from audit.processes import one_thread, peak_mib
from audit.report import Report, decide
from audit.runner import default_workers
from faults.continuation import reached_faults
from lumotree.backends.loader import load_backend
from lumotree.cycle_types import Stack

DRIFT_TOKENS = 2_000
CONTROL_PREFIXES = 2


@dataclass(frozen=True)
class Options:
    """What a run was asked for. drift: tokens that are decoded in one go, 0 = none. calibrated: calibration prefixes,
    whose native spread also judges the candidate, 0 = none."""

    spec: StackSpec = field(default_factory=StackSpec)
    seed: int = 1
    drift: int = DRIFT_TOKENS
    calibrated: int = 0
    workers: int | None = None
    command: str = "lumotree-audit continue"


@dataclass
class Run:
    """A finished run: the report and the frame of per-cycle distances."""

    report: Report
    frame: Any = None
    found: Found | None = None


def check(options: Options) -> Run:
    """Audit a backend in the whole model. Raises InputError for a model or backend that cannot be loaded or refuses."""
    started = time.perf_counter()
    with one_thread():
        stack = make_stack(options.spec)
        own = tuple(prompts(stack, options.calibrated, "calibration", options.seed))
        plan = courses(prompts(stack, 6, "heldout", options.seed), options.seed)
        with workspace() as folder:
            found = collect(
                options.spec, stack, plan,
                lambda scripts, at: _early(options, own, scripts, at),
                lambda scripts, at: _late(options, stack.head is not None, scripts, at),
                _workers(options), folder,
            )  # fmt: skip
    return finished(options, stack, found, started)


def _workers(options: Options) -> int:
    """At least one: arm B is decoded in another process than A."""
    return max(default_workers(options.spec.device) if options.workers is None else options.workers, 1)


def _named(options: Options) -> str:
    """The backend that judges the recording; several put together cannot be named, so bounds judge alone."""
    spec = options.spec
    parts = set(served_by(spec, load_backend(spec.backend)).values())
    return parts.pop() if len(parts) == 1 else "none"


def _early(
    options: Options, calibration: tuple[tuple[int, ...], ...], scripts: Sequence[Script], folder: Path
) -> list[Task]:  # fmt: skip
    """Longest first."""
    tasks = []
    if calibration:
        tasks.append(Task("calibration", "", (), tokens=options.seed, prompts=calibration))
    if options.drift:
        model = str(model_folder(options.spec))
        tasks.append(Task("drift", "", (scripts[0],), tokens=options.drift, model=model))
    tasks += [
        Task("native", arm, tuple(scripts), str(folder / f"{arm}.safetensors")) for arm in reversed(ARMS) if arm != "A"
    ]
    by_name = {s.name: s for s in scripts}
    for p in range(sum(s.kind == "repeat" for s in scripts)):
        pair = (by_name[f"repeat/p{p}"], by_name[f"resumed/p{p}"])
        tasks.append(Task("primed", f"p{p}", pair, str(folder / f"primed-{p}.safetensors")))
    mixed = [s for s in scripts if s.kind in BATCH_SCRIPTS]
    tasks.append(Task("batch", "", tuple(mixed), str(folder / "batch.safetensors")))
    return tasks


def _late(options: Options, head: bool, scripts: Sequence[Script], folder: Path) -> list[Task]:
    native = str(folder / PROMPTS_FILE)
    cold = [s for s in scripts if s.kind == "cold"]
    tasks = [
        Task(
            "cold", s.name, (s,), str(folder / f"cold-{i}.safetensors"), native,
            str(folder / "recording") if i == 0 else "", _named(options) if i == 0 else "",
        )
        for i, s in enumerate(cold)
    ]  # fmt: skip
    own = [s for s in scripts if s.kind == "control"][:CONTROL_PREFIXES]
    for fault in reached_faults(head):
        sets = [(s,) for s in own] if fault.requests == 1 else [tuple(own), tuple(reversed(own))]
        for i, chosen in enumerate(sets):
            name = fault.id.replace(" ", "-")
            tasks.append(Task("control", fault.id, chosen, str(folder / f"{name}-{i}.safetensors"), native))
    return tasks


def finished(options: Options, stack: Stack, found: Found, started: float) -> Run:
    """The report of what was found. started: `time.perf_counter` at the begin."""
    contract = stack.backend.contract
    bitwise = contract.claims == "bitwise" and not contract.algebra
    main = [s for s in found.scripts if s.kind in ("cold", "repeat", "resumed")]
    judged = Judged(
        found,
        bitwise,
        list(cells_of(main, found.compared["candidate"], found.compared)),
        list(cells_of(main, found.compared["candidate"], found.compared, prompts=True)),
        _batch_cells(found),
    )
    checks, controls = render.checks_of(judged), render.controls_of(judged)
    coverage = render.coverage_of(stack)
    verdict, reasons = decide(checks, controls, coverage, doubts=render.doubts_of(judged))
    facts = facts_of(judged)
    report = Report(
        verdict=verdict,
        reasons=reasons,
        suite="continuation",
        backend=_title(options),
        contract=contract.as_dict(),
        environment=environment_on(options.spec.device),
        envelope=None,
        coverage=coverage,
        checks=tuple(checks),
        controls=tuple(controls),
        findings=tuple(render.findings_of(judged, _reproduce(options))),
        seed=options.seed,
        command=options.command,
        wall_s=round(time.perf_counter() - started, 2),
        peak_mib=peak_mib(),
        facts=facts,
        warnings=tuple(render.warnings_of(controls)),
        created=environment()["date"],
    )
    return Run(report, cells_frame(frame_records(judged)), found)


def _batch_cells(found: Found) -> list[Cell]:
    batch = found.compared["batch"]
    played = [s for s in found.scripts if s.name in batch]
    return [c for prompts in (False, True) for c in cells_of(played, batch, found.compared, prompts=prompts)]


def _title(options: Options) -> str:
    extra = [f"{surface}={name}" for surface, name in options.spec.surfaces]
    return " ".join([options.spec.backend, *extra])


def _reproduce(options: Options) -> str:
    spec = options.spec
    words = ["lumotree-audit", "continue", "--backend", spec.backend, "--seed", str(options.seed)]
    for surface, name in spec.surfaces:
        words += ["--surface", f"{surface}={name}"]
    if spec.checkpoint is not None:
        words += ["--checkpoint", spec.checkpoint]
    if spec.device != "cpu":
        words += ["--device", spec.device]
    if options.calibrated:
        words += ["--calibrated", str(options.calibrated)]
    if options.drift != DRIFT_TOKENS:
        words += ["--drift", str(options.drift)]
    return shlex.join(words)
