"""The pieces of a decode run, each of which a worker process can do alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from audit.decode_controls import Controls, run_controls
from audit.decode_run import run_mode, run_plain, truth_of
from audit.decode_setup import capacity_for, open_stack, poisoned, requests_of
from audit.decode_types import WHOLE, ModeRun, Options, Share, Truth
from audit.processes import one_thread
from audit.runner import default_workers
from lumotree.cycle_types import Stack
from lumotree.errors import BackendError, DecodeError

#: Requests that are decoded again in another batch.
TURNED = 8

_worker: tuple[Options, Stack] | None = None


class Task(Protocol):
    """One piece of work. label: what progress calls it."""

    @property
    def label(self) -> str: ...

    def __call__(self, options: Options, stack: Stack) -> Any:
        """Do it."""
        ...


@dataclass(frozen=True)
class PlainTask:
    """Plain greedy decoding; digests at every m, or at the end alone."""

    share: Share = WHOLE
    label: str = "plain decoding"

    def __call__(self, options: Options, stack: Stack) -> Truth:
        requests = [r for r in requests_of(options, "plain", "greedy", 0) if self.share.has(r.number)]
        return truth_of(stack, requests, every=options.every)


@dataclass(frozen=True)
class ModeTask:
    """One mode under one law. turned: the first few requests in a batch of half their number, in reverse order."""

    mode: str
    law: str
    run: int
    turned: bool = False
    share: Share = WHOLE

    @property
    def label(self) -> str:
        return f"{self.mode} {self.law}{' in another batch' if self.turned else ''}"

    def __call__(self, options: Options, stack: Stack) -> ModeRun:
        requests = [r for r in requests_of(options, self.mode, self.law, self.run) if self.share.has(r.number)]
        batch = min(options.batch, len(requests))
        if self.turned:
            requests = requests[:TURNED][::-1]
            batch = max(1, len(requests) // 2)
        capacity = capacity_for(requests, batch)
        return run_mode(stack, requests, capacity, (self.mode, self.law, self.run), every=options.every)


@dataclass(frozen=True)
class LocateTask:
    """A run once more, its surfaces read after every cycle, and plain decoding of what it emitted at the same places:
    for the first cycle that departs, where only the ends were compared before."""

    again: ModeTask

    @property
    def label(self) -> str:
        return f"{self.again.label}, cycle by cycle"

    def __call__(self, options: Options, stack: Stack) -> tuple[ModeRun, Truth]:
        run = self.again(replace(options, every=True), stack)
        (truth,) = ReplayTask((run,), follow=True)(options, stack)
        return run, truth


@dataclass(frozen=True)
class ReplayTask:
    """Plain decoding of what runs emitted; one without drafts is decoded anew, by its own coins, unless `follow`."""

    runs: tuple[ModeRun, ...]
    follow: bool = False

    @property
    def label(self) -> str:
        return "plain decoding of " + ", ".join(f"{r.mode}" for r in self.runs)

    def __call__(self, options: Options, stack: Stack) -> list[Truth]:
        requests, outputs, asked = [], [], []
        for run in self.runs:
            lengths = _lengths(run)
            for request in requests_of(options, run.mode, run.law, run.run):
                if run.outputs.get(request.number):
                    requests.append(request)
                    anew = run.mode == "plain" and not self.follow
                    outputs.append(None if anew else run.outputs[request.number])
                    asked.append(lengths.get(request.number, set()))
        found = iter(zip(requests, run_plain(stack, requests, outputs, asked), strict=True)) if requests else iter(())
        truths = []
        for run in self.runs:
            own = [next(found) for output in run.outputs.values() if output]
            truths.append(Truth({r.number: f[0] for r, f in own}, {r.number: f[1] for r, f in own}))
        return truths


def _lengths(run: ModeRun) -> Mapping[int, set[int]]:
    """Request -> the m at which its surfaces are to be compared."""
    found: dict[int, set[int]] = {}
    for mark in run.marks:
        found.setdefault(mark.number, set()).add(mark.committed)
    return found


@dataclass(frozen=True)
class ControlTask:
    """The faults `ids`."""

    ids: tuple[str, ...]
    label: str = "controls"

    def __call__(self, options: Options, stack: Stack) -> Controls:
        return run_controls(stack, requests_of(options, "plain", "greedy", 0), self.ids)


@dataclass(frozen=True)
class Broken:
    """What a task came to when a forward left logits that are no numbers."""

    reason: str


class Bench:
    """Runs tasks in `width` worker processes, or in this one; the stack is opened once in each."""

    def __init__(self, options: Options, stack: Stack, pool: ProcessPoolExecutor | None, width: int = 1) -> None:
        self.options, self.stack, self.pool, self.width = options, stack, pool, width

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Results in the order of the tasks, `Broken` for one that failed. Raises BackendError when a worker dies."""
        if self.pool is None:
            for task in tasks:
                yield task, _guarded(task, self.options, self.stack)
            return
        futures: list[Future[Any]] = [self.pool.submit(_work, task) for task in tasks]
        try:
            for task, future in zip(tasks, futures, strict=True):
                yield task, future.result()
        except BrokenProcessPool as cause:
            raise BackendError(
                "decode: a worker process died (out of memory, or the backend crashed); try --workers 0"
            ) from cause
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def bench(options: Options, stack: Stack) -> Iterator[Bench]:
    """A `Bench` with as many workers as the options ask for; one thread each, so that bits do not depend on the
    machine's number of cores."""
    workers = default_workers(options.device) if options.workers is None else options.workers
    # Inference mode: nothing here is differentiated, and calls on small tensors cost less without the bookkeeping.
    with one_thread(), torch.inference_mode():
        if workers < 2:
            yield Bench(options, stack, None)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(options,)) as pool:
            yield Bench(options, stack, pool, workers)


def _start(options: Options) -> None:
    global _worker
    torch.set_num_threads(1)
    _worker = (options, poisoned(open_stack(options)))


def _work(task: Task) -> Any:
    assert _worker is not None, "the pool's initializer has run"
    with torch.inference_mode():
        return _guarded(task, *_worker)


def _guarded(task: Task, options: Options, stack: Stack) -> Any:
    try:
        return task(options, stack)
    except DecodeError as cause:
        return Broken(str(cause))
