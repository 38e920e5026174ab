"""The component suite as a user runs it: calibrate an envelope, check against it."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from audit import assemble, envelope
from audit.cases import CaseSpec, family_sha256
from audit.component import CaseResult
from audit.diagnose import diagnose
from audit.envelope_file import REMEDY, Envelope
from audit.environment import code_sha256, environment, environment_on, object_sha256
from audit.families import SHAPES, Shape, family, fits, fitting_shape, replayed_cases, units
from audit.frame import cells_frame
from audit.processes import one_thread, peak_mib
from audit.report import Check, EnvelopeRef, Report, decide
from audit.runner import run_cases
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES, covered_surfaces
from lumotree.contract import Contract
from lumotree.errors import EnvelopeError, InputError


@dataclass(frozen=True)
class Options:
    """What a run was asked for. shape None: the backend's default. sets, instances None: the shape's own. diagnose:
    name the likely defect of a backend that fails."""

    backend: str = "torch"
    shape: str | None = None
    device: str = "cpu"
    seed: int = 1
    sets: int | None = None
    instances: int | None = None
    workers: int | None = None
    only: tuple[str, ...] = ()
    graph: bool = False
    command: str = "lumotree-audit check"
    envelope: str | None = None
    diagnose: bool = False


@dataclass
class Run:
    """A finished run: the report and the frame of per-unit values."""

    report: Report
    frame: Any = None
    results: list[CaseResult] = field(default_factory=list)


def shape_of(options: Options, backend: Any) -> Shape:
    """The main shape of a run: as asked, else the real one, else what an interpreter can do in seconds."""
    name = options.shape or ("micro" if getattr(backend, "interpreted", False) else "27B")
    if name not in SHAPES:
        raise InputError(f"--shape: expected one of {', '.join(SHAPES)}, got {name!r}")
    return fitting_shape(SHAPES[name], backend.contract)


def default_envelope(options: Options, shape: Shape) -> Path:
    """Where calibrate writes and check looks: `envelopes/BACKEND-SHAPE[-gpu].json` below the current folder."""
    name = options.backend.replace(":", "-").replace("/", "-").replace(".", "-")
    suffix = "" if torch.device(options.device).type == "cpu" else "-gpu"
    return Path(options.envelope or f"envelopes/{name}-{shape.name}{suffix}.json")


def arm_of(backend: Any) -> str:
    """Whose errors the envelope holds: the one-token chain, or the tree itself where it is another algebra."""
    claims = {backend.contract.claim(s) for s in SURFACES}
    return "native" if claims == {"bitwise"} else "verify"


def check_device(device: str) -> None:
    """Raise InputError for a device that torch does not know or that is not there."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"--device: expected a torch device such as cpu or cuda, got {device!r}") from None
    if kind not in ("cpu", "cuda"):
        raise InputError(f"--device: expected cpu or cuda, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {device}: expected an NVIDIA GPU, found none")


def calibrate(options: Options, force: bool = False) -> Run:
    """Draw the calibration set, judge it, measure the arm, freeze an envelope and write it.

    Raises EnvelopeError when the file exists (without `force`) or cannot be written, before anything is run. The
    envelope is written only if the calibration set itself passes.
    """
    started = time.perf_counter()
    backend = load_backend(options.backend)
    shape = shape_of(options, backend)
    path = default_envelope(options, shape)
    envelope.check_target(path, force)
    specs = units(shape, "calibration", options.seed, sets=options.sets, instances=options.instances)
    arm = arm_of(backend)
    results = run_cases(
        options.backend, _fitting(specs, backend), device=options.device, arm=arm, workers=options.workers,
        label="calibration",
    )  # fmt: skip
    # A calibration that did not pass may hold values that no bound can be made of.
    run = _report(options, backend, shape, results, [], None, started, "calibration", ())
    if run.report.verdict != "PASS":
        note = f"envelope {path} not written: the calibration set did not pass; to look for the defect: " + shlex.join(
            ["lumotree-audit", "diagnose", "--backend", options.backend]
        )
        return replace(run, report=replace(run.report, warnings=(*run.report.warnings, note)))
    frozen = envelope.freeze(
        assemble.unit_statistics(results),
        backend=options.backend,
        contract=backend.contract,
        dims=shape.dims,
        shape=shape.name,
        arm=arm,
        trees=[shape.tree],
        planned=len(specs),
        case_sha256=family_sha256(specs),
        code_sha256=code_sha256(),
        backend_sha256=object_sha256(backend),
        seed=options.seed,
        environment=environment_on(options.device),
    )
    envelope.save(frozen, path, force)
    return replace(run, report=replace(run.report, envelope=EnvelopeRef(str(path), frozen.sha256, frozen.guarantee)))


def check(options: Options) -> Run:
    """Judge the held-out set and the small cases; with `only`, the named cases alone and no envelope.

    Raises InputError for an envelope that does not apply, an unknown case, or a backend that refuses a case.
    """
    started = time.perf_counter()
    if options.graph and torch.device(options.device).type != "cuda":
        raise InputError(f"--graph: CUDA graphs need --device cuda, got --device {options.device}")
    backend = load_backend(options.backend)
    shape = shape_of(options, backend)
    specs = family(shape, "heldout", options.seed, options.sets, options.instances)
    if options.graph:
        specs = [s for s in specs if s.unit] + replayed_cases(shape, "heldout", options.seed)
    ref: EnvelopeRef | None = None
    frozen: Envelope | None = None
    warnings: list[str] = []
    if options.only:
        own = units(shape, "calibration", options.seed, sets=options.sets, instances=options.instances)
        specs = _chosen(options.only, specs, own)
    else:
        ref, frozen, warnings = _load_envelope(options, backend, shape)
    fitting = _fitting(specs, backend)
    if len(fitting) < len(specs):
        left = len(specs) - len(fitting)
        warnings.append(f"{left} of {len(specs)} cases left out: the contract takes no such trees")
    results = run_cases(
        options.backend, fitting, device=options.device, workers=options.workers, graph=options.graph, label="held-out"
    )
    judged = envelope.judge(frozen, assemble.unit_statistics(results)) if frozen else []
    run = _report(
        options, backend, shape, results, assemble.envelope_checks(judged), ref, started, "component", warnings
    )
    return _diagnosed(run, options) if options.diagnose and run.report.verdict == "FAIL" else run


def _diagnosed(run: Run, options: Options) -> Run:
    """The run with a diagnosis of the surfaces that have a check outside, on small cases in this process."""
    surfaces = sorted({c.surface for c in run.report.checks if c.status == "fail"})
    said = f"diagnosis of {', '.join(surfaces)}: a minute or more; --no-diagnosis leaves it out"
    print(said, file=sys.stderr, flush=True)
    started = time.perf_counter()
    found_run = _named(run, options, surfaces)
    wall = round(run.report.wall_s + time.perf_counter() - started, 2)
    return replace(found_run, report=replace(found_run.report, wall_s=wall))


def _named(run: Run, options: Options, surfaces: Sequence[str]) -> Run:
    try:
        with one_thread():
            found = diagnose(lambda: load_backend(options.backend), options.seed, surfaces)
    except InputError as refusal:  # small cases may not be what the backend takes: the verdict stands without a name
        note = f"no diagnosis: {refusal}"
        return replace(run, report=replace(run.report, warnings=(*run.report.warnings, note)))
    if not found:
        case = next((f.case for f in run.report.findings), "CASE")
        again = shlex.join(["--backend", options.backend, "--seed", str(options.seed), "--only", case])
        note = f"no diagnosis: no small case fails; ask for one that does: lumotree-audit diagnose {again}"
        return replace(run, report=replace(run.report, warnings=(*run.report.warnings, note)))
    return replace(run, report=replace(run.report, diagnosis={"surfaces": [d.as_dict() for d in found]}))


def _fitting(specs: Sequence[CaseSpec], backend: Any) -> list[CaseSpec]:
    return [s for s in specs if fits(s, backend.contract)]


def _chosen(only: Sequence[str], *pools: Sequence[CaseSpec]) -> list[CaseSpec]:
    known = {s.id: s for pool in pools for s in pool}
    unknown = [name for name in only if name not in known]
    if unknown:
        near = [i for i in known if unknown[0].rsplit("/", 1)[-1] in i][:3] or list(known)[:3]
        raise InputError(f"--only: unknown case {unknown[0]!r}; for example: {', '.join(near)}")
    return [replace(known[name], control=True) for name in only]  # a chosen case must show its own power


def _load_envelope(options: Options, backend: Any, shape: Shape) -> tuple[EnvelopeRef, Envelope, list[str]]:
    path = default_envelope(options, shape)
    loaded: Envelope | None = None
    try:
        loaded = envelope.load(path)
        warnings = _check_applies(loaded, options, backend, shape, path)
    except EnvelopeError as refusal:
        # A whole one that is another backend's or shape's: it must not be written over.
        other = loaded is not None and (loaded.backend, loaded.shape) != (options.backend, shape.name)
        raise EnvelopeError(str(refusal).replace(REMEDY, _remedy(options, shape, path, other))) from refusal
    if loaded.seed == options.seed and loaded.case_sha256 == family_sha256(units(shape, "heldout", options.seed)):
        raise InputError(f"envelope {path}: made from the held-out cases themselves; {_remedy(options, shape, path)}")
    return EnvelopeRef(str(path), loaded.sha256, loaded.guarantee), loaded, warnings


def _remedy(options: Options, shape: Shape, path: Path, other: bool = False) -> str:
    """The command that makes the envelope which this run needs; `other`: `path` is somebody else's and stays."""
    device = [] if options.device == "cpu" else ["--device", options.device]
    words = ["--backend", options.backend, "--shape", shape.name, *device]
    if other:
        again = shlex.join(["lumotree-audit", "calibrate", *words])
        return f"name this backend's own with --envelope, or leave that out and calibrate: {again}"
    start, force = ("recalibrate", ["--force"]) if path.exists() else ("calibrate first", [])
    return f"{start}: {shlex.join(['lumotree-audit', 'calibrate', *words, '--envelope', str(path), *force])}"


def _check_applies(loaded: Envelope, options: Options, backend: Any, shape: Shape, path: Path) -> list[str]:
    return envelope.check_applies(
        loaded,
        contract=backend.contract,
        dims=shape.dims,
        shape=shape.name,
        backend=options.backend,
        arm=arm_of(backend),
        code_sha256=code_sha256(),
        trees=[shape.tree],
        backend_sha256=object_sha256(backend),
        environment=environment_on(options.device),
        where=str(path),
    )


def _report(
    options: Options,
    backend: Any,
    shape: Shape,
    results: Sequence[CaseResult],
    enveloped: Sequence[Check],
    ref: EnvelopeRef | None,
    started: float,
    suite: str,
    warnings: Sequence[str],
) -> Run:
    contract = backend.contract
    covered = covered_surfaces(backend)
    surfaces = [s for s in SURFACES if all(covered[s])]
    main = [r for r in results if r.spec.unit]
    small = [r for r in results if not r.spec.unit]
    checks = [
        *assemble.main_checks(assemble.merged(main), contract),
        *assemble.inactive_check(main, "gdn"),
        *assemble.small_checks(assemble.merged(small), contract),
        *enveloped,
    ]
    controls = assemble.controls_of(results, surfaces, partial=_partial(options, contract, suite))
    doubts = assemble.doubts_of(results, [s for s in SURFACES if covered[s][0]], horizon=not options.only)
    graphs = assemble.graphs_of(results)
    if options.graph and graphs.get("replays", 0) <= graphs.get("captures", 0):
        doubts.append("no captured graph was replayed with other inputs than those it was captured for")
    coverage = {
        s: "covered" if all(covered[s]) else "verify only" if covered[s][0] else "not covered" for s in SURFACES
    }
    verdict, reasons = decide(checks, controls, coverage, doubts=doubts)
    return Run(
        Report(
            verdict=verdict,
            reasons=reasons,
            suite=f"{suite} {shape.name} {shape.tree}",
            backend=options.backend,
            contract=contract.as_dict(),
            environment={**environment_on(options.device), "cuda_graphs": graphs},
            envelope=ref,
            coverage=coverage,
            checks=tuple(checks),
            controls=tuple(controls),
            findings=tuple(assemble.findings_of(assemble.merged(results), contract, _reproduce(options))),
            seed=options.seed,
            command=options.command,
            wall_s=round(time.perf_counter() - started, 2),
            peak_mib=peak_mib(),
            horizon=assemble.horizon_of(results),
            warnings=tuple(warnings),
            created=environment()["date"],
        ),
        cells_frame(assemble.cell_records(results)) if any(r.statistics for r in results) else None,
        list(results),
    )


def _partial(options: Options, contract: Contract, suite: str) -> bool:
    """Whether controls that no case reaches are left out: chosen cases, calibration, a contract without branches."""
    return bool(options.only) or suite == "calibration" or not contract.trees


def _reproduce(options: Options) -> str:
    words = ["lumotree-audit check", f"--backend {shlex.quote(options.backend)}", f"--seed {options.seed}"]
    for name in ("shape", "sets", "instances"):  # the last two bound which cases there are to choose from
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name} {value}")
    if options.device != "cpu":
        words.append(f"--device {options.device}")
    if options.graph:
        words.append("--graph")
    return " ".join([*words, "--only {case}"])
