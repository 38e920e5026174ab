"""A run of the fuzz audit is the same whoever does its chunks, and a worker that dies or is left alone is no pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis.database import InMemoryExampleDatabase

from audit import bench_fuzz
from audit import fuzz as fuzzing
from audit.fuzz import FuzzOptions, fuzz
from audit.fuzz_hunt import NEW, Hunt, chunk, hunt, smallest_of
from audit.fuzz_machine import Ledger
from audit.fuzz_program import Program
from audit.report import Report
from audit.world import DIMS_NANO, World
from faults import CATALOGUE
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import BackendError

from .fuzz_kernels import LATE

ROOT = Path(__file__).parents[2]

#: Ends a worker process, and nothing in its parent.
DIES = """
import multiprocessing
import os
from lumotree.backends.torch_backend import TorchBackend

class Kernel(TorchBackend):
    def kv_publish(self, *args):
        if multiprocessing.parent_process() is not None:
            os._exit(3)
        super().kv_publish(*args)
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a user's kernels in it; two controls, few programs a chunk."""
    (tmp_path / "fuzz_late_kernel.py").write_text(LATE)
    (tmp_path / "fuzz_dying_kernel.py").write_text(DIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    few = [CATALOGUE["wrong_parent.gdn"], CATALOGUE["sibling_published.attention"]]
    monkeypatch.setattr(fuzzing, "control_faults", lambda surfaces: few)
    monkeypatch.setattr(fuzzing, "CHUNK", 10)
    monkeypatch.setattr(fuzzing, "RELATION_SEEDS", 1)
    return tmp_path


def _timeless(report: Report) -> Report:
    return replace(report, wall_s=0.0, created="", environment={})


def test_a_clean_run_is_the_same_with_workers_and_without(kernels: Path) -> None:
    alone, pooled = (fuzz(FuzzOptions(examples=25, workers=workers)) for workers in (0, 2))
    assert _timeless(alone.report) == _timeless(pooled.report)
    assert alone.report.verdict == "PASS" and len(alone.report.controls) == 2
    assert all(c.cells > 0 for c in alone.report.checks)


def test_a_failure_of_a_later_chunk_is_shrunk_and_stored_whoever_finds_it(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "CHUNK", 2)
    spec = "fuzz_late_kernel:Kernel"
    late = next(n for n in range(1, 100) if chunk(spec, DIMS_NANO, n * 100_003, 2).failed is None)
    runs = [fuzz(FuzzOptions(spec, examples=60, seed=late, database=f"base{n}", workers=n)) for n in (0, 2)]
    assert runs[0].code == runs[1].code and runs[0].report.verdict == "FAIL"
    assert _timeless(replace(runs[0].report, findings=())) == _timeless(replace(runs[1].report, findings=()))
    assert len([line for line in runs[1].code.splitlines() if line.startswith("d.")]) <= 3
    again = fuzz(FuzzOptions(spec, examples=1, seed=99, database="base2", workers=2))
    assert again.report.verdict == "FAIL" and again.code == runs[1].code


def test_a_worker_that_dies_is_an_error_and_no_pass(kernels: Path) -> None:
    with pytest.raises(BackendError, match=r"backend 'fuzz_dying_kernel:Kernel': a worker process died .*--workers 0"):
        fuzz(FuzzOptions("fuzz_dying_kernel:Kernel", examples=30, workers=2))
    assert fuzz(FuzzOptions("fuzz_dying_kernel:Kernel", examples=10)).report.verdict == "PASS"


def test_a_failure_that_does_not_come_again_is_still_one() -> None:
    program = Program(World(), [("admit", (0, 2), {})], "history of request 0 differs", "conv")
    part = Hunt(Ledger(programs=3), 1.0, 1.0, program)
    found = smallest_of(part, "torch", DIMS_NANO, 1, 5, InMemoryExampleDatabase())
    assert found.failed == program and found.flaky and found.ledger.programs == 3


def test_what_is_drawn_does_not_depend_on_what_is_imported(kernels: Path) -> None:
    def programs() -> tuple[int, int, int]:
        done = hunt(TorchBackend, DIMS_NANO, 3, 30, phases=NEW).ledger
        return done.programs, done.steps, done.compared

    before = programs()
    (kernels / "fuzz_numbers.py").write_text(f"NUMBERS = {list(range(101, 5000))}\n")
    __import__("fuzz_numbers")
    assert programs() == before


def test_time_ends_a_run_of_workers(kernels: Path) -> None:
    run = fuzz(FuzzOptions(minutes=0.05, workers=2))
    assert run.report.verdict == "PASS" and run.rate is not None and run.rate[0] > 0


def _left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_run_that_is_broken_off(tmp_path: Path, end: signal.Signals) -> None:
    # What a shell runs in the background, these tests perhaps, is started with Ctrl-C ignored, and children inherit it.
    heard = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    words = [sys.executable, "-m", "audit.cli", "fuzz", "--minutes", "5", "--workers", "2"]
    words = [sys.executable, "-c", heard, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(words, cwd=tmp_path, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    line = next(line for line in run.stderr if line.startswith("programs: "))
    assert "/300" in line
    os.kill(run.pid, end)
    assert run.wait(30) != 0
    deadline = time.monotonic() + 20
    while _left(run.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _left(run.pid)


def test_the_benchmark_counts_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_fuzz, "PROGRAMS", 5)
    bench_fuzz.main(["--seconds", "0.1", "--workers", "2"])
    alone, pooled = capsys.readouterr().out.splitlines()
    assert alone.startswith("one process: ") and pooled.startswith("2 workers: ")
    assert all(float(line.split(" ")[2].strip(":")) > 0 for line in (alone, pooled))
