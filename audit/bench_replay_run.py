"""`lumotree-audit bench --replay`: publication by replay, bank and deferred factors, measured and modelled in one run.

Every published state is compared with the backend's own one-token chain before anything is timed: a backend that claims
to be bitwise and is not gets no time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit.bench_replay import Match, Measured, Model, Point
from audit.bench_scene import Scene
from audit.bench_time import clock, measure_ceilings, on_gpu
from audit.environment import environment
from audit.families import SHAPES
from audit.processes import one_thread
from audit.render import check_writable
from audit.render.progress import Progress
from audit.render.replay import print_points, write_points
from audit.suite import check_device
from lumotree.backends.batch import build_batch
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SHARED_OPERANDS, Accepted, GdnOps, StepOps, StepOut
from lumotree.contract import Dims
from lumotree.errors import InputError
from lumotree.state import Pools
from lumotree.tree import Tree


@dataclass(frozen=True)
class Setup:
    """What is measured where. tree: whose deepest path is published, at all batches and lengths; trees: verified by the
    bank and by what replays, one request.
    """

    dims: Dims
    replay: tuple[str, ...]
    bank: str
    deferred: tuple[str, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    tree: str
    trees: tuple[str, ...]


def setup(device: str, shape: str | None, layers: int | None) -> Setup:
    """27B and all kernels on a GPU; elsewhere the CPU backends at a tiny shape. Raises InputError for another shape."""
    gpu = on_gpu(device)
    chosen = shape or ("27B" if gpu else "tiny")
    if chosen not in SHAPES:
        raise InputError(f"--shape: expected one of {', '.join(SHAPES)}, got {chosen!r}")
    dims = replace(SHAPES[chosen].dims, layers=layers or (48 if gpu else 2))
    if not gpu:
        small = ("chain:4", "chain:8", "hydra27", "star:4", "star:8")
        return Setup(dims, ("torch",), "bank", ("specla",), (1, 2), (1, 2, 4, 8, 12), "hydra27", small)
    sizes = (8, 32, 64, 128)
    trees = (*(f"chain:{n}" for n in sizes), "hydra27", *(f"star:{n}" for n in sizes))
    return Setup(
        dims, ("cuda", "triton"), "bank_walk", ("specla",), (1, 4, 16), (1, 2, 4, 8, 12), "hydra27", trees
    )  # fmt: skip


def run_replay(
    device: str, shape: str | None = None, layers: int | None = None, repeat: int = 20, report: str | None = None,
    command: str = "lumotree-audit bench --replay",
) -> int:  # fmt: skip
    """Measure, model, print, write replay.json, .md and .svg. Returns 0; raises InputError for bad input."""
    check_device(device)
    chosen = setup(device, shape, layers)
    if report:
        check_writable(report)
    with nullcontext() if on_gpu(device) else one_thread():
        ceilings = measure_ceilings(device)
        measured = measure(chosen, device, ceilings.bytes_s, repeat)
    facts = {**environment(), "command": command, "device": device, **asdict(ceilings), "setup": asdict(chosen)}
    print_points(measured, facts)
    if report:
        write_points(Path(report), measured, facts)
    return 0


def measure(chosen: Setup, device: str, bytes_s: float, repeat: int) -> Measured:
    """Every point of a setup, with what the model says of it."""
    points: list[Point] = []
    matches: dict[str, Match] = {}
    refused: dict[str, str] = {}
    scenes = [(chosen.tree, n) for n in chosen.batches] + [(t, 1) for t in chosen.trees if t != chosen.tree]
    names = (*chosen.replay, chosen.bank, *chosen.deferred)
    timed: _Timed | None
    with Progress(len(scenes), "replay") as progress:
        for tree, requests in scenes:
            scene = Scene(chosen.dims, tree, requests, torch.device(device))
            for name in names:
                if name in refused or (name in chosen.deferred and tree != chosen.tree):
                    continue
                try:
                    timed = _Timed(load_backend(name), scene, device, repeat, _policy(name, chosen))
                    if name not in matches:
                        matches[name] = timed.match()
                        if why := _mismatch(timed.backend, matches[name]):
                            refused[name] = why
                            continue
                    points += timed.points(chosen.lengths if tree == chosen.tree else ())
                except InputError as refusal:
                    refused[f"{name}, {tree}, batch {requests}" if name in matches else name] = str(refusal)
                finally:
                    timed = None  # its buffers are the next backend's
                    _release(device)
            progress.advance(note=f"{tree}, batch {requests}")
    models = _models(chosen, points, bytes_s)
    return Measured(tuple(replace(p, modelled=_says(models, p)) for p in points), matches, refused, models)


def _policy(name: str, chosen: Setup) -> str:
    return "bank" if name == chosen.bank else "deferred" if name in chosen.deferred else "replay"


def _mismatch(backend: Any, match: Match) -> str:
    """Why a backend gets no time; empty when it gets one."""
    bitwise = backend.contract.claim("gdn") == "bitwise"
    if match.bitwise or (not bitwise and match.distance < 1):
        return ""
    claim = "equal to" if bitwise else "near"
    return f"expected a published state {claim} the backend's own chain, got a relative L2 of {match.distance:.3g}"


def _release(device: str) -> None:
    if on_gpu(device):
        gc.collect()
        torch.cuda.empty_cache()


def _models(chosen: Setup, points: Sequence[Point], bytes_s: float) -> dict[str, Model]:
    """One model a replaying backend, its step fitted to one request, the walk's step to the smallest chain."""
    base = Model.of(chosen.dims, bytes_s)
    chains = [p for p in points if p.policy == "bank" and p.what == "verify" and p.rows == p.depth]
    if chains:
        least = min(chains, key=lambda p: p.rows)
        base = replace(base, walk_step=base.fitted_walk_step(least.rows, least.clock.median))
    found = {}
    for name in chosen.replay:
        one = {p.accepted: p.clock.median for p in points if (p.backend, p.what, p.batch) == (name, "publish", 1)}
        if one:
            found[name] = replace(base, step=base.fitted_step(one))
    return found or {"": base}


def _says(models: dict[str, Model], p: Point) -> float | None:
    base = next(iter(models.values()))
    match p.policy, p.what:
        case "replay", "publish":
            return models[p.backend].replay_ms(p.accepted, p.batch)
        case "bank", "publish":
            return base.copy_ms(p.batch)
        case "bank", "verify":
            return base.walk_ms(p.rows, p.batch)
        case "deferred", "update":
            return base.deferred_ms(p.accepted, p.batch)
    return None


class _Timed:
    """One backend on one scene: its pool and workspace, its match with its own chain, its times."""

    def __init__(self, backend: Any, scene: Scene, device: str, repeat: int, policy: str) -> None:
        self.backend, self.scene, self.device, self.policy = backend, scene, device, policy
        # Torch code takes long enough for a median of fewer.
        self.repeat = max(1, repeat // 4) if policy == "deferred" else repeat
        self.layers = range(scene.dims.layers)
        self.graph = backend.contract.graph_safe
        self.ws = backend.allocate(scene.dims, scene.limits, scene.device)
        self.pool = scene.recurrent(backend.contract)
        d = scene.dims
        self.out = torch.zeros((scene.batch.rows, d.hv, d.dv), dtype=torch.bfloat16, device=scene.device)

    def verify(self) -> None:
        """Every layer, one after the other into the same output."""
        for layer, ops in enumerate(self.scene.gdn):
            self.backend.gdn_verify(ops, self.pool, self.scene.batch, self.ws, self.out, layer)

    def publish(self, accepted: Accepted) -> None:
        """All layers."""
        self.backend.gdn_publish(self.pool, self.scene.batch, accepted, self.ws, self.layers)

    def flush(self) -> None:
        """What a deferred policy left to do."""
        for layer in self.layers:
            self.backend.flush(self.pool, self.ws, layer)

    def match(self) -> Match:
        """The state after the whole deepest path against one-token steps over it, all layers and requests."""
        self.verify()
        self.publish(self.scene.accepted(len(self.scene.longest)))
        if self.policy == "deferred":
            self.flush()
        want = self._chain()
        live = self.scene.batch.state_slot.long()
        got, want = self.pool[:, live].float(), want[:, live].float()
        self.pool.copy_(self.scene.recurrent(self.backend.contract))
        distance = float((got - want).norm() / want.norm())
        return Match(torch.equal(got.view(torch.int32), want.view(torch.int32)), distance)

    def _chain(self) -> Tensor:
        """A pool after the backend's own one-token steps over the deepest path."""
        scene = self.scene
        pool = scene.recurrent(self.backend.contract)
        pools = Pools(pool, scene.histories(), scene.cache(1))
        trees = [Tree.make([-1], slots=[i], prefix_len=0) for i in range(scene.requests)]
        batch = build_batch(
            trees, state_slots=scene.batch.state_slot.tolist(), page_table=scene.batch.page_table.cpu(),
            page_size=scene.batch.page_size, device=scene.device,
        )  # fmt: skip
        out = StepOut(gdn=self.out[: scene.requests])
        for row in scene.longest:
            at = torch.arange(scene.requests, device=scene.device) * scene.shape.n + row
            for layer, ops in enumerate(scene.gdn):
                parts = {n: x if n in SHARED_OPERANDS else x[at].contiguous() for n, x in vars(ops).items()}
                self.backend.native_step(StepOps(gdn=GdnOps(**parts)), pools, batch, out, layer)
        return pool

    def points(self, lengths: Sequence[int]) -> Iterator[Point]:
        """Verification, except of deferred policies, whose torch code says nothing of the policy; then publication."""
        if self.policy == "deferred":
            self.verify()
        else:
            yield self._point("verify", 0, self.verify)
        for rows in lengths:
            if self.policy == "deferred":
                yield from self._deferred(rows)
            else:
                yield self._point("publish", rows, partial(self.publish, self.scene.accepted(rows)))

    def _deferred(self, rows: int) -> Iterator[Point]:
        """Marking the path, eagerly as it is written, and the update of the next verification, as a graph."""
        accepted, due = self.scene.accepted(rows), self.ws["due"]

        def mark() -> None:
            due.clear()
            self.publish(accepted)

        def update() -> None:
            due.update(kept)
            self.flush()

        yield self._point("publish", rows, mark, graph=False)
        kept = dict(due)
        yield self._point("update", rows, update, graph=True)
        due.clear()

    def _point(self, what: str, accepted: int, work: Callable[[], object], graph: bool | None = None) -> Point:
        tree, scene = self.scene.shape, self.scene
        times = clock(work, self.device, self.repeat, graph=self.graph if graph is None else graph)
        return Point(
            self.policy, self.backend.name, what, scene.tree, len(tree.active_rows), len(scene.longest),
            scene.requests, accepted, times,
        )  # fmt: skip
