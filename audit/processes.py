"""What a run asks of its processes: one thread each, and how much memory they took."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: a kernel that splits work over threads must not make bits depend on the machine, and for small
    tensors a second thread costs more than it does. The number is put back at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def peak_mib(workers: int = 2) -> float:
    """Peak resident memory of this process and, `workers` times, of its largest worker, in MiB: at most this."""
    unit = 1024 if sys.platform != "darwin" else 1024 * 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return round((own + workers * children) / unit, 1)
