"""Programs drawn by Hypothesis: a rule-based state machine whose rules are the driver's steps.

Small integers are drawn and read modulo what is there: few draws make a step, and shrinking goes to few requests,
chains and first rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from audit.fuzz_driver import Driver
from audit.fuzz_judge import MismatchError
from audit.fuzz_program import Program, make
from audit.world import World
from faults import Faulty
from lumotree.contract import Contract, Dims

#: Most requests that live at a time, and most rows of a tree behind its root.
LIVE, BRANCHES = 3, 5

_BIT = st.integers(0, 1)
_PICK = st.integers(0, LIVE - 1)
#: A tree's rows behind its root, see `shape_of`: every draw costs about as much as a call of a kernel.
_SHAPE = st.tuples(st.integers(0, 6 * 5**2 - 1), st.integers(0, 5**3 - 1))
#: Shapes of up to three requests, and whether all get as many rows as the first.
_SHAPES = st.tuples(_SHAPE, _SHAPE, _SHAPE, st.booleans())
_ENDS = st.tuples(*[st.integers(0, 7)] * LIVE)
#: Which requests: one of them at the simplest, most often several.
_MASK = st.sampled_from([1, 7, 3, 7, 5, 6, 7, 2])
#: 0: no padding request; else one at place n - 1.
_PADDING = st.sampled_from([0, 0, 1, 2, 3])
#: Fills up a shape that is to have as many rows as another one.
_FILL = [2, 0, 1, 3, 0]
_OVERLAP = st.sampled_from(["inplace", "shuffled"])


@dataclass
class Ledger:
    """What a run of machines has done. failed: the last program that failed, after shrinking the smallest."""

    programs: int = 0
    steps: int = 0
    failed: Program | None = None
    first_failure: int | None = None
    changed: bool = False
    by: Counter[str] = field(default_factory=Counter)

    @property
    def compared(self) -> int:
        """Comparisons, of all surfaces."""
        return self.by.total()


def shape_of(drawn: tuple[int, int]) -> list[int]:
    """Up to five entries 0..4 of a shape: how many and the first two are one number, the other three another."""
    count, two = divmod(drawn[0], 25)
    return [two // 5, two % 5, drawn[1] // 25, drawn[1] // 5 % 5, drawn[1] % 5][:count]


def tree_of(shape: Sequence[int], room: int) -> tuple[list[int], list[int]]:
    """Parents and inactive rows of a drawn shape, cut to `room` rows: entry s hangs a row s + 1 rows back from its own,
    4 an inactive row below the row before."""
    parents, inactive = [-1], []
    for back in list(shape)[: room - 1]:
        row = len(parents)
        parent = row - 1 if back == 4 else max(row - 1 - back, 0)
        if back == 4 or parent in inactive:
            inactive.append(row)
        parents.append(parent)
    return parents, inactive


class Programs(RuleBasedStateMachine):
    """One program. Subclassed by `machine`, which says of which backend."""

    make_backend: ClassVar[Callable[[], Any]]
    dims: ClassVar[Dims]
    ledger: ClassVar[Ledger]

    def __init__(self) -> None:
        super().__init__()
        self.ledger.programs += 1
        with torch.inference_mode():  # as every step, so that what a backend keeps is of one kind
            self.backend = type(self).make_backend()
        self.contract: Contract = self.backend.contract
        self.next_key = 0

    @initialize(
        seed=st.integers(0, 2**16 - 1),
        page_size=st.sampled_from([2, 1, 4, 3]),  # of hybrid models, pages are seldom powers of two
        layers=st.sampled_from([*[1] * 8, 2, 3, 5]),
        slots=st.sampled_from([5, 5, 5, 12]),
        long=st.sampled_from([False] * 9 + [True]),
        fresh=st.sampled_from([False, False, False, True]),
        count=st.sampled_from([1, 3, 2, 3]),
        tokens=st.tuples(*[st.integers(0, 4)] * LIVE),
    )
    def start(
        self,
        seed: int,
        page_size: int,
        layers: int,
        slots: int,
        long: bool,
        fresh: bool,
        count: int,
        tokens: Sequence[int],
    ) -> None:
        """A world and its first requests."""
        dims = replace(self.dims, layers=layers)
        self.long = long
        world = World(dims, seed, slots, rows=LIVE * (BRANCHES + 1), page_size=page_size, fresh=fresh)
        self.program = Program(world)
        with torch.inference_mode():
            self.driver = Driver(self.backend, world, type(self).make_backend())
        for length in tokens[:count]:
            self._admit(length)

    # What is there

    @property
    def live(self) -> list[int]:
        return self.driver.keys

    def _waits(self) -> bool:
        return self.driver.pending is not None

    def _free(self) -> bool:
        return not self._waits()

    def _with_room(self, least: int = 1) -> list[int]:
        return [k for k in self.live if self.driver.room(k) >= least]

    def _chosen(self, keys: Sequence[int], mask: int, turn: int) -> list[int]:
        """Requests whose bits are set, the first if none is, in an order turned by `turn`."""
        chosen = [k for i, k in enumerate(keys) if mask >> i & 1] or list(keys[:1])
        return [chosen[(i + turn) % len(chosen)] for i in range(len(chosen))]

    def _do(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.program.steps.append((name, args, kwargs))
        self.ledger.steps += 1
        try:
            make(self.driver, name, args, kwargs)
        except MismatchError as wrong:
            self.program.failure, self.program.surface = str(wrong), wrong.surface
            self.ledger.failed = self.program
            if self.ledger.first_failure is None:
                self.ledger.first_failure = self.ledger.programs
            raise

    def _admit(self, tokens: int) -> None:
        self._do("admit", self.next_key, tokens)
        self.next_key += 1

    # Rules

    def _verify(self, mask: int, turn: int, shapes: Any, padding: int, placement: str) -> bool:
        keys = self._chosen(self._with_room(), mask, turn)
        if not keys:
            return False
        trees, inactive = {}, {}
        *drawn, alike = *map(shape_of, shapes[:-1]), shapes[-1]
        for key, shape in zip(keys, drawn, strict=False):
            shape = (shape + _FILL)[: len(drawn[0])] if alike else shape
            shape = shape if self.contract.trees else [0] * len(shape)
            room = min(self.driver.room(key), self.contract.max_rows)
            trees[key], off = tree_of(shape, room)
            if off:
                inactive[key] = off
        more: dict[str, Any] = {"inactive": inactive} if inactive else {}
        if padding:
            more["padding"] = min(padding - 1, len(keys))
        if placement != "scattered":
            more["placement"] = placement
        if turn == LIVE - 1:
            more["backwards"] = True
        self._do("verify", trees, **more)
        return True

    @precondition(lambda self: self._free() and self._with_room())
    @rule(mask=_MASK, turn=_PICK, shapes=_SHAPES, padding=_PADDING)
    def verify(self, mask: int, turn: int, shapes: Any, padding: int) -> None:
        """Verify trees of some requests."""
        self._verify(mask, turn, shapes, padding, "scattered")

    @precondition(lambda self: self._free() and self._with_room())
    @rule(mask=_MASK, turn=_PICK, shapes=_SHAPES, placement=_OVERLAP)
    def verify_in_place(self, mask: int, turn: int, shapes: Any, placement: str) -> None:
        """Verify with candidates behind the prefix, where source and destination of the KV move overlap."""
        self._verify(mask, turn, shapes, 0, placement)

    @precondition(lambda self: self._free() and self._with_room())
    @rule(mask=_MASK, turn=_PICK, shapes=_SHAPES, padding=_PADDING, ends=_ENDS)
    def cycle(self, mask: int, turn: int, shapes: Any, padding: int, ends: Any) -> None:
        """Verify and accept."""
        if self._verify(mask, turn, shapes, padding, "scattered"):
            self._accept(ends, 0)

    @precondition(lambda self: self._free() and self._with_room())
    @rule(mask=_MASK, turn=_PICK, shapes=_SHAPES, placement=_OVERLAP, ends=_ENDS, apart=_BIT)
    def cycle_in_place(self, mask: int, turn: int, shapes: Any, placement: str, ends: Any, apart: int) -> None:
        """Verify with candidates behind the prefix, and accept."""
        if self._verify(mask, turn, shapes, 0, placement):
            self._accept(ends, apart)

    @precondition(lambda self: self._waits())
    @rule(ends=_ENDS, apart=_BIT, drop=st.sampled_from([False, False, True]))
    def settle(self, ends: Any, apart: int, drop: bool) -> None:
        """Accept paths of any length, an empty one where the contract has it; or drop what was verified."""
        if drop:
            self._do("rollback")
        else:
            self._accept(ends, apart)

    def _accept(self, ends: Sequence[int], apart: int) -> None:
        pending = self.driver.pending
        assert pending is not None
        rows: dict[int, int | None] = {}
        for turn, end in zip([t for t in pending.running.turns if t], ends, strict=False):
            active = turn.tree.active_rows
            rows[turn.key] = None if end == 7 and self.contract.empty_path else active[end % len(active)]
        self._do("accept", rows, **({"apart": True} if apart else {}))

    def _steppable(self) -> list[int]:
        if self._waits() and self.driver.engine.deferred:
            return []
        busy = {t.key for t in self.driver.pending.running.turns if t} if self.driver.pending else set()
        return [k for k in self._with_room() if k not in busy]

    @precondition(lambda self: bool(self._steppable()))
    @rule(mask=_MASK, turn=_PICK, padding=_PADDING, apart=st.sampled_from([False, False, True]))
    def step(self, mask: int, turn: int, padding: int, apart: bool) -> None:
        """One token by the backend's own step."""
        keys = self._chosen(self._steppable(), mask, turn)
        more: dict[str, Any] = {"padding": min(padding - 1, len(keys))} if padding else {}
        self._do("step", keys, **more, **({"apart": True} if apart else {}))

    @precondition(lambda self: self._waits() and bool(self._steppable()))
    @rule(pick=_PICK, shape=_SHAPE, end=st.integers(0, 7))
    def aside(self, pick: int, shape: tuple[int, int], end: int) -> None:
        """Another batch on another workspace while one waits."""
        keys = self._steppable()
        key = keys[pick % len(keys)]
        backs = [min(back, 3) if self.contract.trees else 0 for back in shape_of(shape)]
        parents, off = tree_of(backs, min(self.driver.room(key), self.contract.max_rows))
        assert not off
        self._do("aside", {key: parents}, {key: end % len(parents)})

    @precondition(lambda self: self.long and self._free() and self._with_room(2) and self.contract.max_rows >= 2)
    @rule(pick=_PICK, times=st.integers(8, 20))
    def churn(self, pick: int, times: int) -> None:
        """Many cycles on one workspace."""
        keys = self._with_room(2)
        self._do("churn", keys[pick % len(keys)], times)

    @precondition(lambda self: self._free() and self._with_room())
    @rule(pick=_PICK, tokens=st.integers(1, BRANCHES))
    def prefill(self, pick: int, tokens: int) -> None:
        """A chunk of a prompt."""
        keys = self._with_room()
        key = keys[pick % len(keys)]
        self._do("prefill", key, min(tokens, self.driver.room(key), self.contract.max_rows))

    @precondition(lambda self: self._free())
    @rule(what=st.sampled_from(["move", "finish", "reuse", "share", "permute", "admit", "idle"]), pick=_PICK,
          tokens=st.integers(0, 4))  # fmt: skip
    def manage(self, what: str, pick: int, tokens: int) -> None:
        """Requests come and go, share a prefix, move to another slot, or three swap their slots in a 3-cycle; or a
        batch is nothing but padding."""
        keys, full = self.live, len(self.live) >= LIVE
        if not keys:
            self._admit(tokens)
            return
        key = keys[pick % len(keys)]
        if what == "idle":
            self._do("verify", {}, padding=0)
            self._do("accept", {})
        if what in ("reuse", "finish") or (what in ("admit", "share") and full):
            self._do("finish", key)
        if what in ("reuse", "admit"):
            self._admit(tokens)
        elif what == "share" and not full:
            self._do("share", self.next_key, key)
            self.next_key += 1
        elif what == "permute" and full:
            self._do("permute", *(keys[(pick + i) % LIVE] for i in range(LIVE)))
        elif what == "move" or (what == "permute" and not full):
            self._do("move", key)

    @precondition(lambda self: bool(self.live))
    @rule(back=st.sampled_from([False, True, True]))
    def checkpoint(self, back: bool) -> None:
        """Save, or go back to what was saved."""
        self._do("restore" if back and self.driver.saved is not None else "save")

    def teardown(self) -> None:
        """Add up."""
        if hasattr(self, "driver"):
            self.ledger.by.update(self.driver.judge.by)
        self.ledger.changed |= isinstance(self.backend, Faulty) and bool(self.backend.changed)


def machine(make_backend: Callable[[], Any], dims: Dims, ledger: Ledger) -> type[Programs]:
    """The state machine of one backend; `make_backend` is called for each program, so that none sees another's."""
    fields = {"make_backend": staticmethod(make_backend), "dims": dims, "ledger": ledger}
    return type("Programs", (Programs,), fields)
