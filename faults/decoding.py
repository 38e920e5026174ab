"""Faults of a whole decoder: each builds one that is wrong in one way.

`surface` names what goes wrong first: R, C, K, D, "tokens", or "batch" for tokens that depend on who else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from faults import CATALOGUE
from lumotree.backends.protocol import Batch, Workspace
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.decide import Decision, Turn, decide, first_best
from lumotree.drafter_state import Advance, DrafterState
from lumotree.model_types import Forward
from lumotree.slots import Capacity, Lease
from lumotree.state import Pools


@dataclass(frozen=True)
class DecodingFault:
    """A named way to decode wrongly. reuse: it shows when a second request gets the slot of a finished one. make:
    (stack, capacity) -> wrong decoder. provenance: as in `faults.catalogue.Fault`."""

    id: str
    statement: str
    surface: str
    provenance: str
    make: Callable[[Stack, Capacity], Decoder]
    reuse: bool = False


class _RootHidden(DrafterState):
    """The hidden row handed to the drafter is the root's, whatever was accepted."""

    def publish(self, advances: Sequence[Advance]) -> list[Tensor]:
        super().publish(advances)
        return [advance.hidden[0].clone() for advance in advances]


class _DraftedEntries(DrafterState):
    """Entries of accepted drafts stay as the head drafted them, from its own rows instead of the target's."""

    def publish(self, advances: Sequence[Advance]) -> list[Tensor]:
        hidden = super().publish(advances)
        drafted = [a for a in advances if a.start > 0 and len(a.tokens) > 1]
        if drafted:
            super().publish([replace(a, hidden=a.hidden.roll(1, 0)) for a in drafted])
        return hidden


class _DirtySlots(Decoder):
    """A new request goes on from whatever the last owner of its slot left."""

    def __init__(self, stack: Stack, capacity: Capacity) -> None:
        super().__init__(stack, capacity)
        self._used: set[int] = set()

    def _clear(self, lease: Lease) -> None:
        if lease.slot not in self._used:
            super()._clear(lease)
        self._used.add(lease.slot)


class _StaleRoot:
    """The model is fed the root token of the cycle before."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._last: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def verify(self, tokens: Tensor, batch: Batch, pools: Pools, ws: Workspace, backend: Any) -> Forward:
        stale = tokens.clone()
        cu, prefix = batch.cu_rows.tolist(), batch.prefix_len.tolist()
        for i, slot in enumerate(batch.state_slot.tolist()):
            if prefix[i] and slot in self._last:
                stale[cu[i]] = self._last[slot]
            self._last[slot] = tokens[cu[i]].clone()
        return self.inner.verify(stale, batch, pools, ws, backend)  # type: ignore[no-any-return]


def _parents_bonus(turns: Sequence[Turn], logits: Tensor) -> list[Decision]:
    """The pending token is drawn at the parent of the accepted end."""
    decisions, best, start, wrong = decide(turns, logits), first_best(logits), 0, []
    for turn, decision in zip(turns, decisions, strict=True):
        if turn.feed or len(decision.path) < 2:
            wrong.append(decision)
        else:
            wrong.append(replace(decision, pending=best[start + decision.path[-2]]))
        start += turn.tree.n
    return wrong


def _coins_by_place(turns: Sequence[Turn], logits: Tensor) -> list[Decision]:
    """Coins are addressed by a request's place in the batch."""
    return decide([replace(t, request=replace(t.request, number=i)) for i, t in enumerate(turns)], logits)


def _backend_fault(kind: str, surface: str) -> DecodingFault:
    fault = CATALOGUE[kind]

    def make(stack: Stack, capacity: Capacity) -> Decoder:
        return Decoder(replace(stack, backend=fault.wrap(stack.backend)), capacity)

    return DecodingFault(fault.id, fault.statement, surface, fault.provenance, make)


def _drafter(kind: type[DrafterState]) -> Callable[[Stack, Capacity], Decoder]:
    return lambda stack, capacity: Decoder(stack, capacity, make_drafter_state=kind)


_SECTION_6 = "contract section 6 (continuation controls)"

FAULTS: tuple[DecodingFault, ...] = (
    _backend_fault("state_not_published.gdn", "R"),
    _backend_fault("sibling_published.gdn", "R"),
    _backend_fault("history_not_published.conv", "C"),
    _backend_fault("sibling_published.conv", "C"),
    _backend_fault("kv_remap_off_by_one.attention", "K"),
    _backend_fault("sibling_published.attention", "K"),
    DecodingFault("hidden_of_wrong_end.drafter", "the drafter reads the root's hidden row, not the accepted end's",
                  "D", _SECTION_6, _drafter(_RootHidden)),
    DecodingFault("drafter_not_rolled_back.drafter", "the drafter's cache keeps the entries that it drafted", "D",
                  _SECTION_6, _drafter(_DraftedEntries)),
    DecodingFault("slot_of_finished_request.gdn", "a new request starts from the state that its slot's last owner left",
                  "R", _SECTION_6, _DirtySlots, reuse=True),
    DecodingFault("stale_root.gdn", "the forward is fed the pending token of the cycle before", "R", _SECTION_6,
                  lambda stack, capacity: Decoder(replace(stack, model=_StaleRoot(stack.model)), capacity)),
    DecodingFault("bonus_of_parent.tokens", "the pending token is chosen at the parent of the accepted end", "tokens",
                  "contract section 6 (rows rolled by one)",
                  lambda stack, capacity: Decoder(stack, capacity, decide=_parents_bonus)),
    DecodingFault("coins_by_place.batch", "coins are addressed by a request's place in the batch", "batch",
                  "contract section 6 (sampler); batch invariance",
                  lambda stack, capacity: Decoder(stack, capacity, decide=_coins_by_place)),
)  # fmt: skip

DECODING: dict[str, DecodingFault] = {fault.id: fault for fault in FAULTS}
