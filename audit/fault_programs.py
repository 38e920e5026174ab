"""Fixed programs of several cycles, for the detection matrix: what a fault between cycles needs, at the least cost.

`lumotree-audit fuzz` draws programs like these at random; here the same few are run under every fault.
"""

from __future__ import annotations

from typing import Any

from audit.fuzz_judge import MismatchError
from audit.fuzz_program import Program, Step
from audit.world import World

_COMB = [-1, 0, 0, 2, 2, 4]


def _cycle(trees: dict[int, list[int]], ends: dict[int, int]) -> list[Step]:
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
}


def run_program(name: str, backend: Any, reference: Any, seed: int) -> MismatchError | None:
    """Run a program; what went wrong, or None. reference: another instance of the same backend. Raises InputError where
    the backend's contract does not take the program's trees."""
    return Program(World(seed=seed, slots=6), PROGRAMS[name]).run(backend, reference)
