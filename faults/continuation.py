"""Faults of a decoding engine: between what was decided and what the next cycle begins with.

Each is one wrapper of what an engine is built from: its backend, its model or the keeper of its drafter's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from faults import CATALOGUE
from faults.catalogue import Wrap
from lumotree.backends.protocol import Accepted, Batch
from lumotree.drafter_state import Advance, DrafterState
from lumotree.tree import Tree


@dataclass(frozen=True)
class EngineFault:
    """A known defect of an engine.

    id: its name. statement: one sentence. surfaces: those in which it must show (see `audit.continuation_distance`);
    one is enough. classes: public defects it is drawn from. backend, model: wrappers; drafter: a keeper of the
    drafter's state. requests: how many a batch must have to reach it.
    """

    id: str
    statement: str
    surfaces: tuple[str, ...]
    classes: tuple[str, ...]
    backend: Wrap | None = None
    model: Wrap | None = None
    drafter: Callable[..., DrafterState] = DrafterState
    requests: int = 1


class _Model:
    """A language model of which some calls are replaced; all else is the inner model's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class StaleRoot(_Model):
    """Row 0 carries the token that was pending one cycle earlier."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.last: dict[int, int] = {}

    def verify(self, tokens: Tensor, batch: Batch, pools: Any, ws: Any, backend: Any) -> Any:
        """As the model's, on stale roots."""
        given = tokens.clone()
        roots, slots = batch.cu_rows[:-1].tolist(), batch.state_slot.tolist()
        for root, slot in zip(roots, slots, strict=True):
            if slot >= 0:
                now = int(tokens[root])
                given[root] = self.last.get(slot, now)
                self.last[slot] = now
        return self.inner.verify(given, batch, pools, ws, backend)


class Publishing(_Model):
    """Publication is told something else: `told(batch, accepted, pools)` gives batch and accepted paths."""

    def __init__(self, inner: Any, told: Callable[[Batch, Accepted, Any], tuple[Batch, Accepted]]) -> None:
        super().__init__(inner)
        self.told = told

    def publish(self, batch: Batch, accepted: Accepted, pools: Any, ws: Any, backend: Any) -> None:
        """As the model's, on what `told` says."""
        self.inner.publish(*self.told(batch, accepted, pools), pools, ws, backend)


def sibling_paths(batch: Batch, accepted: Accepted, pools: Any) -> tuple[Batch, Accepted]:
    """Every path ends at another active row of the same depth, where there is one."""
    rows, cu = accepted.rows.clone(), batch.cu_rows.tolist()
    for i, length in enumerate(accepted.length.tolist()):
        lo, hi = cu[i], cu[i + 1]
        tree = Tree.make(batch.parent[lo:hi].cpu().numpy(), active=batch.active[lo:hi].cpu().numpy())
        end = int(rows[i, length - 1]) if length else 0
        others = [r for r in tree.active_rows if r != end and tree.depth[r] == tree.depth[end]]
        if length and others:
            rows[i, :length] = torch.tensor(tree.path(others[0])).to(rows)
    return batch, replace(accepted, rows=rows)


def finished_slot(batch: Batch, accepted: Accepted, pools: Any) -> tuple[Batch, Accepted]:
    """The first request is published into a slot that none of the batch owns: the last such one."""
    used = set(batch.state_slot.tolist())
    free = [s for s in range(pools.recurrent.shape[1]) if s not in used]
    slots = batch.state_slot.clone()
    if free:
        slots[0] = free[-1]
    return replace(batch, state_slot=slots), accepted


def rotated_counts(batch: Batch, accepted: Accepted, pools: Any) -> tuple[Batch, Accepted]:
    """Each request is published to the accepted length of the next one, as far as its own path goes."""
    return batch, replace(accepted, length=torch.minimum(accepted.length, accepted.length.roll(-1)))


class RootHidden(DrafterState):
    """The drafter goes on from the hidden row of the root instead of that of the accepted end."""

    def publish(self, advances: Sequence[Advance]) -> list[Tensor]:
        """As it should be, but for the rows that it returns."""
        super().publish(advances)
        return [advance.hidden[0].clone() for advance in advances]


class KeptDrafts(DrafterState):
    """Entries stay as they were drafted: from the head's own rows, not from the target's."""

    def publish(self, advances: Sequence[Advance]) -> list[Tensor]:
        """Commit entries one after another, each fed with the head's last output."""
        last = super().publish(advances)
        for advance in advances:
            if advance.before is None:
                continue
            hidden = advance.before
            for step, token in enumerate(advance.tokens):
                hidden = self._entry(advance, step, int(token), hidden)
        return last

    def _entry(self, advance: Advance, step: int, token: int, hidden: Tensor) -> Tensor:
        from lumotree.backends.batch import build_batch
        from lumotree.drafter_state import page_table

        at = advance.start - 1 + step
        tree = Tree.make([-1], slots=advance.lease.flat(at, at + 1), num_slots=self.flat_slots, prefix_len=at)
        batch = build_batch(
            [tree], state_slots=[0], page_table=page_table([advance.lease], self.width),
            page_size=advance.lease.page_size, device=self.device,
        )  # fmt: skip
        forward = self.head.forward(torch.tensor([token], device=self.device), hidden[None], batch, self.cache)
        return forward.hidden[0]


def _told(function: Callable[[Batch, Accepted, Any], tuple[Batch, Accepted]]) -> Wrap:
    return lambda model: Publishing(model, function)


#: The positive controls of the continuation audit (contract section 6, and the drafter's surface), by id.
ENGINE_FAULTS: dict[str, EngineFault] = {
    f.id: f
    for f in (
        EngineFault(
            "conv rows not published", "the convolution history stays that of the cycle before", ("conv",),
            ("B2", "B3"), backend=CATALOGUE["history_not_published.conv"].wrap,
        ),
        EngineFault(
            "gdn rows not published", "the recurrent state stays that of the cycle before", ("gdn",),
            ("A3", "A13"), backend=CATALOGUE["state_not_published.gdn"].wrap,
        ),
        EngineFault(
            "kv remap off by one", "accepted KV lands one position too far", ("kv_new",),
            ("I2", "J1", "DF6"), backend=CATALOGUE["kv_remap_off_by_one.attention"].wrap,
        ),
        EngineFault(
            "stale root token", "row 0 carries the pending token of the cycle before", ("next", "gdn", "inputs"),
            ("C1", "DF12"), model=StaleRoot,
        ),
        EngineFault(
            "sibling path committed", "the states of a sibling path are published, the right tokens emitted",
            ("gdn", "conv", "kv_new"), ("DF24", "DF34"), model=_told(sibling_paths),
        ),
        EngineFault(
            "hidden row of the wrong end", "the drafter reads the root's hidden row", ("hidden",),
            ("DF12",), drafter=RootHidden,
        ),
        EngineFault(
            "drafter state not rolled back", "drafted entries of the draft head's cache are kept", ("drafter",),
            ("I2",), drafter=KeptDrafts,
        ),
        EngineFault(
            "slot of a finished request", "publication goes to a slot that its request does not own",
            ("gdn", "conv", "untouched"), ("C6", "D1"), model=_told(finished_slot),
        ),
        EngineFault(
            "accepted counts of another row", "each request is published to another one's accepted length",
            ("gdn", "conv"), ("C1", "A2"), model=_told(rotated_counts), requests=2,
        ),
    )
}  # fmt: skip


def reached_faults(head: bool) -> list[EngineFault]:
    """Those that a model with a draft head, or without one, can show."""
    return [f for f in ENGINE_FAULTS.values() if head or f.drafter is DrafterState]
