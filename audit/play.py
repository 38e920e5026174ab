"""One verification and publication as a function: actors in, what they computed and were left with out.

Metamorphic relations compare two such scenes. Where the backend claims bits, bits are compared; where it claims only an
algebra, each side may be off by its derived bound, so two sides by twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from audit.distance import differing_mask, ratios, same_bits
from audit.engine import Engine, Turn
from audit.report import Finding
from audit.world import Past, World, joined, with_rows
from lumotree.backends.protocol import StepOps
from lumotree.contract import Contract
from lumotree.reference.oracle import gdn_oracle, published
from lumotree.reference.oracle_tokens import attention_oracle, conv_oracle
from lumotree.tree import Tree


@dataclass(frozen=True)
class Actor:
    """One request of a scene: its past, tree, operands (a StepOps of N rows a layer) and the path it accepts."""

    past: Past
    tree: Tree
    rows: list[StepOps]
    path: tuple[int, ...]

    def turn(self, key: int) -> Turn:
        """Its turn as request `key`."""
        return Turn(key, self.tree, self.rows)


@dataclass(frozen=True)
class Played:
    """What an actor computed and was left with: outputs by layer and surface `[N, ..]`, and its past afterwards."""

    out: list[dict[str, Tensor]]
    past: Past


def play(
    backend: Any,
    world: World,
    actors: Sequence[Actor],
    order: Sequence[int] | None = None,
    placement: str = "scattered",
) -> list[Played]:
    """Admit all actors, verify and publish those in `order` (all of them unless given), in that order."""
    engine = Engine(backend, world)
    for key, actor in enumerate(actors):
        engine.admit(key, actor.past)
    chosen = list(range(len(actors))) if order is None else list(order)
    running = engine.verify([actors[key].turn(key) for key in chosen], placement)
    spans = {key: running.offsets[i : i + 2] for i, key in enumerate(chosen)}
    outs = {key: outputs(engine, *spans[key]) for key in chosen}
    engine.publish(running, [actors[key].path for key in chosen])
    return [Played(outs[key], engine.read(key)) for key in sorted(chosen)]


def outputs(engine: Engine, lo: int, hi: int) -> list[dict[str, Tensor]]:
    """Copies of some rows of the outputs."""
    return [{surface: out[lo:hi].clone() for surface, out in outs.items()} for outs in engine.out]


#: A float64 value and the most by which the backend's may differ from it.
Bounded = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Oracle:
    """What one layer of an actor must give, by active row: outputs of each surface; the state `[HV, dv, dk]` with the
    bound of its value rows in L2 norm `[HV, dv]`; rotated keys."""

    out: dict[str, dict[int, Bounded]]
    state: dict[int, Bounded]
    keys: dict[int, Bounded]


def oracle_of(actor: Actor, contract: Contract, layer: int, surfaces: Sequence[str]) -> Oracle:
    """The float64 oracle of every active row."""
    ops, past, found = actor.rows[layer], actor.past, Oracle({s: {} for s in surfaces}, {}, {})
    tree = Tree.make(actor.tree.parents, active=actor.tree.active, prefix_len=past.length)
    if "gdn" in surfaces and ops.gdn is not None:
        start = past.recurrent[layer].to(contract.state_dtype).float()
        for row in gdn_oracle(tree, start, ops.gdn, contract):
            found.out["gdn"][row.row], found.state[row.row] = (row.out, row.out_bound), published(row, contract)
    if "conv" in surfaces and ops.conv is not None:
        conv = conv_oracle(tree, past.conv[layer], ops.conv, contract)
        found.out["conv"].update(zip(conv.rows, zip(conv.out, conv.bound, strict=True), strict=True))
    if "attention" in surfaces and ops.attention is not None:
        seen = attention_oracle(tree, ops.attention, past.k[layer], past.v[layer], contract.probs)
        found.out["attention"].update(zip(seen.rows, zip(seen.out, seen.bound, strict=True), strict=True))
        found.keys.update(zip(seen.rows, zip(seen.keys, seen.keys_bound, strict=True), strict=True))
    return found


@dataclass
class Comparison:
    """Collects where two scenes of one relation disagree."""

    relation: str
    contract: Contract
    surfaces: Sequence[str]
    case: str
    reproduce: str
    findings: list[Finding] = field(default_factory=list)

    def bitwise(self, surface: str) -> bool:
        """Whether the backend claims bits on a surface."""
        return self.contract.claim(surface) == "bitwise"

    def outputs(
        self, actor: Actor, got: Played, want: Played, rows: Sequence[tuple[int, int]], request: int = 0
    ) -> None:
        """Outputs row by row; `rows`: (row in `got`, row in `want`), the latter also the actor's row."""
        for layer in range(len(got.out)):
            bounds = None if all(map(self.bitwise, self.surfaces)) else oracle_of(
                actor, self.contract, layer, self.surfaces)  # fmt: skip
            for surface in self.surfaces:
                for mine, his in rows:
                    a, b = got.out[layer][surface][mine], want.out[layer][surface][his]
                    allowed = None if bounds is None else bounds.out[surface][his][1]
                    self._judge(surface, a, b, allowed, request, layer, mine)

    def pasts(self, actor: Actor, got: Past, want: Past, request: int = 0, last: int | None = None) -> None:
        """States, histories and KV after publication. last: the row whose bounds hold, if not the path's end."""
        end = actor.path[-1] if last is None else last
        for layer in range(len(got.recurrent)):
            claimed = self.bitwise("gdn") and self.bitwise("attention")
            bounds = None if claimed else oracle_of(actor, self.contract, layer, self.surfaces)
            if "gdn" in self.surfaces:
                allowed = None if bounds is None else bounds.state[end][1][..., None].expand_as(got.recurrent[layer])
                self._judge("gdn", got.recurrent[layer], want.recurrent[layer], allowed, request, layer)
            if "conv" in self.surfaces:
                self._judge("conv", got.conv[layer], want.conv[layer], None, request, layer)
            if "attention" in self.surfaces:
                self._kv(actor, got, want, bounds, request, layer)

    def _kv(self, actor: Actor, got: Past, want: Past, bounds: Oracle | None, request: int, layer: int) -> None:
        allowed = None
        if bounds is not None:
            old = torch.zeros(got.length - len(actor.path), *got.k.shape[2:], dtype=torch.float64)
            allowed = torch.cat([old, *(bounds.keys[row][1][None] for row in actor.path)])
        self._judge("attention", got.k[layer], want.k[layer], allowed, request, layer)
        self._judge("attention", got.v[layer], want.v[layer], None, request, layer)

    def _judge(
        self, surface: str, got: Tensor, want: Tensor, bound: Tensor | None, request: int, layer: int,
        row: int | None = None,
    ) -> None:  # fmt: skip
        """Bits where they are claimed, or where nothing is computed (bound None); else twice the bound."""
        if self.contract.zeros == "unsigned" and surface == "gdn":
            got, want = got + 0.0, want + 0.0
        if not bool(got.isfinite().all()):  # two that are wrong alike, or that nobody wrote, would agree
            at = int((~got.isfinite()).flatten().nonzero()[0])
            self.add(surface, float(got.flatten()[at]), "a finite number", request, layer, row)
            return
        if same_bits(got, want):
            return
        if bound is not None and not self.bitwise(surface):
            ratio = ratios(got.double() - want.double(), 2 * bound.reshape(got.shape))
            if float(ratio.max()) <= 1:
                return
            at, allowed = int(ratio.argmax()), f"{float(want.flatten()[int(ratio.argmax())])!r} within twice the bound"
        else:
            at = int(differing_mask(got, want).flatten().nonzero()[0])
            allowed = repr(float(want.flatten()[at]))
        self.add(surface, float(got.flatten()[at]), allowed, request, layer, row)

    def add(
        self, surface: str, got: str | float, allowed: str, request: int = 0, layer: int = 0, row: int | None = None
    ) -> None:
        """Add a finding."""
        check = f"{surface}.{self.relation}"
        self.findings.append(Finding(check, self.case, self.reproduce, request, layer, row, None, got, allowed))


def changed_rows(rows: list[StepOps], other: list[StepOps], which: Sequence[int]) -> list[StepOps]:
    """The operands with those of some rows taken from `other`."""
    return [_changed(mine, his, which) for mine, his in zip(rows, other, strict=True)]


def _changed(mine: StepOps, his: StepOps, which: Sequence[int]) -> StepOps:
    def part(a: Any, b: Any) -> Any:
        if a is None:
            return None
        index = torch.arange(len(next(iter(vars(a).values()))))
        index[list(which)] = len(index) + torch.tensor(list(which))
        return with_rows(joined([a, b]), index)

    return StepOps(*(part(getattr(mine, name), getattr(his, name)) for name in vars(mine)))


def picked(rows: list[StepOps], index: Sequence[int]) -> list[StepOps]:
    """Operands of some rows, in the given order."""
    return [with_rows(layer, list(index)) for layer in rows]


def scaled(rows: list[StepOps], factor: float) -> list[StepOps]:
    """The same operands with values, convolution inputs and attention values made larger."""
    return [
        StepOps(
            ops.gdn and replace(ops.gdn, v=ops.gdn.v * factor),
            ops.conv and replace(ops.conv, x=ops.conv.x * factor),
            ops.attention and replace(ops.attention, v=ops.attention.v * factor),
        )
        for ops in rows
    ]
