"""Makes a failing program smaller where Hypothesis stops: steps out, requests out, rows off the trees, shorter pasts.

Hypothesis shrinks what was drawn, and a draw decides at once which step is made and in which world; the program itself
is plain data that can lose any part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from audit.fuzz_program import Program, Step
from audit.world import World
from lumotree.errors import InputError


def shrunk(program: Program, make: Callable[[], Any], tries: int = 400) -> Program:
    """The smallest program that was found to fail on the same surface, with its own failure; at most `tries` runs."""
    best, left = program, tries
    improved = True
    while improved and left > 0:
        improved = False
        for candidate in smaller(best):
            left -= 1
            failed = _failing(candidate, make, program.surface)
            if failed is not None:
                best, improved = failed, True
                break
            if left <= 0:
                break
    return best


def _failing(program: Program, make: Callable[[], Any], surface: str) -> Program | None:
    """The program with its failure, if it is a legal one that fails on this surface."""
    try:
        wrong = program.run(make(), make())
    except (InputError, KeyError):  # a step that lost what it rests on
        return None
    if wrong is None or wrong.surface != surface:
        return None
    return Program(program.world, program.steps, str(wrong), wrong.surface)


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest cuts first."""
    steps = program.steps
    for at in reversed(range(len(steps))):
        yield Program(program.world, steps[:at] + steps[at + 1 :])
    for at in reversed(range(len(steps) - 1)):  # a verification and what settles it
        yield Program(program.world, steps[:at] + steps[at + 2 :])
    for at, step in enumerate(steps):
        for less in _less(step):
            yield Program(program.world, [*steps[:at], less, *steps[at + 1 :]])
    world, plain = program.world, World()
    for change in (
        {"dims": replace(world.dims, layers=1)},
        {"page_size": plain.page_size},
        {"fresh": False},
        {"slots": plain.slots},
        {"seed": 0},
        {"rows": plain.rows},
    ):
        other = replace(world, **change)  # type: ignore[arg-type]
        if other != world:
            yield Program(other, steps)


def _less(step: Step) -> Iterator[Step]:
    """The step with a smaller argument."""
    name, args, kwargs = step
    for word in kwargs:
        yield name, args, {k: v for k, v in kwargs.items() if k != word}
    if name in ("admit", "prefill", "churn"):
        least = 0 if name == "admit" else 1
        for count in range(least, args[1]):
            yield name, (args[0], count), kwargs
    if name == "step":
        for key in args[0] if len(args[0]) > 1 else ():
            yield name, ([k for k in args[0] if k != key],), kwargs
    if name == "verify":
        yield from ((name, (trees,), _trimmed(kwargs, trees)) for trees in _trees(args[0]))
    if name == "accept":
        for key, end in args[0].items():
            yield name, ({k: e for k, e in args[0].items() if k != key},), kwargs
            for row in [r for r in (None, 0) if end != r and (end is not None)]:
                yield name, ({**args[0], key: row},), kwargs
            if end:
                yield name, ({**args[0], key: end - 1},), kwargs


def _trees(trees: dict[int, list[int]]) -> Iterator[dict[int, list[int]]]:
    """A request less, or a leaf less; rows behind it move up."""
    for key, parents in trees.items():
        if len(trees) > 1:
            yield {k: p for k, p in trees.items() if k != key}
        for row in range(len(parents) - 1, 0, -1):
            if row not in parents:
                kept = [p - (p > row) for at, p in enumerate(parents) if at != row]
                yield {**trees, key: kept}


def _trimmed(kwargs: dict[str, Any], trees: dict[int, list[int]]) -> dict[str, Any]:
    """Options that fit the trees that are left."""
    off = {k: [r for r in rows if r < len(trees[k])] for k, rows in kwargs.get("inactive", {}).items() if k in trees}
    new = {k: v for k, v in kwargs.items() if k != "inactive"}
    if "padding" in new:
        new["padding"] = min(new["padding"], len(trees))
    return {**new, "inactive": off} if any(off.values()) else new
