"""When does replay pay? Publication by replay against a bank of states and deferred factors: bytes and steps.

A bank writes every row's state while it verifies and reads every row's parent's; its publication copies one state.
Replay keeps no states: its publication reads the state, runs the accepted rows and writes it. Deferred factors publish
nothing and pay one pass over the state, and the factors, at the next verification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from audit.bench_time import Clock
from lumotree.contract import Dims


@dataclass(frozen=True)
class Model:
    """Times are bytes over the measured copy rate, plus steps at a measured time; ms of all layers.

    Of one request in all layers, in bytes: state; row: what is recorded of a row for replay; factor: a row's k, u and
    decay in fp32. step: ms of replaying one row of one request beyond its bytes; walk_step: of one row of a bank's
    walk.
    """

    state: int
    row: int
    factor: int
    bytes_s: float
    step: float = 0.0
    walk_step: float = 0.0

    @staticmethod
    def of(dims: Dims, bytes_s: float) -> Model:
        """Bytes of a model's layers; steps cost nothing until they are fitted."""
        heads = dims.layers * dims.hv
        row = 2 * (dims.layers * dims.hk * dims.dk + heads * (dims.dv + 2))
        return Model(4 * heads * dims.dv * dims.dk, row, 4 * heads * (dims.dv + dims.dk + 1), bytes_s)

    def fitted_step(self, replay: Mapping[int, float]) -> float:
        """`step` from one request's measured publications by accepted rows: the slope between the ends, less bytes."""
        low, high = min(replay), max(replay)
        slope = (replay[high] - replay[low]) / (high - low) if high > low else 0.0
        return max(0.0, slope - self._ms(self.row))

    def fitted_walk_step(self, rows: int, walk: float) -> float:
        """`walk_step` from one request's measured walk over a tree of so many rows."""
        return max(0.0, (walk - self._ms(2 * rows * self.state)) / rows)

    def _ms(self, size: float) -> float:
        return 1e3 * size / self.bytes_s

    def replay_ms(self, rows: int, requests: int = 1) -> float:
        """Publication of `rows` accepted rows a request: the state read and written, rows read, steps."""
        return requests * (self._ms(2 * self.state + rows * self.row) + rows * self.step)

    def copy_ms(self, requests: int = 1) -> float:
        """Copy of one state a request from the bank to the pool."""
        return requests * self._ms(2 * self.state)

    def walk_ms(self, tree: int, requests: int = 1) -> float:
        """A bank's verification of trees of so many rows: each reads a state and writes one, one after the other.

        The rows of one request wait for each other, those of several requests do not: bytes add up, steps overlap.
        """
        return requests * self._ms(2 * tree * self.state) + tree * self.walk_step

    def bank_ms(self, tree: int, requests: int = 1) -> float:
        """What the bank adds to the verification of trees of so many rows: each writes a state, all but the root read
        one from the bank instead of from the chip.
        """
        return requests * self._ms((2 * tree - 1) * self.state)

    def deferred_ms(self, rows: int, requests: int = 1) -> float:
        """What deferred factors add to the next verification, fused with it: the state written, factors written and
        read.
        """
        return requests * self._ms(self.state + 2 * rows * self.factor)

    def break_even(self, replay_ms: float, requests: int = 1) -> int:
        """Rows of the smallest tree for which a replay that takes `replay_ms` costs no more than the bank."""
        excess = replay_ms - self.copy_ms(requests)
        return max(1, math.ceil((excess / (requests * self._ms(self.state)) + 1) / 2))


@dataclass(frozen=True)
class Point:
    """One measurement. what: "publish", "verify" or "update" (a deferred one); rows: active rows of the tree; depth: of
    its deepest path, in rows; accepted: rows published; clock: ms of all layers and requests; modelled: ms, None where
    the model says nothing.
    """

    policy: str
    backend: str
    what: str
    tree: str
    rows: int
    depth: int
    batch: int
    accepted: int
    clock: Clock
    modelled: float | None = None

    @property
    def error(self) -> float | None:
        """How far the model is above (positive) or below the measurement, as a share of the measurement."""
        return None if self.modelled is None else self.modelled / self.clock.median - 1


@dataclass(frozen=True)
class Match:
    """A published state beside the backend's own chain: whether the bits are equal, and the relative L2 distance."""

    bitwise: bool
    distance: float


@dataclass(frozen=True)
class Measured:
    """A run's outcome. matches: by backend; refused: by backend and scene, why there is no time; model: by replaying
    backend.
    """

    points: tuple[Point, ...]
    matches: dict[str, Match]
    refused: dict[str, str]
    models: dict[str, Model]


def table(model: Model, replay: Mapping[int, float], trees: Sequence[int], requests: int = 1) -> list[str]:
    """Markdown: publication by policy, the bank's extra by tree, and the break-even tree, by accepted rows.

    replay: measured publication by accepted rows.
    """
    head = ["accepted rows", "replay", "bank copy", "deferred, later", *(f"bank, verify +, {t} rows" for t in trees)]
    lines = ["| " + " | ".join([*head, "replay pays from"]) + " |", "|" + " --- |" * (len(head) + 1)]
    for n, measured in sorted(replay.items()):
        cells = [measured, model.copy_ms(requests), model.deferred_ms(n, requests)]
        cells += [model.bank_ms(t, requests) for t in trees]
        pays = max(model.break_even(measured, requests), n)
        lines.append("| " + " | ".join([str(n), *(f"{c:.4g}" for c in cells), f"{pays} rows"]) + " |")
    return lines
