"""Times and floors: medians of eager calls or of graph replays, the machine's own ceilings, bytes and operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from audit.calls import call
from audit.cases import Case
from audit.guard import tensors_of
from lumotree.backends.batch import accepted_paths
from lumotree.backends.protocol import Limits

#: Replays before the first timed one.
_WARMUPS = 3


@dataclass(frozen=True)
class Clock:
    """Milliseconds: median, and the tenth and ninetieth percentile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(times: list[float]) -> Clock:
        """Summary of at least one time."""
        ranked = sorted(times)
        return Clock(statistics.median(ranked), ranked[len(ranked) // 10], ranked[(9 * len(ranked)) // 10])


@dataclass(frozen=True)
class Ceilings:
    """What the machine does in this run: bytes a second of a large scaled copy (read plus written), fp32 operations a
    second of a large product (TF32 off).
    """

    bytes_s: float
    flops_s: float


@dataclass(frozen=True)
class Work:
    """The least that a call must move (each input read once, each output written once) and compute."""

    bytes: int
    flops: int

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The larger of the two times."""
        return 1e3 * max(self.bytes / ceilings.bytes_s, self.flops / ceilings.flops_s)


def on_gpu(device: str) -> bool:
    """Whether a device name is a CUDA device."""
    return torch.device(device).type == "cuda"


def measure_ceilings(device: str, size: int | None = None) -> Ceilings:
    """Measure both. size: elements of the copy, root of the elements of the product's matrices times 2048."""
    gpu = on_gpu(device)
    count = size or (1 << 28 if gpu else 1 << 23)
    x, y = torch.ones(count, device=device), torch.empty(count, device=device)
    copy = _median_s(lambda: torch.mul(x, 1.5, out=y), device)
    side = max(64, count >> (16 if gpu else 14))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    a = torch.randn(side, side, device=device)
    product = _median_s(lambda: a @ a, device)
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return Ceilings(8 * count / copy, 2 * side**3 / product)


def _median_s(work: Callable[[], object], device: str, repeat: int = 5) -> float:
    work()
    return statistics.median(_seconds(work, device) for _ in range(repeat))


def _seconds(work: Callable[[], object], device: str) -> float:
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: str) -> None:
    if on_gpu(device):
        torch.cuda.synchronize()


def mode_of(backend: Any, device: str) -> str:
    """How calls are timed: "graph" on a GPU for a backend that declares graph_safe, else "eager"."""
    return "graph" if on_gpu(device) and backend.contract.graph_safe else "eager"


class Timed:
    """Gated DeltaNet of one backend on one case: calls of all layers, as eager calls or as graph replays.

    Nothing is rewound, so that there is no second copy of pools or workspace: a bank may fill most of a card.
    """

    def __init__(self, backend: Any, case: Case, device: str) -> None:
        self.backend, self.case, self.device, self.mode = backend, case, device, mode_of(backend, device)
        self.layers = list(range(case.dims.layers))
        self.longest = [t.path(max(t.leaves, key=lambda r: int(t.depth[r]))) for t in case.trees]
        self.width = max(map(len, self.longest))
        limits = Limits(case.batch.requests, case.batch.rows, self.width, case.slots, case.dims.layers)
        self.ws = self._call("allocate", case.dims, limits, case.device)
        shape = (case.batch.rows, case.dims.hv, case.dims.dv)
        self.out = [case.arena.empty(f"out.gdn[{n}]", shape, torch.bfloat16) for n in self.layers]

    def _call(self, method: str, *args: Any) -> Any:
        return call(self.backend, method, self.case.spec.id, *args)

    def verify(self) -> None:
        """Verify every layer."""
        pool = self.case.pools.recurrent
        for layer in self.layers:
            self._call("gdn_verify", self.case.gdn[layer], pool, self.case.batch, self.ws, self.out[layer], layer)

    def publisher(self, rows: int) -> Callable[[], None]:
        """A call that publishes the first `rows` rows of every request's deepest path, in all layers."""
        paths = self.case.in_batch_order([p[:rows] for p in self.longest])
        accepted = accepted_paths(paths, self.case.device, self.width)
        pool = self.case.pools.recurrent
        return lambda: self._call("gdn_publish", pool, self.case.batch, accepted, self.ws, self.layers)

    def pass_s(self) -> float:
        """Seconds of one eager verify and publish of the deepest paths, the second of two."""
        publish = self.publisher(self.width)

        def both() -> None:
            self.verify()
            publish()

        both()
        return _seconds(both, self.device)

    def clocks(self, rows: int, repeat: int) -> tuple[Clock, Clock]:
        """Times of verify and of publish, alternating as they do in decoding, so that a deferred update is in one."""
        verify: Callable[[], object] = self.verify
        publish: Callable[[], object] = self.publisher(rows)
        verify(), publish()
        if self.mode == "graph":
            verify, publish = _captured(verify), _captured(publish)
        times: tuple[list[float], list[float]] = ([], [])
        warmups = min(_WARMUPS, repeat)
        for turn in range(warmups + repeat):
            for work, into in zip((verify, publish), times, strict=True):
                milliseconds = _milliseconds(work, self.device)
                if turn >= warmups:
                    into.append(milliseconds)
        return Clock.of(times[0]), Clock.of(times[1])

    def named_bytes(self) -> dict[str, int]:
        """Bytes of every tensor of the workspace, largest first."""
        sizes = {name: t.numel() * t.element_size() for name, t in tensors_of(self.ws).items()}
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def work(self, rows: int) -> tuple[Work, Work]:
        """Least work of verify and of a publish of `rows` rows."""
        d, live = self.case.dims, len(self.case.trees)
        active = sum(len(t.active_rows) for t in self.case.trees)
        taken = sum(len(p[:rows]) for p in self.longest)
        state, cell = d.hv * d.dv * d.dk, d.hv * d.dv * d.dk * d.layers
        row = 2 * (d.hk * d.dk + d.hv * d.dv + 2 * d.hv)  # bf16 k, v, a, b
        read = row + 2 * d.hk * d.dk + 2 * d.hv * d.dv  # and q and o
        # Multiplications and additions of one element: decay 1, R k 2, u k^T 2, R q 2.
        return (
            Work(d.layers * (4 * live * state + active * read), 7 * active * cell),
            Work(d.layers * (8 * live * state + taken * row), 5 * taken * cell),
        )


def clock(work: Callable[[], object], device: str, repeat: int, *, graph: bool) -> Clock:
    """Times of one call, made once before; graph: as replays of a captured graph, on a GPU."""
    work()
    if graph and on_gpu(device):
        work = _captured(work)
    for _ in range(min(_WARMUPS, repeat)):
        work()
    return Clock.of([_milliseconds(work, device) for _ in range(repeat)])


def _milliseconds(work: Callable[[], object], device: str) -> float:
    if not on_gpu(device):
        return 1e3 * _seconds(work, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
