"""Relations that hold between runs of a right backend, whatever its arithmetic: nothing here knows a right answer.

Each relation is one function (backend, seed, world) -> findings, and a line in `RELATIONS`. Bits are demanded where the
backend claims them, twice the derived bound elsewhere (`audit.play`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from audit.engine import Engine
from audit.guard import Snapshot
from audit.play import Actor, Comparison, Played, changed_rows, outputs, picked, play, scaled
from audit.report import Finding
from audit.world import DIMS_NANO, Draws, Past, World, joined
from lumotree.backends.protocol import GdnOps, StepOps, complete_surfaces
from lumotree.contract import Contract, Dims
from lumotree.errors import InputError
from lumotree.reference.oracle import gdn_oracle, published
from lumotree.reference.rounding import to_bf16
from lumotree.tree import Tree
from lumotree.tree_named import chain, random_tree

Body = Callable[[Any, int, World, Comparison], None]


@dataclass(frozen=True)
class Relation:
    """A metamorphic check. name: what findings are called by, `{surface}.{name}`; surfaces: those it looks at;
    needs_trees: whether a contract that takes only chains cannot show it."""

    name: str
    statement: str
    body: Body
    surfaces: tuple[str, ...] = ("gdn", "conv", "attention")
    needs_trees: bool = True

    def why_not(self, backend: Any) -> str:
        """Why the relation says nothing about a backend; empty if it applies."""
        if self.needs_trees and not backend.contract.trees:
            return "the contract takes no trees"
        if backend.contract.max_rows < ROWS:
            return f"the contract takes {backend.contract.max_rows} rows, the relation needs {ROWS}"
        if not set(self.surfaces) & set(complete_surfaces(backend)):
            return f"the backend has none of {', '.join(self.surfaces)}"
        if self.name == "layouts" and _twin(backend) is None:
            return "the backend cannot be made with the other state layout"
        if self.name == "chunk_split" and _rounds_late(backend):
            return "a bf16 pool behind an fp32 carry rounds where a chunk ends"
        return ""

    def run(self, backend: Any, seed: int, dims: Dims = DIMS_NANO, name: str = "BACKEND") -> list[Finding]:
        """What breaks the relation on the draws of `seed`. name: the backend's, for the command that reproduces it.

        Raises InputError if the relation does not apply or the backend refuses the calls.
        """
        if reason := self.why_not(backend):
            raise InputError(f"relation {self.name}: {reason}")
        covered = [s for s in complete_surfaces(backend) if s in self.surfaces]
        command = f"lumotree-audit fuzz --backend {name} --relation {self.name} --seed {seed}"
        seen = Comparison(self.name, backend.contract, covered, f"relation/{self.name}/{seed}", command)
        self.body(backend, seed, World(dims, seed, rows=2 * ROWS), seen)
        return seen.findings


#: Rows of one request in a scene, at most; chains stay longer than the convolution is wide.
ROWS = 6


def _rng(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, 90, stream])


def _tree(seed: int, stream: int, rows: int) -> Tree:
    return random_tree(_rng(seed, stream), rows, 0.0)


def _actor(draws: Draws, tree: Tree, path: tuple[int, ...], stream: int, length: int | None = None) -> Actor:
    """An actor with a random past of 0 to 4 tokens."""
    seed = draws.world.seed
    tokens = int(_rng(seed, stream).integers(0, 5)) if length is None else length
    return Actor(draws.past(tokens, stream), tree, draws.rows(tree.n, stream), path)


def _deepest(tree: Tree) -> tuple[int, ...]:
    return tree.path(max(tree.leaves, key=lambda row: int(tree.depth[row])))


def _same(rows: tuple[int, ...] | range) -> list[tuple[int, int]]:
    return [(row, row) for row in rows]


def _chain(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    tree = chain(ROWS - 1)
    actor = _actor(Draws(world), tree, tuple(range(tree.n)), 1)
    (tree_side,) = play(backend, world, [actor])
    engine = Engine(backend, world)
    engine.admit(0, actor.past)
    steps = []
    for row in range(tree.n):
        engine.native([Actor(actor.past, chain(1), picked(actor.rows, [row]), (0,)).turn(0)])
        steps.append(outputs(engine, 0, 1))
    out = [{s: torch.cat([o[layer][s] for o in steps]) for s in engine.surfaces} for layer in range(len(steps[0]))]
    native = Played(out, engine.read(0))
    seen.outputs(actor, tree_side, native, _same(range(tree.n)))
    seen.pasts(actor, tree_side.past, native.past)


def _sibling_added(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    tree = _tree(seed, 2, ROWS - 1)
    path, draws = _deepest(tree), Draws(world)
    actor = _actor(draws, tree, path, 2)
    (without,) = play(backend, world, [actor])
    for step in range(1, len(path)):
        parents = [*tree.parents.tolist(), path[step - 1]]
        rows = picked(draws.rows(tree.n + 1, 3), [tree.n])
        both = [joined([a, b]) for a, b in zip(actor.rows, rows, strict=True)]
        (with_one,) = play(backend, world, [replace(actor, tree=Tree.make(parents), rows=both)])
        seen.outputs(actor, with_one, without, _same(range(tree.n)))
        seen.pasts(actor, with_one.past, without.past)


def _siblings_reordered(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    """A root with three children, the accepted one of them first, in the middle, last; its child goes with it."""
    tree = Tree.make([-1, 0, 0, 0, 1])
    actor = _actor(Draws(world), tree, (0, 1, 4), 4)
    (first,) = play(backend, world, [actor])
    for order, place in (((0, 2, 1, 3, 4), 2), ((0, 2, 3, 1, 4), 3)):
        other = replace(actor, tree=Tree.make([-1, 0, 0, 0, place]), rows=picked(actor.rows, order),
                        path=(0, place, 4))  # fmt: skip
        (moved,) = play(backend, world, [other])
        seen.outputs(actor, moved, first, [(order.index(row), row) for row in range(tree.n)])
        seen.pasts(actor, moved.past, first.past)


def _non_ancestors(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    tree = _tree(seed, 5, ROWS)
    draws = Draws(world)
    others = scaled(draws.rows(tree.n, 6), 300.0)
    for leaf in tree.leaves:
        path = tree.path(leaf)
        off = [row for row in range(tree.n) if row not in path]
        if off:
            actor = _actor(draws, tree, path, 5)
            (before,) = play(backend, world, [actor])
            (after,) = play(backend, world, [replace(actor, rows=changed_rows(actor.rows, others, off))])
            seen.outputs(actor, after, before, _same(path))
            seen.pasts(actor, after.past, before.past)


def _three(world: World, stream: int) -> list[Actor]:
    """Three requests of different trees, pasts and accepted lengths."""
    draws = Draws(world)
    trees = [_tree(world.seed, stream, 4), Tree.make([-1]), _tree(world.seed, stream + 1, 3)]
    paths = [_deepest(trees[0]), (0,), trees[2].path(trees[2].leaves[0])]
    return [_actor(draws, t, p, stream + i) for i, (t, p) in enumerate(zip(trees, paths, strict=True))]


def _alone(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    actors = _three(world, 10)
    together = play(backend, world, actors)
    for key, actor in enumerate(actors):
        (alone,) = play(backend, world, actors, order=[key])
        seen.outputs(actor, together[key], alone, _same(range(actor.tree.n)), key)
        seen.pasts(actor, together[key].past, alone.past, key)


def _permuted(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    """A 3-cycle of the batch, and other slots and pages."""
    actors = _three(world, 20)
    plain = play(backend, world, actors)
    for order, layout in (((1, 2, 0), 0), ((0, 1, 2), 1), ((2, 0, 1), 2)):
        moved = play(backend, replace(world, layout=layout), actors, order=order)
        for key, actor in enumerate(actors):
            seen.outputs(actor, moved[key], plain[key], _same(range(actor.tree.n)), key)
            seen.pasts(actor, moved[key].past, plain[key].past, key)


def _chunk_split(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    tree = chain(ROWS)
    actor = _actor(Draws(world), tree, tuple(range(ROWS)), 30)
    (whole,) = play(backend, world, [actor])
    for cut in range(1, ROWS):
        engine = Engine(backend, world)
        engine.admit(0, actor.past)
        parts = []
        for rows in (range(cut), range(cut, ROWS)):
            part = Actor(actor.past, chain(len(rows)), picked(actor.rows, rows), tuple(range(len(rows))))
            running = engine.verify([part.turn(0)])
            parts.append(outputs(engine, 0, len(rows)))
            engine.publish(running, [part.path])
        out = [{s: torch.cat([p[layer][s] for p in parts]) for s in engine.surfaces} for layer in range(len(parts[0]))]
        split = Played(out, engine.read(0))
        seen.outputs(actor, split, whole, _same(range(ROWS)))
        seen.pasts(actor, split.past, whole.past)


def _ungated(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    """g = 0, decay exactly 1: the plain delta rule in float64."""
    draws, path = Draws(world), tuple(range(4))
    base = _actor(draws, chain(4), path, 40, length=3)
    ops = [StepOps(r.gdn and replace(r.gdn, a=torch.full_like(r.gdn.a, -200.0)), r.conv, r.attention)
           for r in base.rows]  # fmt: skip
    actor = replace(base, rows=ops)
    (got,) = play(backend, world, [actor])
    for layer, part in enumerate(ops):
        assert part.gdn is not None
        *_, last = gdn_oracle(chain(4), _start(backend, base.past, layer), part.gdn, backend.contract)
        bound = published(last, backend.contract)[1]
        want = delta_rule(_start(backend, base.past, layer), part.gdn, backend.contract)
        error = torch.linalg.vector_norm(got.past.recurrent[layer].double() - want, dim=-1)
        if not bool((error <= bound).all()):
            seen.add("gdn", float(error.max()), f"{float(bound.flatten()[int(error.argmax())])!r} in L2", layer=layer)


def _start(backend: Any, past: Past, layer: int) -> torch.Tensor:
    return past.recurrent[layer].to(backend.contract.state_dtype).double()


def delta_rule(R: torch.Tensor, ops: GdnOps, contract: Contract) -> torch.Tensor:
    """State float64 `[HV, dv, dk]` after `R <- R + beta (v - R k) k^T` over all rows: no gate anywhere.

    Rounds to bf16 what the contract declares to be rounded.
    """
    hk, hv = ops.k.shape[1], ops.v.shape[1]
    source = torch.tensor([h % hk if contract.head_map == "tiled" else h // (hv // hk) for h in range(hv)])
    for t in range(len(ops.k)):
        k, beta = ops.k[t].double(), torch.sigmoid(ops.b[t].double())[:, None]
        k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt())[source]
        k = to_bf16(k) if contract.norm == "bf16" else k
        beta = to_bf16(beta) if contract.beta == "bf16" else beta
        R = R + (beta * (ops.v[t].double() - (R @ k[..., None])[..., 0]))[..., None] * k[:, None]
        R = to_bf16(R) if contract.carry == "bf16" else R
    return R


def _twin(backend: Any) -> Any:
    """The same backend with its state pool in the other layout, or None where it cannot be made."""
    kind, contract = type(backend), backend.contract
    try:
        if "contract" not in inspect.signature(kind).parameters:
            return None
        return kind(contract=replace(contract, layout="KV" if contract.layout == "VK" else "VK"))
    except (InputError, TypeError, ValueError):
        return None


def _layouts(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    """Square states: a layout that is not honoured does not even show in the shapes."""
    dims = world.dims
    square = replace(world, dims=replace(dims, dv=dims.dk))
    tree = _tree(seed, 50, 4)
    actor = _actor(Draws(square), tree, _deepest(tree), 50, length=3)
    (mine,), (other,) = play(backend, square, [actor]), play(_twin(backend), square, [actor])
    loose = replace(seen, contract=replace(seen.contract, claims="algebra"))  # other sums, other low-order bits
    loose.outputs(actor, other, mine, _same(range(tree.n)))
    loose.pasts(actor, other.past, mine.past)


def _replay_twice(backend: Any, seed: int, world: World, seen: Comparison) -> None:
    """Publish, put pools and workspace back, publish again: the same bits, also of an algebra."""
    actors = _three(world, 60)
    engine = Engine(backend, world)
    for key, actor in enumerate(actors):
        engine.admit(key, actor.past)
    running = engine.verify([actor.turn(key) for key, actor in enumerate(actors)])
    kept = Snapshot(engine.pools), Snapshot(engine.ws), dict(engine.requests)
    results = []
    for _ in range(2):
        engine.publish(running, [actor.path for actor in actors])
        results.append([engine.read(key) for key in range(len(actors))])
        kept[0].restore()
        kept[1].restore()
        engine.requests = dict(kept[2])
    strict = replace(seen, contract=replace(seen.contract, claims="bitwise", algebra=(), carry="bf16"))
    for key, actor in enumerate(actors):
        strict.pasts(actor, results[1][key], results[0][key], key)


def _rounds_late(backend: Any) -> bool:
    return bool(backend.contract.state_dtype == torch.bfloat16 and backend.contract.carry == "fp32")


RELATIONS: dict[str, Relation] = {
    r.name: r
    for r in (
        Relation("chain", "a chain-shaped tree equals one-token decoding", _chain, needs_trees=False),
        Relation("sibling_added", "a rejected sibling, added or removed, changes nothing", _sibling_added),
        Relation("siblings_reordered", "the order of siblings changes nothing", _siblings_reordered),
        Relation("non_ancestors", "operands of a row that is no ancestor change nothing", _non_ancestors),
        Relation("alone", "a request in a batch equals the request alone", _alone),
        Relation("permuted", "the order of requests, their slots and pages change nothing", _permuted),
        Relation("chunk_split", "a chunk in two parts equals the chunk", _chunk_split, needs_trees=False),
        Relation("ungated", "with g = 0 the update is the ungated delta rule", _ungated, ("gdn",), False),
        Relation("layouts", "both state layouts agree", _layouts, ("gdn",)),
        Relation("replay_twice", "a replay from a restored state leaves the same again", _replay_twice),
    )
}
