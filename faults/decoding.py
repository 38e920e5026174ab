"""Faults of a whole decoder: each builds one that is wrong in one way.

`surface` names what goes wrong first: R, C, K, D, "tokens", or "batch" for tokens that depend on who else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from faults import CATALOGUE
from faults.continuation import KeptDrafts, RootHidden, StaleRoot
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.decide import Decision, Turn, decide, first_best
from lumotree.drafter_state import DrafterState
from lumotree.slots import Capacity, Lease


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


class _DirtySlots(Decoder):
    """A new request goes on from whatever the last owner of its slot left."""

    def __init__(self, stack: Stack, capacity: Capacity) -> None:
        super().__init__(stack, capacity)
        self._used: set[int] = set()

    def _clear(self, lease: Lease) -> None:
        if lease.slot not in self._used:
            super()._clear(lease)
        self._used.add(lease.slot)


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
                  "D", _SECTION_6, _drafter(RootHidden)),
    DecodingFault("drafter_not_rolled_back.drafter", "the drafter's cache keeps the entries that it drafted", "D",
                  _SECTION_6, _drafter(KeptDrafts)),
    DecodingFault("slot_of_finished_request.gdn", "a new request starts from the state that its slot's last owner left",
                  "R", _SECTION_6, _DirtySlots, reuse=True),
    DecodingFault("stale_root.gdn", "the forward is fed the pending token of the cycle before", "R", _SECTION_6,
                  lambda stack, capacity: Decoder(replace(stack, model=StaleRoot(stack.model)), capacity)),
    DecodingFault("bonus_of_parent.tokens", "the pending token is chosen at the parent of the accepted end", "tokens",
                  "contract section 6 (rows rolled by one)",
                  lambda stack, capacity: Decoder(stack, capacity, decide=_parents_bonus)),
    DecodingFault("coins_by_place.batch", "coins are addressed by a request's place in the batch", "batch",
                  "contract section 6 (sampler); batch invariance",
                  lambda stack, capacity: Decoder(stack, capacity, decide=_coins_by_place)),
)  # fmt: skip

DECODING: dict[str, DecodingFault] = {fault.id: fault for fault in FAULTS}
