"""Looks for a failing program: a chunk of programs drawn from one seed, in this process or in a worker's.

What is drawn depends on the seed alone, so that a chunk is the same whoever runs it, and a worker's failure can be made
again and shrunk elsewhere.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import ExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import run_state_machine_as_test

from audit.fuzz_judge import MismatchError
from audit.fuzz_machine import Ledger, machine
from audit.fuzz_program import Program
from audit.fuzz_shrink import shrunk
from audit.processes import start_worker
from audit.report import Control
from faults import CATALOGUE, Fault
from lumotree.backends.loader import backend_maker
from lumotree.contract import Dims

#: Steps of a program behind its first requests.
STEPS = 7
#: Most stored failures that are replayed.
STORED = 1000
NEW = (Phase.generate,)
SMALLEST = (Phase.generate, Phase.shrink)
AGAIN = (Phase.reuse, Phase.shrink)


@dataclass(frozen=True)
class Hunt:
    """What looking for a failing program gave. seconds, cpu: of the clock and of the processor; failed: the smallest
    one; flaky: whether it failed only in company; chunks: how many were added."""

    ledger: Ledger
    seconds: float
    cpu: float
    failed: Program | None = None
    flaky: bool = False
    chunks: int = 0

    @property
    def rate(self) -> tuple[float, float]:
        """Programs a second, and a second of processor time."""
        return self.ledger.programs / max(self.seconds, 1e-9), self.ledger.programs / max(self.cpu, 1e-9)

    def with_chunk(self, part: Hunt, seconds: float) -> Hunt:
        """This and one more chunk, done `seconds` after the start: several may run at a time."""
        a, b = self.ledger, part.ledger
        both = Ledger(a.programs + b.programs, a.steps + b.steps, by=a.by + b.by)
        return Hunt(both, seconds, self.cpu + part.cpu, part.failed, part.flaky, self.chunks + 1)


def hunt(
    make: Callable[[], Any],
    dims: Dims,
    number: int,
    count: int,
    database: ExampleDatabase | None = None,
    phases: tuple[Phase, ...] = SMALLEST,
) -> Hunt:
    """Run up to `count` programs; stop at the first failure.

    make: makes a backend; called for each program. number: seed. phases: new programs alone; those, and what fails
    shrunk and stored; or what is stored, shrunk.
    """
    ledger, clock, cpu = Ledger(), time.perf_counter(), time.process_time()
    chosen = settings(
        max_examples=count, stateful_step_count=STEPS, database=database, deadline=None, phases=phases,
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet, print_blob=False,
        report_multiple_bugs=False,
    )  # fmt: skip
    failed, flaky = False, False
    try:
        with _seed_alone(), _little_collection():
            run_state_machine_as_test(seed(number)(machine(make, dims, ledger)), settings=chosen)
    except MismatchError:
        failed = True
    except Flaky:
        failed, flaky = True, True
    except SkipTest:
        if ledger.programs or Phase.generate in phases:
            raise  # else nothing was stored
    smallest = ledger.failed if failed else None
    if smallest is not None and Phase.shrink in phases and not flaky:
        smallest = shrunk(smallest, make)
    return Hunt(ledger, time.perf_counter() - clock, time.process_time() - cpu, smallest, flaky)


@contextmanager
def _seed_alone() -> Iterator[None]:
    """Hypothesis now and then draws a number that it has read in an imported module: another process, or another import
    before, would draw other programs."""
    kind, name = providers.HypothesisProvider, "_maybe_draw_constant"
    before = getattr(kind, name, None)
    if before is None:  # versions that do not
        yield
        return
    setattr(kind, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(kind, name, before)


@contextmanager
def _little_collection() -> Iterator[None]:
    """What is there before a hunt stays; a program leaves little in cycles: looking for it often costs more than it."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def start_hunting(home: Path | None) -> None:
    """What a worker does first. home: where Hypothesis may keep what it has found out about modules."""
    start_worker()
    set_hypothesis_home_dir(home)


def chunk(spec: str, dims: Dims, number: int, count: int) -> Hunt:
    """A job: programs of a backend drawn from one seed, a failure left as it was drawn."""
    return hunt(backend_maker(spec), dims, number, count, phases=NEW)


def smallest_of(part: Hunt, spec: str, dims: Dims, number: int, count: int, database: ExampleDatabase) -> Hunt:
    """A chunk that failed, with its failure made again, shrunk and stored."""
    assert part.failed is not None
    make = backend_maker(spec)
    again = hunt(make, dims, number, count, database)
    if again.failed is not None:
        return replace(part, failed=again.failed, flaky=again.flaky)
    # A backend that keeps something from one program to the next, or that answers now so, now so.
    alone = part.failed.run(make(), make())
    return replace(part, failed=shrunk(part.failed, make) if alone else part.failed, flaky=alone is None)


def inject(fault: Fault, spec: str, dims: Dims, number: int, count: int) -> Control | None:
    """Look for one fault within `count` programs. cases: programs it took, or all that were run; None if no program
    could reach it because the contract takes no trees. A failure that does not come again is not the fault's, which is
    always there: it is not found."""
    make = backend_maker(spec)
    result = hunt(lambda: fault.wrap(make()), dims, number, count, phases=NEW)
    if result.failed is None or result.flaky:
        unreachable = result.failed is None and not result.ledger.changed and not make().contract.trees
        return None if unreachable else Control(fault.id, fault.expect, False, None, None, result.ledger.programs)
    by = f"{result.failed.surface}.programs"
    return Control(fault.id, fault.expect, True, by, None, result.ledger.first_failure or 1)


def control(fault: str, spec: str, dims: Dims, number: int, count: int) -> Control | None:
    """A job: `inject` of a fault of the catalogue."""
    return inject(CATALOGUE[fault], spec, dims, number, count)
