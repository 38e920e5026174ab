"""Work over processes: its order, and a worker that dies."""

from __future__ import annotations

import os
import resource
import time

import pytest

from audit.processes import pooled
from lumotree.errors import BackendError


def test_results_come_in_the_order_of_the_jobs_where_that_is_asked_for() -> None:
    assert list(pooled(pow, [(2, 3), (3, 2), (5, 1)], 2, "powers", in_order=True)) == [8, 9, 5]


def test_a_worker_that_dies_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(BackendError, match=r"deaths: a worker process died .* add --workers 0"):
        list(pooled(os._exit, [(3,)], 1, "deaths"))


def _busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_what_workers_used_is_known_when_the_last_result_is_taken() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    list(pooled(_busy, [(0.2,), (0.2,)], 2, "busy"))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before > 0.4
