"""Fixed programs of several cycles, for the detection matrix: what a fault between cycles needs, at the least cost.

`lumotree-audit fuzz` draws programs like these at random; here the same few are run under every fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from audit.fuzz_judge import MismatchError
from audit.fuzz_program import Program, Step
from audit.world import DIMS_NANO, World

_COMB = [-1, 0, 0, 2, 2, 4]

#: A spine first, its side branches behind it: they start from rows long past, when every later state is there.
_SPINE_FIRST = [-1, 0, 1, 2, 0, 1, 2, 3, 0]


def _cycle(trees: dict[int, list[int]], ends: dict[int, int | None]) -> list[Step]:
    return [("verify", (trees,), {}), ("accept", (ends,), {})]


#: Name -> steps.
PROGRAMS: dict[str, list[Step]] = {
    "plain_between": [
        ("admit", (0, 4), {}),
        *_cycle({0: _COMB}, {0: 4}),
        ("step", ([0],), {}),
        *_cycle({0: [-1, 0, 1, 1, 0]}, {0: 3}),
        ("step", ([0],), {}),
        ("step", ([0],), {}),
        *_cycle({0: [-1, 0, 0]}, {0: 0}),
        *_cycle({0: [-1, 0]}, {0: 1}),
    ],
    "slots_again": [
        ("admit", (0, 3), {}),
        ("admit", (1, 5), {}),
        ("admit", (2, 0), {}),
        *_cycle({0: _COMB, 1: [-1, 0, 1], 2: [-1, 0, 0]}, {0: 4, 1: 1, 2: 2}),
        ("permute", (0, 1, 2), {}),
        *_cycle({2: [-1, 0, 0], 0: [-1, 0, 1], 1: [-1, 0]}, {0: 1, 1: 1, 2: 0}),
        ("finish", (1,), {}),
        ("admit", (3, 0), {}),
        *_cycle({3: [-1, 0, 1, 1], 0: [-1, 0]}, {3: 3, 0: 0}),
        ("step", ([0, 2, 3],), {}),
    ],
    "rolled_back": [
        ("admit", (0, 5), {}),
        *_cycle({0: _COMB}, {0: 2}),
        ("save", (), {}),
        *_cycle({0: [-1, 0, 1]}, {0: 2}),
        ("step", ([0],), {}),
        ("restore", (), {}),
        ("verify", ({0: [-1, 0, 0, 1]},), {}),
        ("rollback", (), {}),
        *_cycle({0: [-1, 0, 0, 2, 2]}, {0: 4}),
        ("step", ([0],), {}),
    ],
    "five_and_idle": [
        *[("admit", (key, tokens), {}) for key, tokens in enumerate((3, 5, 0, 2, 4))],
        ("verify", ({0: _SPINE_FIRST, 1: [-1, 0, 0, 1], 2: [-1, 0, 0], 3: [-1, 0], 4: [-1, 0, 0, 1]},),
         {"inactive": {1: [2]}, "padding": 0}),
        ("accept", ({0: 8, 1: None, 2: 2, 3: 1, 4: 3},), {}),
        *_cycle({4: [-1, 0], 1: [-1, 0, 1], 0: [-1], 3: [-1, 0, 0], 2: [-1, 0]}, {4: None, 1: 2, 3: 2, 2: 1}),
        *_cycle({0: [-1, 0], 1: [-1, 0], 4: [-1, 0, 0]}, {0: 1, 4: 2}),
        ("step", ([0, 1, 4],), {}),
    ],
    # What a deferred policy was told about layers shows at its next verification, not in the pools.
    "layer_by_layer": [
        ("admit", (0, 4), {}),
        ("admit", (1, 2), {}),
        ("verify", ({0: _COMB, 1: [-1, 0, 1]},), {}),
        ("accept", ({0: 4, 1: 2},), {"apart": True}),
        *_cycle({1: [-1, 0], 0: [-1, 0, 0]}, {0: 2, 1: 1}),
    ],
}  # fmt: skip

#: Programs whose world has more than one layer, and how many.
_LAYERS = {"layer_by_layer": 2}


def run_program(name: str, backend: Any, reference: Any, seed: int) -> MismatchError | None:
    """Run a program; what went wrong, or None. reference: another instance of the same backend. Raises InputError where
    the backend's contract does not take the program's trees."""
    steps = PROGRAMS[name] if backend.contract.empty_path else [_rooted(step) for step in PROGRAMS[name]]
    world = World(replace(DIMS_NANO, layers=_LAYERS.get(name, 1)), seed, slots=6, requests=6, rows=24)
    return Program(world, steps).run(backend, reference)


def _rooted(step: Step) -> Step:
    """A step in which every empty path is the root alone."""
    name, args, kwargs = step
    return (name, ({key: end or 0 for key, end in args[0].items()},), kwargs) if name == "accept" else step
