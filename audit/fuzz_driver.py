"""Programs of a serving engine, every step held against sequential decoding and against what it may write.

`Driver` is the public interface of a printed program: each method is one step and takes plain numbers. Everything
outside a call's write set is compared bit by bit, guards and poison in free slots included; outputs, states, histories
and KV are compared with the backend's own one-token chain where bits are claimed, with the float64 oracle within its
derived bound where they are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from audit.engine import Request, Running, Turn
from audit.fuzz_judge import MismatchError, StepJudge
from audit.fuzz_legal import ProgramError, asked_path, asked_tree, possible
from audit.fuzz_sequential import Sequential, Walk
from audit.fuzz_watched import Watched
from audit.guard import Snapshot
from audit.play import Actor
from audit.world import Past, World
from lumotree.backends.protocol import SHARED_OPERANDS, StepOps
from lumotree.tree import Tree

#: Keys of requests are any integers; a program of the fuzzer counts them up.
Key = int


@dataclass(frozen=True)
class Pending:
    """A verification that waits for its paths, and what each row must leave."""

    running: Running
    walks: dict[Key, Walk]
    actors: dict[Key, Actor]


@dataclass(frozen=True)
class Saved:
    """Everything that a checkpoint puts back."""

    block: Tensor
    seen: Tensor
    ws_object: Any
    ws: Snapshot
    want: dict[str, Tensor]
    requests: dict[Key, Request]
    free: tuple[list[int], list[int]]
    pending: Pending | None
    deferred: frozenset[int]


class Driver:
    """Runs a program. Raises MismatchError where the backend is wrong, ProgramError for a step that cannot be made."""

    def __init__(self, backend: Any, world: World | None = None, reference: Any = None) -> None:
        """reference: the instance whose one-token step is the reference, so that neither sees what the other keeps
        outside its workspace; the backend itself unless given."""
        self.world = world or World()
        self.engine = Watched(backend, self.world)
        self.want = Sequential(self.engine, backend if reference is None else reference)
        self.judge = StepJudge(self.engine)
        self.pending: Pending | None = None
        self.saved: Saved | None = None
        self.steps = 0
        self._taken: list[int] = []
        self._second: Any = None

    @property
    def keys(self) -> list[Key]:
        """Live requests, oldest first."""
        return list(self.engine.requests)

    def room(self, key: Key) -> int:
        """Tokens that still fit into a request's pages."""
        return self.world.tokens - self.engine.requests[key].length

    # Requests

    def admit(self, key: Key, tokens: int = 0) -> None:
        """A request with a random past of `tokens` tokens, zeros for none."""
        self._settle()
        self._place(key, self.engine.draws.past(tokens, 3, key, self._count()), None)

    def share(self, key: Key, donor: Key) -> None:
        """A request that starts where another one stands, full pages used by both."""
        self._settle()
        self._count()
        self._place(key, self.want.past(self.engine.requests[donor]), donor)

    def _place(self, key: Key, past: Past, donor: Key | None) -> None:
        with possible("admit"):
            self.engine.admit(key, past, donor)
        request = self.engine.requests[key]
        self.want.mirror(request.slot, self.want.where(request, 0, request.length))

    def finish(self, key: Key) -> None:
        """Free the request's slot and pages, poison in both."""
        self._settle()
        self._count()
        slot = self.engine.requests[key].slot
        freed = self.engine.finish(key)
        self.want.mirror(slot, torch.tensor(freed, dtype=torch.int64))

    def move(self, key: Key) -> None:
        """Export a request, free its slot, and import it into another one, as a state transfer does."""
        self._settle()
        self._count()
        engine, old = self.engine, self.engine.requests[key]
        if not engine.free_slots:
            raise ProgramError("move: expected a free state slot, got none")
        states = engine.exported(key)
        new = engine.free_slots.pop(0)
        engine.free_slots.append(old.slot)
        engine.requests[key] = replace(old, slot=new)
        past = self.want.past(old)
        recurrent, conv = torch.stack([s.recurrent for s in states]), torch.stack([s.conv for s in states])
        engine.write(key, Past(recurrent, conv, past.k, past.v), skip=old.length)
        for pool in (self.want.pools.recurrent, self.want.pools.conv):
            pool[:, new] = pool[:, old.slot]
        engine.poison_slot(old.slot)
        self.want.mirror(old.slot)
        self._states([key], "moved")

    def permute(self, first: Key, second: Key, third: Key) -> None:
        """A 3-cycle of the state slots of three requests, contents moved along."""
        self._settle()
        self._count()
        engine, keys = self.engine, [first, second, third]
        slots = [engine.requests[k].slot for k in keys]
        target = [slots[1], slots[2], slots[0]]
        for pools in (engine.pools, self.want.pools):
            for pool in (pools.recurrent, pools.conv):
                pool[:, target] = pool[:, slots].clone()
        for key, slot in zip(keys, target, strict=True):
            engine.requests[key] = replace(engine.requests[key], slot=slot)
        engine.slab.accept_all()

    # Cycles

    def verify(
        self,
        trees: Mapping[Key, Sequence[int]],
        inactive: Mapping[Key, Sequence[int]] | None = None,
        padding: int | None = None,
        placement: str = "scattered",
        backwards: bool = False,
    ) -> None:
        """Verify trees, given by their parents, of some requests in this order.

        padding: place of a padding request. placement: of candidates' KV, see `audit.engine.PLACEMENTS`. backwards:
        attention first. Operands of inactive rows are NaN. Raises ProgramError while another verification waits for
        its paths.
        """
        if self.pending is not None:
            raise ProgramError("verify: expected accept or rollback first, a verification is pending")
        step = self._count()
        made = {k: asked_tree(parents, (inactive or {}).get(k, ())) for k, parents in trees.items()}
        self._check_room(made)
        rows = {k: _without(self.engine.draws.rows(t.n, 4, step, k), t) for k, t in made.items()}
        requests = {k: self.engine.requests[k] for k in made}
        actors = {k: Actor(self.want.past(requests[k]), t, rows[k], ()) for k, t in made.items()}
        walks = {k: self._walk(requests[k], actors[k]) for k in made}
        turns: list[Turn | None] = [Turn(k, t, rows[k]) for k, t in made.items()]
        if padding is not None:
            turns.insert(padding, None)
        running = self.engine.verify(turns, placement, backwards=backwards, taken=self._taken)
        self._flushed()
        self.pending = Pending(running, walks, actors)
        for i, turn in enumerate(running.turns):
            if turn is not None:
                lo, hi = running.offsets[i : i + 2]
                self.judge.outputs(turn.key, actors[turn.key], walks[turn.key], lo, hi, step)

    def _check_room(self, trees: Mapping[Key, Tree]) -> None:
        for k, t in trees.items():
            if t.n > self.room(k):
                raise ProgramError(f"verify: request {k} has room for {self.room(k)} tokens, got {t.n} rows")
        rows, most = sum(t.n for t in trees.values()) + len(self._taken), self.world.rows
        if rows > most:
            raise ProgramError(f"verify: the world has room for {most} rows, got {rows}")

    def accept(self, ends: Mapping[Key, int | None], apart: bool = False) -> None:
        """Publish, for each request of the verification, the path that ends in a row (0 if none is named), None for an
        empty one.

        apart: one publication a layer, last layer first.
        """
        if self.pending is None:
            raise ProgramError("accept: expected a verification that waits for its paths, got none")
        self._count()
        pending, self.pending = self.pending, None
        contract = self.engine.contract
        paths = [asked_path(t.tree, ends.get(t.key, 0), contract) if t else None for t in pending.running.turns]
        before = {t.key: self.engine.requests[t.key] for t in pending.running.turns if t}
        self.engine.publish(pending.running, paths, apart)
        for turn, path in zip(pending.running.turns, paths, strict=True):
            if turn is not None and path:
                key, request = turn.key, before[turn.key]
                self.want.commit(request, [pending.walks[key].left[row] for row in path])
                self._exported(key, replace(pending.actors[key], path=path), request, [r.slot for r in before.values()])
        self._states([k for k in self.keys if self.engine.requests[k].slot not in self.engine.deferred], "after accept")

    def rollback(self) -> None:
        """Drop a verification: nothing of it may remain."""
        if self.pending is None:
            raise ProgramError("rollback: expected a verification that waits for its paths, got none")
        self._count()
        pending, self.pending = self.pending, None
        self.engine.release(pending.running)
        self._states([k for k in self.keys if self.engine.requests[k].slot not in self.engine.deferred], "rolled back")

    def prefill(self, key: Key, tokens: int) -> None:
        """A chunk of a prompt: a chain, all of it accepted."""
        self.verify({key: list(range(-1, tokens - 1))})
        self.accept({key: tokens - 1})

    def churn(self, key: Key, times: int) -> None:
        """Verify and roll back so many times: what counts calls or wraps around must not show."""
        for _ in range(times):
            self.verify({key: [-1, 0]})
            self.rollback()

    def aside(self, trees: Mapping[Key, Sequence[int]], ends: Mapping[Key, int | None]) -> None:
        """While one verification waits, another batch is verified and accepted on a workspace of its own.

        Raises ProgramError if none waits, or if states are deferred in the first one's workspace.
        """
        e = self.engine
        if self.pending is None or e.deferred:
            raise ProgramError("aside: expected a verification that waits for its paths and nothing deferred")
        pending, self.pending = self.pending, None
        restore = self._metadata_kept()
        self._taken = [int(s) for tree in pending.running.trees if tree for s in tree.slots]
        e.ws, first = e.workspace() if self._second is None else self._second, e.ws
        try:
            self.verify(trees)
            self.accept(ends)
            self._settle()
            self._second = e.ws
        finally:
            e.ws, self.pending, self._taken = first, pending, []
        restore()

    def step(self, keys: Sequence[Key], padding: int | None = None, apart: bool = False) -> None:
        """One token of some requests by the backend's own step, also between a verification and its acceptance, for
        requests that have no part in it. apart: attention in a call of its own."""
        busy = {t.key for t in self.pending.running.turns if t} if self.pending else set()
        if both := sorted(busy & set(keys)):
            raise ProgramError(f"step: expected requests without a pending verification, got {both}")
        if self.engine.deferred:
            self._settle()
        count = self._count()
        requests = {k: self.engine.requests[k] for k in keys}
        rows = {k: self.engine.draws.rows(1, 5, count, k) for k in keys}
        actors = {k: Actor(self.want.past(requests[k]), asked_tree([-1]), rows[k], (0,)) for k in keys}
        walks = {k: self._walk(requests[k], actors[k]) for k in keys}
        turns: list[Turn | None] = [Turn(k, actors[k].tree, rows[k]) for k in keys]
        if padding is not None:
            turns.insert(padding, None)
        metadata = self._metadata_kept()
        self.engine.native(turns, apart)
        for at, key in enumerate(keys):
            self.judge.outputs(key, actors[key], walks[key], at, at + 1, count)
            self.want.commit(requests[key], [walks[key].left[0]])
            self._published(key, actors[key], requests[key], None)
        metadata()
        self._states([k for k in self.keys if k not in keys], "beside a plain step")

    def _metadata_kept(self) -> Any:
        """A pending verification's metadata is its own: what puts it back behind another step."""
        names = [n for n in self.engine.slab.parts if n.startswith(("batch.", "plan."))]
        kept = {name: self.engine.slab[name].clone() for name in names}

        def restore() -> None:
            for name, value in kept.items():
                self.engine.slab[name].copy_(value)
            self.engine.slab.accept_all()

        return restore

    # Checkpoints

    def save(self) -> None:
        """Remember everything, a pending verification included."""
        e, w = self.engine, self.want.pools.tensors()
        self.saved = Saved(
            e.slab.block.clone(), e.slab.seen.clone(), e.ws, Snapshot(e.ws), {k: v.clone() for k, v in w.items()},
            dict(e.requests), (list(e.free_slots), list(e._pages)), self.pending, e.deferred,
        )  # fmt: skip

    def restore(self) -> None:
        """Back to the checkpoint: pools and workspace are put back in place."""
        if self.saved is None:
            raise ProgramError("restore: expected a checkpoint, got none")
        self._count()
        e, s = self.engine, self.saved
        e.slab.block.copy_(s.block)
        e.slab.seen.copy_(s.seen)
        e.ws = s.ws_object
        s.ws.restore()
        for name, tensor in self.want.pools.tensors().items():
            tensor.copy_(s.want[name])
        e.requests, e.free_slots, e._pages = dict(s.requests), list(s.free[0]), list(s.free[1])
        self.pending, e.deferred = s.pending, s.deferred

    # Comparison

    def _count(self) -> int:
        self.steps += 1
        return self.steps

    def _walk(self, request: Request, actor: Actor) -> Walk:
        try:
            return self.want.walk(request, actor)
        except AssertionError as damage:
            raise MismatchError(str(damage), "stray") from None

    def _exported(self, key: Key, actor: Actor, request: Request, others: Sequence[int]) -> None:
        """A request's state after publication, whether it is in the pool already or deferred with that of others."""
        e, slot = self.engine, request.slot
        kept, kept_ws = Snapshot([e.pools.recurrent, e.pools.conv]), Snapshot(e.ws)
        states = e.exported(key, others)
        if kept.changed() or any(self.judge.raw_differs(slot, n, s) for n, s in enumerate(states)):
            kept.restore()
            kept_ws.restore()
            e.deferred = e.deferred | {slot}
        self._published(key, actor, request, states)
        e.slab.accept_all()

    def _published(self, key: Key, actor: Actor, before: Request, states: Any) -> None:
        """State, history and KV of one request against the reference, which follows where only bounds are claimed."""
        states = self.engine.exported(key) if states is None else states
        self.judge.published(key, actor, self.want, before, states, self.steps)

    def _states(self, keys: Sequence[Key], what: str) -> None:
        """Requests that had no part in a step hold what they held."""
        self.judge.held(keys, self.want, what)

    def _flushed(self) -> None:
        """Whatever a verification has brought up to date is what the export said; the rest stays deferred."""
        e = self.engine
        for key, request in e.requests.items():
            if request.slot in e.deferred and self.judge.is_held(key, self.want):
                e.deferred = e.deferred - {request.slot}

    def _settle(self) -> None:
        """An engine that is about to move or overwrite states has everything deferred applied and starts a new
        workspace: the protocol has no other way to tell a backend."""
        if self.pending is not None:
            raise ProgramError("expected accept or rollback first, a verification is pending")
        e = self.engine
        if not e.deferred:
            return
        for key, request in list(e.requests.items()):
            states = e.exported(key)
            past = Past(torch.stack([s.recurrent for s in states]), torch.stack([s.conv for s in states]),
                        *(torch.zeros(len(states), request.length, 0) for _ in range(2)))  # fmt: skip
            e.write_state(request.slot, past)
        e.ws = e.workspace()
        e.deferred = frozenset()
        e.slab.accept_all()
        self._states(self.keys, "once everything deferred was applied")


def _without(rows: list[StepOps], tree: Tree) -> list[StepOps]:
    """The operands with NaN in those of inactive rows, which must not matter."""
    off = [row for row in range(tree.n) if not tree.active[row]]
    for part in (part for ops in rows if off for part in vars(ops).values()):
        for name, value in vars(part).items():
            if name not in SHARED_OPERANDS:
                value[off] = torch.nan
    return rows
