"""The candidate: the decoding engine as it serves, with any backend, along forced paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit.continuation_draft import own_drafter
from audit.continuation_harvest import DEEPEST
from audit.continuation_native import Snapshot, to_host
from audit.continuation_plan import Script
from audit.continuation_watch import Account, Expected, WatchedBackend, WatchedModel
from audit.guard import poison_, same_except
from faults.continuation import EngineFault
from lumotree.backends.protocol import Batch, Workspace
from lumotree.cycle import Decoder
from lumotree.cycle_types import SavedRequest, Stack, Verified
from lumotree.decide import Decision, Turn
from lumotree.draft_types import DraftRequest, DraftState, Proposal
from lumotree.drafter_state import DrafterState
from lumotree.recorder import CycleRecorder, Drafted, Recorder
from lumotree.requests import Request
from lumotree.slots import Capacity
from lumotree.state import Pools
from lumotree.surfaces import Surfaces
from lumotree.tree import Tree

#: The request that sits beside the audited ones and must not be touched.
BYSTANDER = 10_000


class _Scripted:
    """A drafter that proposes the trees of the scripts.

    A model with a head also drafts as it would when serving: what it drafts from the published state D must be what it
    drafted when the script was harvested.
    """

    name, needs_head = "scripted", False

    def __init__(self, scripts: Mapping[int, Script], outcome: Outcome) -> None:
        self.scripts, self.outcome = scripts, outcome

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """The prompt's last chunk is cycle 0, so the first tree is that of cycle 1."""
        trees = [self.scripts[r.number].cycles[r.cycle - 1].tree for r in requests]
        for request, tree in zip(requests, trees, strict=True):
            if state.head is not None and tree.n > 1:
                self._compare(request, tree, own_drafter(tree).propose([request], state)[0].tree)
        return [Proposal(tree) for tree in trees]

    def _compare(self, request: DraftRequest, script: Tree, drafted: Tree) -> None:
        rows = [r for r in drafted.active_rows if r]
        self.outcome.drafted += len(rows)
        odd = [r for r in rows if drafted.tokens[r] != script.tokens[r]]
        if odd:
            where = f"{self.scripts[request.number].name} cycle {request.cycle - 1} row {odd[0]}"
            self.outcome.drafts.append(f"{where}: {drafted.tokens[odd[0]]}, harvested {script.tokens[odd[0]]}")


@dataclass
class Outcome:
    """What one engine run left: snapshots by script; memory that changed and should not have, of `watched` looks;
    imported states that read back otherwise; drafted tokens that are not the harvested ones, of `drafted`."""

    trace: dict[str, list[Snapshot]] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    watched: int = 0
    account: Account = field(default_factory=Account)
    forwards: int = 0
    readback: list[str] = field(default_factory=list)
    drafts: list[str] = field(default_factory=list)
    drafted: int = 0


class Engine:
    """A decoder whose drafts and decisions are those of scripts.

    slots: requests at a time, the bystander not counted. fault: what is wrong with it on purpose. record: folder to
    record cycles to; backend_name: what the recording says of the backend.
    """

    def __init__(
        self,
        stack: Stack,
        scripts: Sequence[Script],
        *,
        slots: int = 1,
        fault: EngineFault | None = None,
        record: Path | None = None,
        backend_name: str = "",
    ) -> None:
        self.scripts = {s.number: s for s in scripts}
        self.outcome = Outcome()
        self.drafter = _Scripted(self.scripts, self.outcome)
        model, backend = stack.model, stack.backend
        self.contract = backend.contract
        if fault is not None and fault.backend is not None:
            backend = fault.backend(backend)
        self.watched = WatchedModel(model, self.outcome.account)
        outer = self.watched if fault is None or fault.model is None else fault.model(self.watched)
        make = DrafterState if fault is None else fault.drafter
        longest = max(len(s.tokens) for s in scripts) + DEEPEST
        self.decoder = Decoder(
            Stack(outer, WatchedBackend(backend, self.outcome.account), stack.head, stack.identity),
            Capacity(slots=slots + 2, context=longest, pages=(slots + 3) * -(-longest // 16)),
            make_drafter_state=make,
            decide=self._decide,
        )
        self._poison()
        self.beside = self._bystander(scripts[0].prompt)
        self.recorder: Recorder | None = None
        if record is not None:
            self.recorder = Recorder(record, self.contract, model.dims, backend_name)
            self.watched.record = self._begin

    def _poison(self) -> None:
        """What no request has written must not be read; admission clears a request's own state slot."""
        for pool in self.decoder.pools.tensors().values():
            poison_(pool)
        if (cache := self.decoder.draft_cache) is not None:
            poison_(cache.k)
            poison_(cache.v)

    def _bystander(self, prompt: tuple[int, ...]) -> Surfaces:
        """A request with a prompt of its own, fed and then left alone."""
        self.decoder.admit(Request(BYSTANDER, tuple(reversed(prompt[1:])), 2))
        while self.decoder.running[BYSTANDER].prefilling:
            self.decoder.cycle([BYSTANDER])
        self.outcome.account.calls.clear()
        return self.decoder.surfaces(BYSTANDER)

    def _decide(self, turns: Sequence[Turn], logits: Tensor) -> list[Decision]:
        return [self._decision(turn) for turn in turns]

    def _decision(self, turn: Turn) -> Decision:
        if turn.request.number == BYSTANDER:
            return Decision(tuple(range(turn.feed)), 0 if turn.emits else None)
        script = self.scripts[turn.request.number]
        if turn.feed:
            return Decision(tuple(range(turn.feed)), script.pending_after(-1) if turn.emits else None)
        cycle = turn.cycle - 1
        return Decision(script.cycles[cycle].path, script.pending_after(cycle))

    def request(self, script: Script) -> Request:
        """The script's request; its drafter proposes the script's trees."""
        room = len(script.tokens) - len(script.prompt) + DEEPEST  # so that no tree is cut by the budget
        return Request(script.number, script.prompt, room, drafter=self.drafter, chunk=script.chunk)

    def import_state(self, script: Script, prompt: Snapshot) -> None:
        """Start behind the prompt with another arm's state, and read back what was imported."""
        tokens, device = (*script.prompt, script.pending_after(-1)), self.decoder.stack.model.device
        hidden = prompt.surfaces.hidden
        surfaces = replace(prompt.surfaces, hidden=None if hidden is None else hidden.to(device))
        self.decoder.restore(
            SavedRequest(self.decoder.stack.identity, self.request(script), tokens, 1, None, (), surfaces)
        )
        back = to_host(self.decoder.surfaces(script.number))
        self.outcome.readback += [f"{script.name}: {d}" for d in back.differences(prompt.surfaces)]
        self.outcome.trace[script.name] = [Snapshot(back, prompt.logits, prompt.hidden)]

    def feed_prompt(self, script: Script, *, remember: bool = False) -> None:
        """Admit and feed the prompt in chunks. remember: store the prefix after the first one, for a later request."""
        self.decoder.admit(self.request(script))
        while self.decoder.running[script.number].prefilling:
            self.advance([script.number])
            if remember:
                self.decoder.remember(script.number)
                remember = False

    def play(self, script: Script, cycles: int | None = None) -> None:
        """The script's cycles, alone."""
        for _ in script.cycles[:cycles]:
            self.advance([script.number])

    def advance(self, numbers: Sequence[int]) -> None:
        """One cycle of these requests, in this order; a snapshot of each that is behind its prompt afterwards."""
        feeding = {n for n in numbers if self.decoder.running[n].prefilling}
        for number, (logits, hidden) in self.cycle(numbers).items():
            if not self.decoder.running[number].prefilling:
                last = slice(-1, None) if number in feeding else slice(None)
                self._snapshot(self.scripts[number], logits[last], hidden[last])

    def done(self, script: Script) -> bool:
        """Whether all of the script's cycles were played."""
        return len(self.outcome.trace.get(script.name, ())) == len(script.bounds)

    def cycle(self, numbers: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """One cycle; logits and hidden rows of the accepted path of each request, on the CPU."""
        decoder = self.decoder
        turns = decoder.propose(numbers)
        self.watched.expected = Expected(
            tuple(self._demanded(t) for t in turns), tuple(self._committed(t) for t in turns)
        )
        before = {n: p.clone() for n, p in self._memory().items()}
        verified = decoder.verify(turns)
        decisions = decoder.select(verified)
        decoder.publish(verified, decisions)
        self.outcome.forwards += 1
        self._untouched(before, turns)
        if self.watched.cycle is not None:
            self._end(self.watched.cycle, verified)
        return self._rows(verified, decisions)

    def _demanded(self, turn: Turn) -> Tree:
        """The tree that the script demands, not the one that the engine made of it."""
        script = self.scripts[turn.request.number]
        return turn.tree if turn.feed else script.cycles[turn.cycle - 1].tree

    def _committed(self, turn: Turn) -> int:
        script = self.scripts[turn.request.number]
        return turn.committed if turn.feed else script.bounds[turn.cycle - 1]

    @staticmethod
    def _rows(verified: Verified, decisions: Sequence[Decision]) -> dict[int, tuple[Tensor, Tensor]]:
        found, start = {}, 0
        forward = verified.forward
        for turn, decision in zip(verified.turns, decisions, strict=True):
            rows = torch.tensor([start + r for r in decision.path], device=forward.logits.device)
            start += turn.tree.n
            found[turn.request.number] = forward.logits[rows].cpu(), forward.hidden[rows].cpu()
        return found

    def _snapshot(self, script: Script, logits: Tensor, hidden: Tensor) -> None:
        surfaces = to_host(self.decoder.surfaces(script.number))
        self.outcome.trace.setdefault(script.name, []).append(Snapshot(surfaces, logits, hidden))

    def _memory(self) -> dict[str, Tensor]:
        cache = self.decoder.draft_cache
        drafts = {} if cache is None else {"draft k": cache.k, "draft v": cache.v}
        return {**self.decoder.pools.tensors(), **drafts}

    def _untouched(self, before: Mapping[str, Tensor], turns: Sequence[Turn]) -> None:
        """Everything outside the slots, pages and scratch of this cycle's requests is bitwise as it was."""
        for name, now in self._memory().items():
            states = name in ("recurrent", "conv")
            own = [slot for turn in turns for slot in ([turn.lease.slot] if states else self._writable(turn))]
            self.outcome.watched += 1
            if not same_except(now, before[name], torch.tensor(own, device=now.device)):
                self.outcome.touched.append(f"{name} in cycle {self.outcome.forwards - 1}")
        apart = self.decoder.surfaces(BYSTANDER).differences(self.beside)
        self.outcome.touched += [f"bystander's {d}" for d in apart[:1]]

    @staticmethod
    def _writable(turn: Turn) -> list[int]:
        """Flat slots that a cycle may write: its own pages behind the committed tokens, and its scratch.

        The draft head's entry at the last committed position is only completed by the token behind it.
        """
        lease = turn.lease
        first = max(turn.committed - 1, 0)
        pages = len(lease.pages) * lease.page_size
        return [*lease.flat(first, pages).tolist(), *lease.scratch.tolist()]

    def _begin(self, batch: Batch, tokens: Tensor, pools: Pools, ws: Workspace, backend: Any) -> CycleRecorder:
        assert self.recorder is not None
        running = {s.lease.slot: s for s in self.decoder.running.values()}
        states = [running[slot] for slot in batch.state_slot.tolist()]
        cache, size = self.decoder.draft_cache, self.decoder.stack.model.hidden_size
        drafted = None
        if cache is not None:
            none = torch.zeros(size, dtype=torch.bfloat16)
            drafted = Drafted(cache, torch.stack([none if s.hidden is None else s.hidden.cpu() for s in states]))
        names = [f"request {s.number}" for s in states]
        return self.recorder.begin(batch, tokens, pools, ws, backend, names, drafted)

    def _end(self, cycle: CycleRecorder, verified: Verified) -> None:
        states = [self.decoder.running[t.request.number] for t in verified.turns]
        pending = torch.tensor([s.tokens[s.committed] if s.committed < len(s.tokens) else -1 for s in states])
        lengths = torch.tensor([s.committed for s in states])
        hidden = (
            None
            if self.decoder.draft_cache is None
            else torch.stack([s.hidden for s in states if s.hidden is not None])
        )
        assert self.watched.accepted is not None
        cycle.end(self.watched.accepted, pending, lengths, hidden=hidden)
