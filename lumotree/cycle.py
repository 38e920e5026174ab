"""The decoding cycle for a batch of requests: propose, verify, select, publish.

Everything is a verification of trees followed by a publication. A plain step is a tree of one row; a prompt chunk is a
chain of which every row is accepted. `Decoder.cycle` runs the four phases; each is a method of its own, so that an
audit can force accepted paths (replace the decisions between `select` and `publish`), reorder the turns of a batch, or
read the surfaces in between. Only `admit`, `publish`, `restore` and `release` change what a request is; `verify` writes
candidate slots and the workspace.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import Limits
from lumotree.cycle_types import Cycle, Record, SavedRequest, Seconds, Stack, Verified
from lumotree.decide import Decision, Turn, decide
from lumotree.draft_types import Drafter, DraftRequest, DraftState, Proposal
from lumotree.drafter_state import Advance, DrafterState, page_table
from lumotree.errors import RequestError
from lumotree.prefixes import PrefixStore, tail_start
from lumotree.proposals import chunk, fitted, root_alone
from lumotree.requests import Request, Running, check_tokens
from lumotree.saved import check_saved
from lumotree.slots import Capacity, Lease, Slots
from lumotree.state import KVCache
from lumotree.surfaces import Surfaces, read_surfaces, write_surfaces

Decide = Callable[[Sequence[Turn], Tensor], list[Decision]]


class Decoder:
    """Decodes admitted requests together; what becomes of one does not depend on the others.

    make_drafter_state, decide: for faults; by default D as it should be, and the rules of the requests.
    """

    def __init__(
        self,
        stack: Stack,
        capacity: Capacity,
        *,
        make_drafter_state: Callable[..., DrafterState] = DrafterState,
        decide: Decide = decide,
    ) -> None:
        model, contract = stack.model, stack.backend.contract
        self.stack, self.capacity, self.decide = stack, capacity, decide
        self.width = capacity.pages_for(capacity.context)
        self.pools = model.empty_pools(contract, capacity.slots, capacity.flat_slots)
        rows = capacity.slots * capacity.rows
        limits = Limits(capacity.slots, rows, capacity.rows, capacity.slots, model.dims.layers)
        self.ws = model.allocate(stack.backend, limits)
        self.slots = Slots(capacity)
        self.prefixes = PrefixStore(self.slots)
        self.running: dict[int, Running] = {}
        self.drafter: DrafterState | None = None
        if stack.head is not None:
            self.drafter = make_drafter_state(stack.head, capacity.flat_slots, self.width, model.device)

    @property
    def draft_cache(self) -> KVCache | None:
        """The draft head's cache, None without a head."""
        return None if self.drafter is None else self.drafter.cache

    # Requests come and go

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that can never run here; nothing is changed."""
        where = f"request {request.number}"
        check_tokens(where, request.prompt, self.stack.model.vocab)
        if request.eos is not None:
            check_tokens(f"{where}, eos", [request.eos], self.stack.model.vocab)
        if request.longest > self.capacity.context:
            raise RequestError(
                f"{where}: {len(request.prompt)} prompt tokens and max_tokens={request.max_tokens} need "
                f"{request.longest} positions; the cache holds context={self.capacity.context} a request"
            )
        if request.drafter is not None and request.drafter.needs_head and self.stack.head is None:
            raise RequestError(f"{where}: drafter {request.drafter.name!r} needs a draft head; this model has none")
        if request.number in self.running:
            raise RequestError(f"{where}: a request of this number is already running; numbers must differ")

    def admit(self, request: Request) -> Running:
        """Give a request its slot and pages, with the longest stored prefix of its prompt already in them.

        Raises RequestError for a request that can never run here and CapacityError when there is no room now (stored
        prefixes that nobody uses are dropped first); in both cases nothing was changed.
        """
        self.check(request)
        prefix = self.prefixes.longest(request.prompt)
        lease = self.prefixes.lease(request.longest, prefix)
        state = self.running[request.number] = Running(request, lease, list(request.prompt))
        if prefix is None:
            self._clear(lease)
        else:
            state.committed, state.hidden = prefix.committed, prefix.tail.hidden
            self._write(lease, lease.shared * lease.page_size, prefix.tail)
        return state

    def _clear(self, lease: Lease) -> None:
        """A fresh request starts from zero state, whoever had the slot before."""
        self.pools.recurrent[:, lease.slot] = 0
        self.pools.conv[:, lease.slot] = 0

    def _write(self, lease: Lease, start: int, surfaces: Surfaces) -> None:
        """Put surfaces in place, with keys and values of the positions from `start` on."""
        flat = lease.flat(start, surfaces.committed)
        write_surfaces(self.stack.backend.contract, self.pools, lease.slot, flat, surfaces, self.draft_cache)

    def release(self, number: int) -> Running:
        """Give back what a request owns. Raises RequestError for an unknown number."""
        state = self._get(number)
        self.slots.release(state.lease)
        del self.running[number]
        return state

    def remember(self, number: int) -> None:
        """Store what a request has committed, for later prompts that begin with the same tokens.

        Raises RequestError for an unknown number, or before anything is committed.
        """
        state = self._get(number)
        if not state.committed:
            raise RequestError(f"request {number}: nothing is committed yet, so there is no prefix to remember")
        start = tail_start(state.committed, state.lease.page_size)
        self.prefixes.add(tuple(state.tokens[: state.committed]), state.lease, self._read(state, start))

    def surfaces(self, number: int) -> Surfaces:
        """Copies of every surface of a request. Raises RequestError for an unknown number."""
        return self._read(self._get(number), 0)

    def _read(self, state: Running, start: int) -> Surfaces:
        """Copies, with keys and values of the positions from `start` on."""
        flat = state.lease.flat(start, state.committed)
        return read_surfaces(
            self.stack.backend, self.pools, self.ws, state.lease.slot, flat, self.draft_cache,
            None if self.drafter is None else state.hidden, start,
        )  # fmt: skip

    def save(self, number: int) -> SavedRequest:
        """A request as it stands; it goes on undisturbed. Raises RequestError for an unknown number."""
        state = self._get(number)
        return SavedRequest(
            self.stack.identity, state.request, tuple(state.tokens), state.cycle, state.finished, tuple(state.paths),
            self.surfaces(number),
        )  # fmt: skip

    def restore(self, saved: SavedRequest) -> Running:
        """Go on with a saved request. Raises as `admit` does, and RequestError for a state of other weights, shapes or
        length; nothing was changed then."""
        self.check(saved.request)
        check_saved(saved, self.stack, self.pools, self.draft_cache)
        lease = self.prefixes.lease(saved.request.longest, None)
        self._clear(lease)
        self._write(lease, 0, saved.surfaces)
        state = self.running[saved.request.number] = Running(
            saved.request, lease, list(saved.tokens), saved.surfaces.committed, saved.surfaces.hidden, saved.cycle,
            saved.finished, list(saved.paths),
        )  # fmt: skip
        return state

    def _get(self, number: int) -> Running:
        if number not in self.running:
            raise RequestError(f"request {number}: not running; known: {sorted(self.running) or 'none'}")
        return self.running[number]

    # The four phases

    def propose(self, numbers: Sequence[int] | None = None) -> list[Turn]:
        """One turn for each unfinished request (or for those of `numbers`, in that order)."""
        states = [self._get(n) for n in (self.running if numbers is None else numbers)]
        states = [s for s in states if s.finished is None]
        proposals: dict[int, Proposal] = {}
        groups: dict[int, tuple[Drafter, list[Running]]] = {}
        for state in states:
            drafter = state.request.drafter
            if state.prefilling:
                proposals[state.number] = self._chunk(state)
            elif drafter is None:
                proposals[state.number] = root_alone(state.tokens[-1])
            else:
                groups.setdefault(id(drafter), (drafter, []))[1].append(state)
        cache = DraftState(self.stack.head, self.draft_cache, self.capacity.page_size)
        for drafter, members in groups.values():
            drafted = drafter.propose([self._draft_request(s) for s in members], cache)
            proposals |= {s.number: p for s, p in zip(members, drafted, strict=True)}
        return [self._turn(state, proposals[state.number]) for state in states]

    def _chunk(self, state: Running) -> Proposal:
        size = min(state.request.chunk or self.capacity.rows, self.capacity.rows)
        return chunk(state.tokens[state.committed : state.committed + size])

    def _draft_request(self, state: Running) -> DraftRequest:
        hidden = state.hidden
        if hidden is None:  # without a head nobody reads it
            assert self.drafter is None, "a request that has emitted has committed its prompt"
            hidden = torch.zeros(self.stack.model.hidden_size, dtype=torch.bfloat16, device=self.stack.model.device)
        return DraftRequest(
            tokens=state.array(),
            hidden=hidden,
            pages=page_table([state.lease], self.width)[0],
            scratch=state.lease.scratch,
            depth=state.left - 1,
            rows=self.capacity.rows,
            params=state.request.sampling,
            seed=state.request.seed,
            number=state.number,
            cycle=state.cycle,
        )

    def _turn(self, state: Running, proposal: Proposal) -> Turn:
        feed = proposal.tree.n if state.prefilling else 0
        slots = state.lease.scratch[: proposal.tree.n]
        depth = feed - 1 if feed else state.left - 1
        tokens = state.array()  # not the drafter's, which may have written to its own
        placed = fitted(proposal, tokens, state.committed, depth, slots, self.capacity, self.stack.model.vocab)
        return Turn(state.request, state.lease, placed, tokens, state.committed, feed, state.cycle, state.left)

    def verify(self, turns: Sequence[Turn]) -> Verified:
        """One target forward over the rows of all turns, in temporary state."""
        batch = build_batch(
            [turn.tree for turn in turns],
            state_slots=[turn.lease.slot for turn in turns],
            page_table=page_table([turn.lease for turn in turns], self.width),
            page_size=self.capacity.page_size,
            device=self.stack.model.device,
        )
        tokens = torch.from_numpy(np.concatenate([turn.tree.tokens for turn in turns])).to(self.stack.model.device)
        forward = self.stack.model.verify(tokens, batch, self.pools, self.ws, self.stack.backend)
        return Verified(tuple(turns), batch, forward)

    def select(self, verified: Verified) -> list[Decision]:
        """Accepted path and pending token of every turn; changes nothing. Raises DecodeError for NaN logits."""
        return self.decide(verified.turns, verified.forward.logits)

    def publish(self, verified: Verified, decisions: Sequence[Decision]) -> list[Record]:
        """Advance every surface by the accepted paths, and the requests by what they emit.

        Raises PathError, with nothing changed, for a path that is not one of the turn's tree.
        """
        paths = [t.tree.check_path(d.path) for t, d in zip(verified.turns, decisions, strict=True)]
        accepted = accepted_paths(paths, self.stack.model.device)
        self.stack.model.publish(verified.batch, accepted, self.pools, self.ws, self.stack.backend)
        self._publish_hidden(verified, paths)
        return [self._advance(turn, decision) for turn, decision in zip(verified.turns, decisions, strict=True)]

    def _publish_hidden(self, verified: Verified, paths: Sequence[Sequence[int]]) -> None:
        if self.drafter is None:
            return
        starts = itertools.accumulate((turn.tree.n for turn in verified.turns), initial=0)
        rows = [start + row for start, path in zip(starts, paths, strict=False) for row in path]
        accepted = verified.forward.hidden[torch.tensor(rows, device=verified.forward.hidden.device)]
        advances = []
        for turn, path, hidden in zip(
            verified.turns, paths, torch.split(accepted, [len(p) for p in paths]), strict=True
        ):
            advances.append(
                Advance(
                    lease=turn.lease,
                    start=turn.committed,
                    tokens=turn.tree.tokens[list(path)].tolist(),
                    hidden=hidden,
                    before=self.running[turn.request.number].hidden,
                )
            )
        for turn, last in zip(verified.turns, self.drafter.publish(advances), strict=True):
            self.running[turn.request.number].hidden = last

    def _advance(self, turn: Turn, decision: Decision) -> Record:
        state = self.running[turn.request.number]
        state.committed += len(decision.path)
        emitted: tuple[int, ...] = ()
        if decision.pending is not None:
            accepted = [] if turn.feed else turn.tree.tokens[list(decision.path[1:])].tolist()
            emitted = (*accepted, decision.pending)
            state.emit(emitted)
            state.cycle += 1
            if not turn.feed:
                state.paths.append(len(decision.path))
        return Record(state.number, turn.cycle, len(turn.tree.active_rows), turn.feed, decision.path, emitted,
                      state.committed, state.finished)  # fmt: skip

    def cycle(self, numbers: Sequence[int] | None = None) -> Cycle:
        """Propose, verify, select, publish once, for all unfinished requests or for those of `numbers` in that order.

        Raises DecodeError for NaN logits; the requests then stand where they stood.
        """
        marks = [self._now()]
        turns = self.propose(numbers)
        if not turns:
            return Cycle((), Seconds(0, 0, 0, 0), 0)
        marks.append(self._now())
        verified = self.verify(turns)
        marks.append(self._now())
        decisions = self.select(verified)
        marks.append(self._now())
        records = self.publish(verified, decisions)
        marks.append(self._now())
        spans = [b - a for a, b in itertools.pairwise(marks)]
        return Cycle(tuple(records), Seconds(*spans), verified.batch.rows)

    def _now(self) -> float:
        if self.stack.model.device.type == "cuda":
            torch.cuda.synchronize(self.stack.model.device)
        return time.perf_counter()
