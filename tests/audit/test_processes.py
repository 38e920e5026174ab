"""Work over processes: its order, and a worker that dies."""

from __future__ import annotations

import os
import resource
import time
from itertools import count, islice

import pytest

from audit.processes import pooled, team, worker_processes
from lumotree.errors import BackendError


def test_a_worker_that_dies_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(BackendError, match=r"deaths: a worker process died .* add --workers 0"):
        list(pooled(os._exit, [(3,)], 1, "deaths"))


def _busy(seconds: float) -> float:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


def test_results_come_in_the_order_of_the_jobs_and_with_the_last_what_workers_used_is_known() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert list(pooled(_busy, [(0.6,), (0.01,), (0.2,)], 2, "busy", in_order=True)) == [0.6, 0.01, 0.2]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before > 0.8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_team_takes_from_jobs_without_end_what_it_has_room_for(workers: int) -> None:
    taken = count()
    with team(workers, "powers") as others:
        assert list(islice(others.each(pow, ((n, 2) for n in taken)), 5)) == [0, 1, 4, 9, 16]
    assert next(taken) <= 5 + workers


def test_jobs_that_have_begun_end_with_a_caller_that_stops() -> None:
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), worker_processes(1, "naps") as pool:
        assert pool.submit(pow, 2, 3).result() == 8
        nap = pool.submit(time.sleep, 120)
        while not nap.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 60
