"""Scripts from live decoding: the engine proposes and selects; where the plan forces an end, that end is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from audit.continuation_draft import HarvestDrafter
from audit.continuation_plan import CYCLES, KINDS, LIVE, Forced, Script, planned_ends
from lumotree.cycle import Decoder
from lumotree.cycle_types import SavedRequest, Stack
from lumotree.decide import Decision, first_best
from lumotree.requests import Request
from lumotree.slots import Capacity
from lumotree.tree import Tree
from lumotree.tree_named import chain, hydra27

#: Prompt tokens fed in one cycle, by kind: the resumed schedule shares what the repeat has stored.
CHUNKS = {"cold": 32, "repeat": 32, "resumed": 7, "mixed": 5, "control": 32, "calibration": 32}
#: The mixed schedule: zero drafts, chains, small trees, and trees of which the root alone is accepted, twice in a row.
MIXED = ("hydra27", "root", "hydra27", "hydra27", "root", "chain:4", "comb:3", "root", "hydra27")
MIXED_ENDS = (LIVE, 0, 0, 0, 0, 2, LIVE, 0, 12)
MIXED_REQUESTS = 4
#: Schedules on which controls run: accepted paths of several lengths, then the root alone, which reads what is left.
CONTROL_ENDS = ((14, 7, 0), (12, 28, 0))
#: Kinds of script that the batch plays: the mixed ones, and the controls' to follow in slots that are used again.
BATCH_SCRIPTS = ("mixed", "control")
#: No cycle commits more.
DEEPEST = 16


@dataclass(frozen=True)
class Course:
    """What a schedule is to do: shapes and ends of its cycles."""

    name: str
    number: int
    kind: str
    prompt: tuple[int, ...]
    shapes: tuple[str, ...]
    ends: tuple[int, ...]


def courses(prompts: Sequence[tuple[int, ...]], seed: int) -> list[Course]:
    """All schedules over the prompts (PREFIXES of them): 18 of `hydra27`, and the mixed ones."""
    found: list[Course] = []
    for kind in KINDS:
        for p, planned in enumerate(planned_ends(kind, seed)):
            shapes = ("hydra27",) * CYCLES
            found.append(Course(f"{kind}/p{p}", len(found), kind, tuple(prompts[p]), shapes, tuple(planned)))
    for p in range(MIXED_REQUESTS):
        turn = p % len(MIXED)
        shapes, forced = MIXED[turn:] + MIXED[:turn], MIXED_ENDS[turn:] + MIXED_ENDS[:turn]
        found.append(Course(f"mixed/p{p}", len(found), "mixed", tuple(prompts[p]), shapes, forced))
    for p, ends in enumerate(CONTROL_ENDS):
        found.append(Course(f"control/p{p}", len(found), "control", tuple(prompts[p]), ("hydra27",) * 3, ends))
    return found


def shape_of(name: str) -> Tree:
    """The topology of a cycle."""
    from lumotree.tree_named import named

    return hydra27() if name == "hydra27" else chain(1) if name == "root" else named(name)


def harvest(stack: Stack, plan: Sequence[Course], texts: Sequence[Sequence[int]]) -> list[Script]:
    """Decode every course greedily and return what happened. texts: see HarvestDrafter. Raises as a decoder does."""
    fed: dict[tuple[int, ...], SavedRequest] = {}
    return [_one(stack, course, texts, fed) for course in plan]


def _one(
    stack: Stack, course: Course, texts: Sequence[Sequence[int]], fed: dict[tuple[int, ...], SavedRequest]
) -> Script:
    # The first token comes with the prompt's own cycle, so decoding cycles are numbered from 1.
    drafter = HarvestDrafter(
        texts, lambda cycle: shape_of(course.shapes[cycle - 1]), stack.model.vocab, head=stack.head is not None
    )
    longest = len(course.prompt) + DEEPEST * len(course.shapes)
    decoder = Decoder(stack, Capacity(slots=1, context=longest))
    request = Request(course.number, course.prompt, longest - len(course.prompt) + 1, drafter=drafter)
    if course.prompt in fed:
        decoder.restore(replace(fed[course.prompt], request=request))
    else:
        decoder.admit(request)
        while decoder.running[course.number].prefilling:
            decoder.cycle()
        fed[course.prompt] = decoder.save(course.number)
    cycles = []
    for end in course.ends:
        turns = decoder.propose()
        verified = decoder.verify(turns)
        tree, live = turns[0].tree, decoder.select(verified)[0]
        best = first_best(verified.forward.logits)
        path = live.path if end == LIVE else tree.path(end)
        pending = best[path[-1]]
        if course.kind == "control" and pending == int(tree.tokens[0]):
            # A stale root token would go unseen if the fresh one were the same.
            pending = int(torch.topk(verified.forward.logits[path[-1]], 2).indices[1])
        decoder.publish(verified, [Decision(path, pending)])
        cycles.append(Forced(Tree.make(tree.parents, tokens=tree.tokens, active=tree.active), path, live.path[-1]))
    pending = decoder.running[course.number].tokens[-1]
    return Script(course.name, course.number, course.kind, course.prompt, CHUNKS[course.kind], tuple(cycles), pending)
