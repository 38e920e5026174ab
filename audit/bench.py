"""Time, memory and accuracy of backends and published policies in one run, under one rule.

The accuracy columns come from the component audit of the same backend in the same run; a backend whose audit did not
run gets no speed. A speed without them means nothing: a fast kernel that leaves the bounds is not a fast kernel.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from audit.bench_render import Outcome, print_table, write_files
from audit.bench_time import Ceilings, Timed, measure_ceilings, mode_of, on_gpu
from audit.cases import Case
from audit.component import audit_case
from audit.environment import environment
from audit.families import SHAPES, Shape, fitting_shape, units
from audit.processes import one_thread
from audit.render import check_writable
from audit.render.progress import Progress
from audit.shortage import shortage
from audit.suite import check_device
from audit.tally import Tallies, judged
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import complete_surfaces
from lumotree.errors import InputError

POLICIES = ("weaver", "treewy", "treewy_tf32", "specla", "snapshot_chain")
ON_CPU = ("torch", "reference", "bank", *POLICIES)
ON_GPU = ("cuda", "triton", "bank_walk", "torch", "reference", "bank", *POLICIES)
PEERS = ("sglang", "tokenspeed", "tokenspeed-replay", "fla", "transformers")
GPU_LAYERS = 48

#: An eager verify and publish that takes longer is timed on fewer layers (one at least) and no more than so often.
SLOW_S, SLOW_REPEAT = 1.0, 2

#: Checks that make the accuracy columns: outputs and published states, as claimed and against float64.
_BITS = ("gdn.out.bitwise", "gdn.state.bitwise")
_DERIVED = ("gdn.out.derived", "gdn.state.derived")


#: Told of the outcomes so far and of the backends that are still to run, after each of them.
Keep = Callable[[Sequence[Outcome], Sequence[str]], None]


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
        facts = {**environment(), "command": options.command, **asdict(ceilings), "options": asdict(options)}

        def keep(outcomes: Sequence[Outcome], left: Sequence[str]) -> None:
            if options.report:
                write_files(Path(options.report), outcomes, {**facts, "not_run": list(left)} if left else facts)

        outcomes = _all(options, ceilings, keep)
    print_table(outcomes, facts)
    return 0


def _all(options: Options, ceilings: Ceilings, keep: Keep = lambda outcomes, left: None) -> list[Outcome]:
    named = options.backends is not None
    default = (*(ON_GPU if on_gpu(options.device) else ON_CPU), *PEERS)
    names = options.backends if options.backends is not None else default
    for name in names if named else ():  # before the first is timed, which takes minutes
        _check_times(name)
    outcomes: list[Outcome] = []
    with Progress(len(names), "bench") as progress:
        for i, name in enumerate(names):
            try:
                backend = load_backend(name)
            except InputError as refusal:
                if named:
                    raise
                outcomes.append(Outcome(name, refused=f"not installed: {refusal}"))
            else:
                outcomes.append(_one(name, backend, options, ceilings))
            keep(outcomes, names[i + 1 :])
            progress.advance(note=name)
    return outcomes


def _check_times(name: str) -> None:
    """Raise InputError if there is no such backend or nothing of it that is timed."""
    if "gdn" not in complete_surfaces(load_backend(name)):
        raise InputError(f"--backends: {name} does not verify and publish gdn, which is what bench times")


def _one(name: str, backend: Any, options: Options, ceilings: Ceilings) -> Outcome:
    done = Outcome(name)
    try:
        shape = fitting_shape(SHAPES[options.shape], backend.contract)
        done = _accuracy(name, backend, _audit(name, backend, shape, options), shape)
        if getattr(backend, "interpreted", False) and not on_gpu(options.device):
            return replace(done, refused="interpreted here: a speed would be the interpreter's")
        return _time(done, backend, shape, options, ceilings)
    except (InputError, RuntimeError, MemoryError) as error:
        what = f"timing {_layers(options)} layers at --batch {options.batch}" if done.cells else "the audit"
        if short := shortage(error):
            return replace(done, refused=f"out of memory: {what} {short}; use a smaller --layers or --batch")
        if not isinstance(error, InputError):
            raise
        return replace(done, refused=f"{what} did not run: {error}")
    finally:
        _release(options.device)


def _release(device: str) -> None:
    """Give the card back what the last backend held: the next one may ask how much is free."""
    gc.collect()
    if on_gpu(device):
        torch.cuda.empty_cache()


def _layers(options: Options) -> int:
    """Layers to time, unless a backend is slow."""
    return options.layers or (GPU_LAYERS if on_gpu(options.device) else 1)


def _audit(name: str, backend: Any, shape: Shape, options: Options) -> Tallies:
    tallies = Tallies()
    for spec in units(shape, "heldout", options.seed, sets=1, instances=options.units):
        tallies.merge(audit_case(backend, replace(spec, control=False), options.device).tallies)
    if not all(tallies[check].cells for check in _DERIVED):
        raise InputError(f"{name}: the component audit saw no cell of gdn")
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


def _fitted(name: str, backend: Any, shape: Shape, options: Options) -> tuple[Timed, int, str]:
    """What is timed, how often, and what to say of it. A slow eager backend is timed fewer times and, unless --layers
    asks for them, on fewer layers."""
    unit = units(shape, "heldout", options.seed, sets=1, instances=1)[0]

    def on(layers: int) -> Timed:
        spec = replace(
            unit, id=f"bench/{name}", dims=replace(unit.dims, layers=layers),
            trees=unit.trees * options.batch, prefixes=unit.prefixes * options.batch, unit=False, control=False,
        )  # fmt: skip
        return Timed(backend, Case(spec, backend.contract, options.device), options.device)

    layers = _layers(options)
    if mode_of(backend, options.device) == "graph":
        return on(layers), options.repeat, ""
    one = on(1)
    seconds = one.pass_s()
    if layers * seconds <= SLOW_S:
        return one if layers == 1 else on(layers), options.repeat, ""
    fewer = layers if options.layers else min(layers, max(1, int(SLOW_S / seconds)))
    repeat = min(options.repeat, SLOW_REPEAT)
    note = f"{fewer} of {layers} layers timed, {repeat} times: verify and publish take {seconds:.2g} s a layer"
    return one if fewer == 1 else on(fewer), repeat, note


def _time(audited: Outcome, backend: Any, shape: Shape, options: Options, ceilings: Ceilings) -> Outcome:
    timed, repeat, note = _fitted(audited.backend, backend, shape, options)
    dims, rows = timed.case.dims, timed.width
    verify, publish = timed.clocks(rows, repeat)
    lengths = sorted({1, (rows + 1) // 2, rows})
    by_length = {n: timed.clocks(n, repeat)[1].median if n != rows else publish.median for n in lengths}
    work = timed.work(rows)
    floors = [w.floor_ms(ceilings) for w in work]
    heads = 4 * options.batch * dims.layers * dims.hv
    return replace(
        audited,
        note=note,
        mode=timed.mode,
        batch=options.batch,
        layers=dims.layers,
        repeat=repeat,
        path=rows,
        verify=verify,
        publish=publish,
        publish_by_length=by_length,
        buffers=timed.named_bytes(),
        work=work,
        floors=(floors[0], floors[1]),
        state_bytes=heads * dims.dv * dims.dk,
        factor_bytes=heads * (dims.dv + dims.dk + 1),
    )
