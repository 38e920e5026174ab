"""All arms, schedules and controls of one run, over processes; what they leave is compared in one place.

Arm A is decoded in this process, B in another. Workers hand over file names, not tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from audit.continuation_calibrate import Spread, measure_spread
from audit.continuation_distance import Compared, compare
from audit.continuation_drift import Drift, measure_drift
from audit.continuation_engine import Outcome
from audit.continuation_harvest import Course, harvest
from audit.continuation_native import ARMS, Trace, native_trace
from audit.continuation_plan import Script
from audit.continuation_program import play_batch, play_cold, play_pair, play_repeat_and_resumed
from audit.continuation_stack import StackSpec, make_stack
from audit.continuation_trace import load_trace, save_trace
from audit.dump import DumpOptions, judge_dump
from audit.render.progress import Progress
from audit.report import Report
from faults.continuation import ENGINE_FAULTS
from lumotree.cycle_types import Stack
from lumotree.errors import BackendError, DecodeError, InputError

#: Script -> behind its prompt and each cycle.
ComparedTrace = dict[str, list[Compared]]
#: Arm A's snapshots behind the prompts, for tasks that import them.
PROMPTS_FILE = "prompts.safetensors"
#: Scripts, folder for traces -> tasks.
TasksOf = Callable[[Sequence[Script], Path], list["Task"]]

_stack: Stack | None = None


@dataclass(frozen=True)
class Task:
    """One piece of work. kind: a key of `_WORK`; name: of an arm, fault or schedule; scripts that it plays; trace: file
    to write snapshots to; native: file of arm A's prompts, where states are imported; record: folder for a recording,
    which `backend` judges. tokens, model: length of a drift and folder of the weights; prompts: of a calibration, with
    `tokens` as its seed."""

    kind: str
    name: str
    scripts: tuple[Script, ...]
    trace: str = ""
    native: str = ""
    record: str = ""
    backend: str = ""
    tokens: int = 0
    model: str = ""
    prompts: tuple[tuple[int, ...], ...] = ()


@dataclass
class Done:
    """What a task left: its process, the engine's account (snapshots are in the trace file), or why it was refused."""

    task: Task
    pid: int
    outcome: Outcome | None = None
    refused: str = ""
    drift: Drift | None = None
    spread: Spread | None = None
    recorded: Report | None = None


@dataclass
class Found:
    """Everything a run has seen. compared: arm, or "candidate", "batch" or a control's fault and place -> script ->
    behind the prompt and each cycle, held against arm A as soon as it came; snapshots are not kept. layers: recurrent
    and attention layers; head: whether the model drafts."""

    scripts: list[Script]
    compared: dict[str, ComparedTrace] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    outcomes: list[Done] = field(default_factory=list)
    controls: list[tuple[Done, ComparedTrace]] = field(default_factory=list)
    drift: Drift | None = None
    drift_stopped: str = ""
    spread: Spread | None = None
    recorded: Report | None = None
    layers: tuple[int, int] = (0, 0)
    head: bool = False


def _play(task: Task, stack: Stack) -> Outcome:
    native = load_trace(Path(task.native)) if task.native else {}
    if task.kind == "cold":
        record = Path(task.record) if task.record else None
        return play_cold(stack, task.scripts[0], native, record=record, backend_name=task.backend)
    if task.kind == "primed":
        return play_repeat_and_resumed(stack, task.scripts[0], task.scripts[1])
    if task.kind == "batch":
        return play_batch(stack, task.scripts)
    fault = ENGINE_FAULTS[task.name]
    if fault.requests > 1:
        return play_pair(stack, task.scripts, native, fault)
    return play_cold(stack, task.scripts[0], native, fault=fault)


def work(task: Task, stack: Stack) -> Done:
    """Do a task in this process."""
    done = Done(task, os.getpid())
    if task.kind == "native":
        save_trace(native_trace(stack, task.scripts, ARMS[task.name]), Path(task.trace))
    elif task.kind == "drift":
        try:
            done.drift = measure_drift(stack, task.model, task.scripts[0].prompt, task.tokens)
        except DecodeError as cause:  # logits that are no numbers: the kernel's failure, not bad input
            done.refused = str(cause)
    elif task.kind == "calibration":
        done.spread = measure_spread(stack, task.prompts, task.tokens)
    else:
        try:
            outcome = _play(task, stack)
        except InputError as refusal:
            if task.kind != "control":
                raise
            done.refused = str(refusal)
            return done
        if task.record:
            done.recorded = judge_dump(
                DumpOptions(task.record, task.backend or "none", stack.head, device=str(stack.model.device))
            )
        save_trace(outcome.trace, Path(task.trace))
        done.outcome = replace(outcome, trace={})
    return done


def _start(spec: StackSpec) -> None:
    global _stack
    torch.set_num_threads(1)
    _stack = make_stack(spec)


def sealed(task: Task) -> bytes:
    """The task as bytes, made in the caller's thread: the pool's own thread would pickle scripts and trees while this
    one is filling in what they compute when first asked."""
    return pickle.dumps(task)


def _work(task: bytes) -> Done:
    assert _stack is not None
    return work(pickle.loads(task), _stack)


def _harvest(plan: Sequence[Course], texts: Sequence[Sequence[int]]) -> list[Script]:
    assert _stack is not None
    return harvest(_stack, plan, texts)


@contextmanager
def _pool(spec: StackSpec, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Spawned: a forked child of a process that has used torch's thread pool can hang."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(spec,))
    try:
        yield pool
    except BrokenProcessPool as died:
        raise BackendError(
            f"backend {spec.backend!r}: a worker process died (out of memory, or a crash in the kernel)"
        ) from died
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def collect(
    spec: StackSpec, stack: Stack, plan: Sequence[Course], early: TasksOf, late: TasksOf, workers: int, folder: Path
) -> Found:
    """Harvest the courses, run every task, and load what they left.

    early: tasks that import nothing; late: those that import arm A's states. folder: empty, for traces and recordings.
    """
    with _pool(spec, workers) as pool:
        found = Found(_harvested(pool, plan), layers=_layers(stack), head=stack.head is not None)
        first, then = early(found.scripts, folder), late(found.scripts, folder)
        with Progress(len(first) + len(then) + 1, "continuation") as progress:
            futures = [pool.submit(_work, sealed(task)) for task in first]
            reference = native_trace(stack, found.scripts, ARMS["A"])
            found.pids["A"] = os.getpid()
            progress.advance(note="native A")
            save_trace({name: snapshots[:1] for name, snapshots in reference.items()}, folder / PROMPTS_FILE)
            for future in as_completed([*futures, *(pool.submit(_work, sealed(task)) for task in then)]):
                done = future.result()
                _sort(found, reference, done, stack.backend.contract.zeros == "signed")
                progress.advance(note=f"{done.task.kind} {done.task.name}".strip())
    return found


def _harvested(pool: ProcessPoolExecutor, plan: Sequence[Course]) -> list[Script]:
    """The scripts of the courses, in order; courses of one prompt go together, so that it is fed once."""
    texts = [c.prompt for c in plan]
    by_prompt: dict[tuple[int, ...], list[Course]] = {}
    for course in plan:
        by_prompt.setdefault(course.prompt, []).append(course)
    scripts: dict[str, Script] = {}
    with Progress(len(by_prompt), "harvest") as progress:
        for future in as_completed([pool.submit(_harvest, part, texts) for part in by_prompt.values()]):
            scripts |= {s.name: s for s in future.result()}
            progress.advance()
    return [scripts[c.name] for c in plan]


def _layers(stack: Stack) -> tuple[int, int]:
    pools = stack.model.empty_pools(stack.backend.contract, 1, 1)
    return pools.recurrent.shape[0], pools.cache.k.shape[0]


def _sort(found: Found, reference: Trace, done: Done, signed_zeros: bool) -> None:
    task = done.task
    if task.kind == "drift":
        found.drift, found.drift_stopped = done.drift, done.refused
        return
    if task.kind == "calibration":
        found.spread = done.spread
        return
    trace = {} if done.refused else load_trace(Path(task.trace))
    compared = against(reference, trace, task.scripts, signed_zeros=signed_zeros) if trace else {}
    if task.kind == "native":
        found.compared[task.name], found.pids[task.name] = compared, done.pid
    elif task.kind == "control":
        found.controls.append((done, compared))
    else:
        arm = "batch" if task.kind == "batch" else "candidate"
        found.compared.setdefault(arm, {}).update(compared)
        found.recorded = done.recorded or found.recorded
        found.outcomes.append(done)


def against(reference: Trace, trace: Trace, scripts: Sequence[Script], *, signed_zeros: bool = True) -> ComparedTrace:
    """Every snapshot of the scripts against arm A's. signed_zeros: as the contract says of recurrent states."""
    found: ComparedTrace = {}
    for script in scripts:
        # Strict: an arm that took fewer snapshots would be compared less, and nobody would know.
        pairs = zip(trace[script.name], reference[script.name], (0, *script.bounds[:-1]), strict=True)
        found[script.name] = [compare(got, want, before, signed_zeros=signed_zeros) for got, want, before in pairs]
    return found


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder for traces, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="lumotree-continuation-") as name:
        yield Path(name)
