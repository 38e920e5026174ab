"""Holds what a backend did on a case against the truth of that case. Same code for the audit and for its controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from audit.distance import differing_cells, differing_mask, paired_rule, same_bits
from audit.errors_of import HeadErrors, UnitStatistics, output_errors, state_errors
from audit.guard import same_except
from audit.native import RowTrace, rows_of
from audit.operands import EXACT_STATE_UNIT, on_grid
from audit.stage import Stage
from audit.tally import Place, Tallies
from audit.truth import Truth, canonical
from lumotree.contract import Contract
from lumotree.reference.rounding import to_bf16
from lumotree.state import State

Key = tuple[int, int]


def rounds_state(contract: Contract) -> bool:
    """Whether a declared bf16 rounding touches keys or states, so that exact-grid values do not survive."""
    return "bf16" in (contract.carry, contract.norm) or contract.state_dtype == torch.bfloat16


def exact_width(n: int) -> bool:
    """Whether n^-1/2 is exact in fp32, so that outputs of exact-grid cases are exact as well."""
    return n & (n - 1) == 0 and n.bit_length() % 2 == 1


class Judge:
    """Judges one stage; `tallies` collects what is seen, `statistics` the errors of the envelope's arm."""

    def __init__(self, stage: Stage, truth: dict[Key, Truth], tallies: Tallies, *, arm: str = "verify") -> None:
        self.stage, self.case, self.truth, self.tallies, self.arm = stage, stage.case, truth, tallies, arm
        self.contract: Contract = stage.case.contract
        self.statistics = UnitStatistics()
        # bf16 states leave the grid: 24 bits are exact, 8 are not.
        self.exact = self.case.spec.regime == "exact" and not rounds_state(self.contract)

    def _place(self, check: str, **where: object) -> Place:
        return Place(check, self.case.spec.id, **where)  # type: ignore[arg-type]

    def native(self) -> None:
        """The one-token chain itself against the oracle: outputs, states and rotated keys; it changes nothing else."""
        for (request, layer), truth in self.truth.items():
            self._all_untouched(self.stage.surfaces, truth.native.damage)
            for row in self.case.trees[request].active_rows:
                if "gdn" in self.stage.surfaces:
                    self._native_gdn(truth, request, layer, row)
                for surface in ("conv", "attention"):
                    if surface in self.stage.surfaces:
                        self._native_other(truth, surface, request, layer, row)

    def _native_gdn(self, truth: Truth, request: int, layer: int, row: int) -> None:
        want, native = truth.gdn[row], truth.native
        got_out, got_state = native.gdn_out[row], native.recurrent[row]
        assert want is not None and got_out is not None and got_state is not None
        out = output_errors(got_out, *want.native_out)
        state = want.native
        for errors in (out, state):
            self._derived("gdn.native.derived", errors, request, layer, row)
        if self.arm == "native":
            self.statistics.add("gdn.out", out)
            self.statistics.add("gdn.state", state)
        if self.exact:
            self._exact_state(canonical(got_state, self.contract), self._oracle_state(truth, row), request, layer, row)
            self._exact_out("gdn", got_out, want.out, self.case.dims.dk, request, layer, row)

    @staticmethod
    def _oracle_state(truth: Truth, row: int) -> Tensor:
        assert truth.gdn_oracle is not None
        return truth.gdn_oracle.state(row)

    def _native_other(self, truth: Truth, surface: str, request: int, layer: int, row: int) -> None:
        got, want, bound = self._other(truth, surface, row, native=True)
        errors = output_errors(got, want, bound)
        self._derived(f"{surface}.native.derived", errors, request, layer, row)
        if self.arm == "native":
            self.statistics.add(f"{surface}.out", errors)
        if self.exact:
            self._exact_out(surface, got, want, self._width(surface), request, layer, row)
        if surface == "attention":
            key = truth.native.k[row]
            assert key is not None
            self._keys(truth, key, "attention.native.derived", request, layer, row)

    def _width(self, surface: str) -> int:
        return {"gdn": self.case.dims.dk, "conv": 1, "attention": self.case.dims.head_dim}[surface]

    def _other(self, truth: Truth, surface: str, row: int, native: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Native output (or an empty one), oracle and bound of conv or attention, each `[heads, n]`."""
        oracle = truth.conv if surface == "conv" else truth.attention
        trace = truth.native.conv_out if surface == "conv" else truth.native.attention_out
        assert oracle is not None
        at, got = oracle.rows.index(row), trace[row]
        assert got is not None
        shape = (1, -1) if surface == "conv" else got.shape
        return got.view(shape), oracle.out[at].view(shape), oracle.bound[at].view(shape)

    def _keys(self, truth: Truth, key: Tensor, check: str, request: int, layer: int, row: int) -> None:
        assert truth.attention is not None
        at = truth.attention.rows.index(row)
        # A key differs by nothing, or, beside a rounding tie, by the oracle's allowance; a floor keeps 0 / 0 out.
        errors = output_errors(key, truth.attention.keys[at], truth.attention.keys_bound[at])
        self._derived(check, errors, request, layer, row)

    def _derived(self, check: str, errors: HeadErrors, request: int, layer: int, row: int) -> None:
        self.tallies[check].add(1, ratio=errors.ratio)
        if not errors.ratio <= 1:
            where = {"request": request, "layer": layer, "row": row, "head": errors.worst_head}
            got = float(errors.largest[errors.worst_head])
            self.tallies[check].fail(self._place(check, **where, got=got, allowed=f"{1 / errors.ratio:.2e} of it"))

    def _exact_state(self, got: Tensor, want: Tensor, request: int, layer: int, row: int) -> None:
        self._exact("gdn", got.double(), on_grid(want, EXACT_STATE_UNIT), request, layer, row)

    def _exact_out(
        self, surface: str, got: Tensor, want: Tensor, width: int, request: int, layer: int, row: int
    ) -> None:
        if not exact_width(width):
            return
        if surface == "gdn":  # a query has entries 1/2 and dk^-1/2
            want = on_grid(want, EXACT_STATE_UNIT / 2 * width**-0.5)
        self._exact(surface, got.double(), to_bf16(want).double(), request, layer, row)

    def _exact(self, surface: str, got: Tensor, want: Tensor, request: int, layer: int, row: int) -> None:
        tally = self.tallies[f"{surface}.exact"]
        wrong = got != want
        right = not bool(wrong.any())
        tally.add(1, int(right))
        if not right:
            at = wrong.nonzero()[0].tolist()
            values = {"got": float(got[tuple(at)]), "allowed": float(want[tuple(at)])}
            tally.fail(self._place(tally.check, request=request, layer=layer, row=row, head=at[0], **values))

    def outputs(self) -> None:
        """Outputs of active rows against the chain bit by bit and against the oracle, and what must be unchanged."""
        for request, layer in self.truth:
            lo, hi = self.case.offsets[request : request + 2]
            for surface in self.stage.surfaces:
                self.outputs_of(surface, self.stage.out[layer][surface][lo:hi], request, layer)
        self._unchanged_by_verify()

    def outputs_of(self, surface: str, got: Tensor, request: int, layer: int) -> None:
        """Outputs `[N, ..]` of one request against chain and oracle."""
        self.same_outputs(f"{surface}.out.bitwise", surface, got, request, layer)
        self._oracle_outputs(self.truth[request, layer], surface, got, request, layer)

    def _native_rows(self, truth: Truth, surface: str, rows: Sequence[int]) -> Tensor:
        trace = truth.native
        values = {"gdn": trace.gdn_out, "conv": trace.conv_out, "attention": trace.attention_out}[surface]
        return torch.stack(rows_of(values, rows))

    def same_outputs(self, check: str, surface: str, got: Tensor, request: int, layer: int) -> None:
        """Active rows of one request's outputs `[N, ..]` against the chain, bit by bit."""
        rows = list(self.case.trees[request].active_rows)
        want = self._native_rows(self.truth[request, layer], surface, rows)
        self._same_rows(check, got[rows], want, rows, request, layer)

    def _same_rows(self, check: str, got: Tensor, want: Tensor, rows: Sequence[int], request: int, layer: int) -> None:
        tally = self.tallies[check]
        if self.contract.zeros == "unsigned" and check.startswith("gdn."):
            got, want = got + 0.0, want + 0.0  # -0 + 0 is +0, every other value keeps its bits
        if same_bits(got, want):
            tally.add(len(rows), len(rows))
            return
        differing = differing_cells(got, want, 1)
        tally.add(len(rows), int((differing == 0).sum()))
        for i in differing.nonzero()[:, 0].tolist():
            at = differing_mask(got[i], want[i]).nonzero()[0].tolist()
            head = at[0] if got.dim() > 2 else None
            values = {"got": float(got[i][tuple(at)]), "allowed": float(want[i][tuple(at)])}
            tally.fail(self._place(check, request=request, layer=layer, row=rows[i], head=head, **values))

    def _oracle_outputs(self, truth: Truth, surface: str, got: Tensor, request: int, layer: int) -> None:
        for row in self.case.trees[request].active_rows:
            if surface == "gdn":
                want = truth.gdn[row]
                native = truth.native.gdn_out[row]
                assert want is not None and native is not None
                errors = output_errors(got[row], want.out, want.out_bound)
                self._paired(errors, output_errors(native, *want.native_out), request, layer, row)
                oracle = want.out
            else:
                _, oracle, bound = self._other(truth, surface, row, native=False)
                errors = output_errors(got[row].view(oracle.shape), oracle, bound)
            self._derived(f"{surface}.out.derived", errors, request, layer, row)
            if self.arm == "verify":
                self.statistics.add(f"{surface}.out", errors)
            if self.exact:
                self._exact_out(surface, got[row].view(oracle.shape), oracle, self._width(surface), request, layer, row)

    def _paired(self, tree: HeadErrors, native: HeadErrors, request: int, layer: int, row: int) -> None:
        tally = self.tallies["gdn.paired"]
        rms = paired_rule(tree.rms, native.rms, native.oracle_largest)
        largest = paired_rule(tree.largest, native.largest, native.oracle_largest)
        worst = torch.maximum(rms, largest)
        tally.add(1, ratio=float(worst.max()))
        if float(worst.max()) > 1:
            tally.fail(self._place(tally.check, request=request, layer=layer, row=row, head=int(worst.argmax())))

    def _unchanged_by_verify(self) -> None:
        changed = self.stage.inputs.changed()
        broken = self.case.arena.broken()
        own = self.case.batch.row_slot.long()
        pools, before = self.case.pools, self.stage.before
        damage: dict[str, list[str]] = {"gdn": [], "conv": [], "attention": []}
        for name in [*changed, *(f"guard of {b}" for b in broken)]:
            damage[_surface_of(name)].append(name)
        if not same_bits(pools.recurrent, before.saved("recurrent")):
            damage["gdn"].append("pool.recurrent")
        if not same_bits(pools.conv, before.saved("conv")):
            damage["conv"].append("pool.conv")
        for name, now in (("k", pools.cache.k), ("v", pools.cache.v)):
            if not same_except(now, before.saved(f"cache.{name}"), own):
                damage["attention"].append(f"cache.{name}")
        self._all_untouched(self.stage.surfaces, damage)

    def _all_untouched(self, surfaces: Sequence[str], damage: dict[str, list[str]]) -> None:
        """One cell a surface; damage to what belongs to none of them (metadata, a foreign pool) is the first one's."""
        foreign = [name for surface, names in damage.items() if surface not in surfaces for name in names]
        for i, surface in enumerate(surfaces):
            self._untouched(surface, [*damage[surface], *(foreign if i == 0 else ())])

    def _untouched(self, surface: str, damage: Sequence[str], **where: int) -> None:
        tally = self.tallies[f"{surface}.untouched"]
        tally.add(1, int(not damage))
        if damage:
            got = "changed: " + ", ".join(damage)
            tally.fail(self._place(tally.check, got=got, allowed="unchanged", **where))

    def published(self, paths: Sequence[Sequence[int]]) -> None:
        """Every surface of every request after publishing `paths`, and everything that is no destination."""
        self.published_states(paths)
        self._unchanged_by_publish(paths)

    def published_states(self, paths: Sequence[Sequence[int]]) -> None:
        """Every surface of every request after publishing `paths`."""
        for request, path in enumerate(paths):
            for layer in range(self.case.dims.layers):
                self._published(self.truth[request, layer], request, layer, path)

    def other_layers(self, published: Sequence[int]) -> None:
        """Layers that were not to be published hold what verification left."""
        kept = [layer for layer in range(self.case.dims.layers) if layer not in published]
        pools, verified = self.case.pools, self.stage.verified
        damage: dict[str, list[str]] = {"gdn": [], "conv": [], "attention": []}
        for name, surface, now in (
            ("recurrent", "gdn", pools.recurrent),
            ("conv", "conv", pools.conv),
            ("cache.k", "attention", pools.cache.k),
            ("cache.v", "attention", pools.cache.v),
        ):
            damage[surface] += [
                f"{name} layer {layer}" for layer in kept if not same_bits(now[layer], verified.saved(name)[layer])
            ]
        self._all_untouched(self.stage.publishes, damage)

    def _published(self, truth: Truth, request: int, layer: int, path: Sequence[int]) -> None:
        state = self.stage.export(request, layer)
        if not path:
            self._no_op(state, request, layer)
            return
        if "gdn" in self.stage.publishes:
            self._published_recurrent(truth, state.recurrent, request, layer, path[-1])
        if "conv" in self.stage.publishes:
            want = truth.native.conv[path[-1]]
            assert want is not None
            self._same_rows("conv.state.bitwise", state.conv[None], want[None], path[-1:], request, layer)
        if "attention" in self.stage.publishes:
            self._published_kv(truth, request, layer, path)

    def _no_op(self, state: State, request: int, layer: int) -> None:
        """An empty path leaves the committed state as it was, bit by bit."""
        slot, before = self.case.state_slots[request], self.stage.before
        if "gdn" in self.stage.publishes:
            want = canonical(before.saved("recurrent")[layer, slot], self.contract).contiguous()
            self._agree("gdn.untouched", state.recurrent, want, layer, request)
        if "conv" in self.stage.publishes:
            self._agree("conv.untouched", state.conv, before.saved("conv")[layer, slot], layer, request)

    def _published_recurrent(self, truth: Truth, got: Tensor, request: int, layer: int, last: int) -> None:
        native, oracle = truth.native.recurrent[last], truth.gdn[last]
        assert native is not None and oracle is not None
        want = canonical(native, self.contract).contiguous()
        self._same_rows("gdn.state.bitwise", got[None], want[None], [last], request, layer)
        errors = oracle.native
        if not same_bits(got, want):
            errors = state_errors(got, self._oracle_state(truth, last), oracle.state_bound)
        self._derived("gdn.state.derived", errors, request, layer, last)
        self._paired(errors, oracle.native, request, layer, last)
        if self.arm == "verify":
            self.statistics.add("gdn.state", errors)
        if self.exact:
            self._exact_state(got, self._oracle_state(truth, last), request, layer, last)

    def _published_kv(self, truth: Truth, request: int, layer: int, path: Sequence[int]) -> None:
        tree, cache = self.case.trees[request], self.case.pools.cache
        where = self.case.committed(request, range(tree.prefix_len, tree.prefix_len + len(path)))
        published = (("state", cache.k, truth.native.k), ("values", cache.v, truth.native.v))
        for name, pool, native in published:
            got, want = pool[layer, where][None], torch.stack(rows_of(native, path))[None]
            self._same_rows(f"attention.{name}.bitwise", got, want, path[-1:], request, layer)
        for i, row in enumerate(path):
            self._keys(truth, cache.k[layer, where[i]], "attention.state.derived", request, layer, row)

    def _unchanged_by_publish(self, paths: Sequence[Sequence[int]]) -> None:
        pools, before, verified = self.case.pools, self.stage.before, self.stage.verified
        free = [s for s in range(self.case.slots) if s not in self.case.state_slots]
        damage: dict[str, list[str]] = {"gdn": [], "conv": [], "attention": []}
        for slot in free:
            if not same_bits(pools.recurrent[:, slot], before.saved("recurrent")[:, slot]):
                damage["gdn"].append(f"pool.recurrent slot {slot}")
            if not same_bits(pools.conv[:, slot], before.saved("conv")[:, slot]):
                damage["conv"].append(f"pool.conv slot {slot}")
        written = [self.case.batch.row_slot.long()]
        for request, path in enumerate(paths):
            prefix = self.case.trees[request].prefix_len
            written.append(self.case.committed(request, range(prefix, prefix + len(path))))
        for name, now in (("k", pools.cache.k), ("v", pools.cache.v)):
            if not same_except(now, verified.saved(f"cache.{name}"), torch.cat(written)):
                damage["attention"].append(f"cache.{name}")
        self._all_untouched(self.stage.publishes, damage)

    def inputs_at_end(self) -> None:
        """Operands, metadata and guards once more, after all publications."""
        damage: dict[str, list[str]] = {"gdn": [], "conv": [], "attention": []}
        inputs = self.stage.expired or self.stage.inputs
        for name in [*inputs.changed(), *(f"guard of {b}" for b in self.case.arena.broken())]:
            damage[_surface_of(name)].append(name)
        self._all_untouched(self.stage.surfaces, damage)

    def repeat(self, path_of: Callable[[int], Sequence[int]]) -> None:
        """Verify and publish once more from the same start: every output and state has the same bits."""
        first = [{s: t.clone() for s, t in outs.items()} for outs in self.stage.out]
        paths = [path_of(i) for i in range(len(self.case.trees))]
        states = self._states_after(paths)
        self.stage.reset()
        self.stage.verify()
        for layer, outs in enumerate(self.stage.out):
            for surface, out in outs.items():
                now, then = out[self._live()], first[layer][surface][self._live()]
                self._agree(f"{surface}.repeat", now, then, layer)
        for surface, (then, now) in _pairs(states, self._states_after(paths)).items():
            self._agree(f"{surface}.repeat", now, then, 0)

    def same_chain(self, chain: RowTrace, path: Sequence[int], request: int, layer: int) -> None:
        """A chain decoded in place against the row-by-row walk: outputs and, at its end, the state."""
        native, last = self.truth[request, layer].native, path[-1]
        for surface in self.stage.surfaces:
            names = {"gdn": ("gdn_out", "recurrent"), "conv": ("conv_out", "conv"), "attention": ("attention_out", "k")}
            for name in names[surface]:
                rows = path if name.endswith("_out") else [last]
                for row in rows:
                    self._agree(f"{surface}.repeat", getattr(chain, name)[row], getattr(native, name)[row], layer)

    def _live(self) -> Tensor:
        return self.case.active

    def _agree(self, check: str, now: Tensor, then: Tensor, layer: int, request: int | None = None) -> None:
        same = same_bits(now, then)
        self.tallies[check].add(1, int(same))
        if not same:
            where = {"layer": layer, "request": request}
            self.tallies[check].fail(self._place(check, **where, got="other bits", allowed="the same bits"))

    def _states_after(self, paths: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        self.stage.rewind()
        self.stage.publish(paths)
        layers, requests = range(self.case.dims.layers), range(len(paths))
        states = [self.stage.export(i, layer) for i in requests for layer in layers]
        found = {}
        if "gdn" in self.stage.publishes:
            found["gdn"] = torch.stack([s.recurrent for s in states])
        if "conv" in self.stage.publishes:
            found["conv"] = torch.stack([s.conv for s in states])
        return found


def _pairs(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (a[name], b[name]) for name in a}


def _surface_of(name: str) -> str:
    """Surface to which a damaged tensor is charged; metadata is charged to gdn."""
    for word, surface in (("conv", "conv"), ("attention", "attention"), ("cache", "attention")):
        if word in name:
            return surface
    return "gdn"
