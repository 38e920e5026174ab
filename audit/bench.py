"""Time, memory and accuracy of backends and published policies in one run, under one rule.

The accuracy columns come from the component audit of the same backend in the same run; a backend whose audit did not
run gets no speed. A speed without them means nothing: a fast kernel that leaves the bounds is not a fast kernel.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from audit.bench_render import Outcome, print_table, write_files
from audit.bench_time import Ceilings, Timed, measure_ceilings, on_gpu
from audit.cases import Case
from audit.component import audit_case
from audit.environment import environment
from audit.families import SHAPES, Shape, fitting_shape, units
from audit.processes import one_thread
from audit.render import check_writable
from audit.render.progress import Progress
from audit.suite import check_device
from audit.tally import Tallies, judged
from lumotree.backends.loader import load_backend
from lumotree.errors import InputError

POLICIES = ("weaver", "treewy", "treewy_tf32", "specla", "snapshot_chain")
ON_CPU = ("torch", "reference", "bank", *POLICIES)
ON_GPU = ("cuda", "triton", "bank_walk", "torch", "reference", "bank", *POLICIES)
PEERS = ("sglang", "tokenspeed", "tokenspeed-replay", "fla", "transformers")
GPU_LAYERS = 48
#: Checks that make the accuracy columns: outputs and published states, as claimed and against float64.
_BITS = ("gdn.out.bitwise", "gdn.state.bitwise")
_DERIVED = ("gdn.out.derived", "gdn.state.derived")


@dataclass(frozen=True)
class Options:
    """What to run. backends None: what suits the device; layers None: 48 on a GPU, 1 on a CPU."""

    backends: tuple[str, ...] | None = None
    shape: str = "27B"
    device: str = "cpu"
    repeat: int = 5
    batch: int = 1
    layers: int | None = None
    units: int = 1
    seed: int = 1
    report: str | None = None
    command: str = "lumotree-audit bench"


def run_bench(options: Options) -> int:
    """Audit and time every backend, print the table, write the files. Returns 0; raises InputError for bad input."""
    if options.shape not in SHAPES:
        raise InputError(f"--shape: expected one of {', '.join(SHAPES)}, got {options.shape!r}")
    check_device(options.device)
    if options.report:
        check_writable(options.report)
    with nullcontext() if on_gpu(options.device) else one_thread():
        ceilings = measure_ceilings(options.device)
        outcomes = _all(options, ceilings)
    facts = {**environment(), "command": options.command, **asdict(ceilings), "options": asdict(options)}
    print_table(outcomes, facts)
    if options.report:
        write_files(Path(options.report), outcomes, facts)
    return 0


def _all(options: Options, ceilings: Ceilings) -> list[Outcome]:
    named = options.backends is not None
    default = (*(ON_GPU if on_gpu(options.device) else ON_CPU), *PEERS)
    names = options.backends if options.backends is not None else default
    outcomes = []
    with Progress(len(names), "bench") as progress:
        for name in names:
            try:
                backend = load_backend(name)
            except InputError as refusal:
                if named:
                    raise
                outcomes.append(Outcome(name, refused=f"not installed: {refusal}"))
            else:
                outcomes.append(_one(name, backend, options, ceilings))
            progress.advance(note=name)
    return outcomes


def _one(name: str, backend: Any, options: Options, ceilings: Ceilings) -> Outcome:
    try:
        shape = fitting_shape(SHAPES[options.shape], backend.contract)
        tallies = _audit(backend, shape, options)
        audited = _accuracy(name, backend, tallies, shape)
        if getattr(backend, "interpreted", False) and not on_gpu(options.device):
            return replace(audited, refused="interpreted here: a speed would be the interpreter's")
        return _time(audited, backend, shape, options, ceilings)
    except InputError as refusal:
        return Outcome(name, refused=f"the audit or the timing did not run: {refusal}")


def _audit(backend: Any, shape: Shape, options: Options) -> Tallies:
    tallies = Tallies()
    for spec in units(shape, "heldout", options.seed, sets=1, instances=options.units):
        tallies.merge(audit_case(backend, replace(spec, control=False), options.device).tallies)
    if not all(tallies[check].cells for check in _DERIVED):
        raise InputError(f"{backend.name}: the component audit saw no cell of gdn")
    return tallies


def _accuracy(name: str, backend: Any, tallies: Tallies, shape: Shape) -> Outcome:
    failed = [t for t in tallies.failures("gdn") if judged(t.check, backend.contract)]
    counted = [t for t in failed if t.check in _DERIVED]
    cells = sum(tallies[check].cells for check in _BITS)
    return Outcome(
        name,
        claims=backend.contract.claim("gdn"),
        tree=shape.tree,
        cells=sum(tallies[check].cells for check in _DERIVED),
        outside=sum(t.failed for t in counted),
        outside_checks=tuple(t.check for t in failed),
        worst=max(tallies[check].worst or 0.0 for check in _DERIVED),
        worst_state=tallies["gdn.state.derived"].worst or 0.0,
        bitwise=sum(tallies[check].bitwise for check in _BITS) / cells if cells else 0.0,
    )


def _time(audited: Outcome, backend: Any, shape: Shape, options: Options, ceilings: Ceilings) -> Outcome:
    layers = options.layers or (GPU_LAYERS if on_gpu(options.device) else 1)
    unit = units(shape, "heldout", options.seed, sets=1, instances=1)[0]
    spec = replace(
        unit, id=f"bench/{audited.backend}", dims=replace(unit.dims, layers=layers), trees=unit.trees * options.batch,
        prefixes=unit.prefixes * options.batch, unit=False, control=False,
    )  # fmt: skip
    timed = Timed(backend, Case(spec, backend.contract, options.device), options.device)
    rows = max(len(p) for p in timed.longest)
    verify, publish = timed.clocks(rows, options.repeat)
    lengths = sorted({1, (rows + 1) // 2, rows})
    by_length = {n: timed.clocks(n, options.repeat)[1].median if n != rows else publish.median for n in lengths}
    work = timed.work(rows)
    floors = [w.floor_ms(ceilings) for w in work]
    buffers = timed.named_bytes()
    return replace(
        audited,
        mode=timed.mode,
        batch=options.batch,
        layers=layers,
        path=rows,
        verify=verify,
        publish=publish,
        publish_by_length=by_length,
        buffers=buffers,
        work=work,
        floors=(floors[0], floors[1]),
        state_bytes=4 * options.batch * layers * unit.dims.hv * unit.dims.dv * unit.dims.dk,
        factor_bytes=4 * options.batch * layers * unit.dims.hv * (unit.dims.dv + unit.dims.dk + 1),
    )
