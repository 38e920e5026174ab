"""How far correct native decoders are apart on calibration prefixes: the floor of the calibrated rule.

Native decoding of one backend has no spread here, by construction. The spread that a kernel may claim as its excuse is
that of correct one-token steps which sum in another order under the same declared contract: the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from audit.continuation_distance import compare
from audit.continuation_harvest import Course, harvest
from audit.continuation_native import Packing, Trace, native_trace
from audit.continuation_plan import CYCLES, Script
from audit.continuation_rules import Calibrated, calibrated, unit
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.cycle_types import Stack
from lumotree.tree_named import hydra27

#: Correct natives under a contract; the reference reduces in another order than the path-parallel verifiers.
PEERS: tuple[Callable[[Contract], object], ...] = (ReferenceBackend, TorchBackend)


@dataclass(frozen=True)
class Spread:
    """One unit a calibration prefix: surface -> largest distance of a peer from the candidate's own native chain."""

    units: tuple[dict[str, float], ...]

    def rule(self) -> Calibrated:
        """The envelope of these units."""
        return calibrated(self.units)


def calibration_courses(prompts: Sequence[tuple[int, ...]], seed: int) -> list[Course]:
    """One schedule a prefix, of as many cycles as a held-out one: drawn ends, the root alone at the end."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 59]))
    rows = hydra27().active_rows
    return [
        Course(f"calibration/p{p}", p, "calibration", tuple(prompt), ("hydra27",) * CYCLES,
               (*rng.choice(rows, CYCLES - 1).tolist(), 0))
        for p, prompt in enumerate(prompts)
    ]  # fmt: skip


def measure_spread(stack: Stack, prompts: Sequence[tuple[int, ...]], seed: int) -> Spread:
    """Decode calibration prefixes with the candidate's own native steps and with each peer's."""
    plan = calibration_courses(prompts, seed)
    scripts = harvest(stack, plan, [c.prompt for c in plan])
    own = native_trace(stack, scripts, Packing())
    contract = replace(stack.backend.contract, claims="bitwise", algebra=(), graph_safe=False)
    traces = [native_trace(replace(stack, backend=peer(contract)), scripts, Packing()) for peer in PEERS]
    return Spread(tuple(_unit(script, own, traces) for script in scripts))


def _unit(script: Script, own: Trace, traces: Sequence[Trace]) -> dict[str, float]:
    bounds = script.bounds
    pairs = [
        compare(trace[script.name][i], own[script.name][i], bounds[i - 1]).apart
        for trace in traces
        for i in range(1, len(bounds))
    ]
    return unit(pairs)
