"""Holds one step of a program against sequential decoding or, where only an algebra is claimed, against the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from audit.distance import differing_mask, ratios, same_bits
from audit.engine import Engine, Request
from audit.guard import INTEGERS
from audit.play import Actor, Bounded, Oracle, oracle_of
from audit.truth import canonical
from lumotree.state import State, canonical_state

if TYPE_CHECKING:
    from audit.fuzz_sequential import Sequential, Walk


class MismatchError(AssertionError):
    """A backend is wrong at a step of a program.

    surface: gdn, conv, attention, "stray" for a write where none may be, or "refused".
    """

    def __init__(self, message: str, surface: str) -> None:
        super().__init__(message)
        self.surface = surface


class StepJudge:
    """Compares what a step computed and left. The oracle is asked where bits are not claimed, and now and then where
    they are: a chain that is wrong in the same way as the tree agrees with it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.contract = engine, engine.contract
        self._turn = engine.world.seed % 3 + 1
        self.by: Counter[str] = Counter()

    @property
    def compared(self) -> int:
        """Comparisons so far, of all surfaces."""
        return self.by.total()

    def _claims(self, surface: str) -> bool:
        return bool(self.contract.claim(surface) == "bitwise")

    def _oracles(self, actor: Actor, step: int) -> list[Oracle] | None:
        if all(map(self._claims, self.engine.surfaces)) and step != self._turn:
            return None
        layers = range(self.engine.world.dims.layers)
        return [oracle_of(actor, self.contract, layer, self.engine.surfaces) for layer in layers]

    def outputs(self, key: int, actor: Actor, walk: Walk, lo: int, hi: int, step: int) -> None:
        """Outputs lo..hi-1 of the batch are those of one request's rows, inactive ones unread."""
        oracles, rows = self._oracles(actor, step), actor.tree.active_rows
        for layer, outs in enumerate(self.engine.out):
            for surface in self.engine.surfaces:
                got, want = outs[surface][lo:hi], walk.out[layer][surface]
                same = self._claims(surface) and self._all_same(surface, got, want, rows)
                self._numbers(f"{surface} output of request {key}, layer {layer}", surface, got, rows)
                for row in rows if not same or oracles is not None else ():
                    where = f"{surface} output of request {key}, layer {layer}, row {row}"
                    if self._claims(surface) and not same:
                        self._same(where, surface, got[row], want[row])
                    if oracles is not None:
                        self._within(where, surface, got[row], oracles[layer].out[surface][row])

    @staticmethod
    def _numbers(where: str, surface: str, got: Tensor, rows: Sequence[int]) -> None:
        """Outputs are filled with NaN before a call: a kernel that writes none agrees in bits with its own step that
        writes none, and no operand of a program makes one."""
        unwritten = [row for row in rows if got[row].isnan().any()] if got.isnan().any() else []
        if unwritten:
            raise MismatchError(f"{where}, row {unwritten[0]} is not a number: was it written?", surface)

    def _all_same(self, surface: str, got: Tensor, want: Tensor, rows: Sequence[int]) -> bool:
        """Whether all rows have the same bits: then each counts as compared, else they must be looked at."""
        if len(rows) < len(got):
            got, want = got[list(rows)], want[list(rows)]
        same = alike(*self._plain(surface, got, want))
        self.by[surface] += len(rows) if same else 0
        return same

    def published(
        self, key: int, actor: Actor, want: Sequential, before: Request, states: Sequence[State], step: int
    ) -> None:
        """What a request was left with after its actor's path; the reference takes over what is only bounded."""
        at = want.where(before, before.length, before.length + len(actor.path))
        oracles = self._oracles(actor, step)
        for layer, state in enumerate(states):
            where = f"of request {key}, layer {layer}, after {len(actor.path)} tokens"
            if "gdn" in self.engine.surfaces:
                self._recurrent(f"state {where}", want, before.slot, layer, state, oracles, actor)
            if "conv" in self.engine.surfaces:
                self._same(f"history {where}", "conv", state.conv, want.pools.conv[layer, before.slot])
            if "attention" in self.engine.surfaces:
                self._kv(where, want, layer, at, oracles, actor)

    def _recurrent(
        self, where: str, want: Sequential, slot: int, layer: int, state: State, oracles: list[Oracle] | None,
        actor: Actor,
    ) -> None:  # fmt: skip
        held = canonical(want.pools.recurrent[layer, slot], self.contract).contiguous()
        if self._claims("gdn"):
            self._same(where, "gdn", state.recurrent, held)
        if oracles is not None:
            value, bound = oracles[layer].state[actor.path[-1]]
            error = torch.linalg.vector_norm(state.recurrent.double() - value, dim=-1)
            self._ratio(where, "gdn", ratios(error, bound))
        if not self._claims("gdn"):
            kept = state.recurrent.mT if self.contract.layout == "KV" else state.recurrent
            want.pools.recurrent[layer, slot] = kept.to(self.contract.state_dtype)

    def _kv(
        self, where: str, want: Sequential, layer: int, at: Tensor, oracles: list[Oracle] | None, actor: Actor
    ) -> None:
        live = self.engine.pools.cache
        if self._claims("attention"):
            self._same(f"keys {where}", "attention", live.k[layer, at], want.pools.cache.k[layer, at])
        for i, row in enumerate(actor.path if oracles is not None else ()):
            assert oracles is not None
            self._within(f"key {i} {where}", "attention", live.k[layer, at[i]], oracles[layer].keys[row])
        if not self._claims("attention"):
            want.pools.cache.k[layer, at] = live.k[layer, at]
        self._same(f"values {where}", "attention", live.v[layer, at], want.pools.cache.v[layer, at])

    def held(self, keys: Sequence[int], want: Sequential, what: str) -> None:
        """Some requests' states and KV are still what they were: compared together, one by one where that fails."""
        requests = [self.engine.requests[key] for key in keys]
        places = [want.where(request, 0, request.length) for request in requests]
        slots = [request.slot for request in requests]
        together = self._pairs(want, slots, torch.cat(places)) if keys else []
        if all(alike(*self._plain(surface, now, then)) for _, surface, now, then in together):
            for _, surface, _, _ in together:
                self.by[surface] += len(keys)
            return
        for key, slot, at in zip(keys, slots, places, strict=True):
            for name, surface, now, then in self._pairs(want, slot, at):
                self._same(f"{name} of request {key}, {what},", surface, now, then)

    def _pairs(self, want: Sequential, slots: int | list[int], at: Tensor) -> list[tuple[str, str, Tensor, Tensor]]:
        """What some state slots and flat KV slots hold, and what they must hold: name, surface, both."""
        live, due = self.engine.pools, want.pools
        pairs = (
            ("state", "gdn", live.recurrent, due.recurrent, slots),
            ("history", "conv", live.conv, due.conv, slots),
            ("keys", "attention", live.cache.k, due.cache.k, at),
            ("values", "attention", live.cache.v, due.cache.v, at),
        )
        return [(n, s, now[:, index], then[:, index]) for n, s, now, then, index in pairs if s in self.engine.surfaces]

    def is_held(self, key: int, want: Sequential) -> bool:
        """Whether the pools hold what a request must have."""
        request, live = self.engine.requests[key], self.engine.pools
        pairs = ((live.recurrent, want.pools.recurrent), (live.conv, want.pools.conv))
        return all(alike(a[:, request.slot], b[:, request.slot]) for a, b in pairs)

    def raw_differs(self, slot: int, layer: int, state: State) -> bool:
        """Whether the pool holds something else than was exported."""
        raw = canonical_state(self.engine.pools, self.contract, slot, layer)
        return not (alike(raw.recurrent, state.recurrent) and alike(raw.conv, state.conv))

    def _same(self, where: str, surface: str, got: Tensor, want: Tensor) -> None:
        self.by[surface] += 1
        got, want = self._plain(surface, got, want)
        if not alike(got, want):
            at = tuple(differing_mask(got, want).nonzero()[0].tolist())
            raise MismatchError(f"{where} differs from sequential decoding: element {list(at)} is {_number(got[at])}, "
                           f"expected {_number(want[at])}", surface)  # fmt: skip

    def _plain(self, surface: str, got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
        """What is compared: without the sign of zeros where the contract leaves it open."""
        unsigned = self.contract.zeros == "unsigned" and surface == "gdn"
        return (got + 0.0, want + 0.0) if unsigned else (got, want)

    def _within(self, where: str, surface: str, got: Tensor, oracle: Bounded) -> None:
        value, bound = oracle
        self._ratio(where, surface, ratios(got.double() - value, bound))

    def _ratio(self, where: str, surface: str, ratio: Tensor) -> None:
        self.by[surface] += 1
        if not float(ratio.max()) <= 1:
            raise MismatchError(
                f"{where} is {float(ratio.max()):.3g} derived bounds away from the float64 oracle", surface
            )


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape, dtype and device hold the same bits: `same_bits` for the small ones here, of
    which a program compares a hundred."""
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in INTEGERS:
        return same_bits(a, b)
    kind = INTEGERS[a.dtype]
    return torch.equal(a.view(kind), b.view(kind))


def _number(x: Tensor) -> str:
    return repr(float(x))
