"""Every check of the component audit fails for the right reason, on a backend made wrong on purpose, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.families import DIMS_MICRO, DIMS_MICRO_EXACT
from audit.tally import CHECKS, to_check
from faults import Faulty
from lumotree.backends.batch import flat_slots
from lumotree.backends.protocol import SURFACES, Accepted, Batch, StepOps, StepOut
from lumotree.backends.reference import ReferenceBackend, RowMath
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import BackendError
from lumotree.reference.attention import attention_step
from lumotree.reference.conv import conv_step
from lumotree.reference.gdn import gates, gdn_read, gdn_step, normalise, per_value_head

INNER = TorchBackend()
Backend = Any

#: Many outputs a row, so that a change in the order of fp32 sums shows through their rounding to bf16.
WIDE: dict[str, Any] = {"dims": replace(DIMS_MICRO, q_heads=8, head_dim=256), "trees": ("star:12",), "prefixes": (150,)}
#: A batch of three with two pages each; without fields, a case is one comb of six rows.
EXACT: dict[str, Any] = {"dims": DIMS_MICRO_EXACT, "regime": "exact"}
THREE: dict[str, Any] = {"trees": ("comb:3", "star:4", "chain:3"), "prefixes": (17, 2, 33), "page_size": 16}


def flip(x: Tensor, bit: int = 1) -> None:
    """Flip a low bit of a one-element view."""
    x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).bitwise_xor_(bit)


def after(name: str, change: Callable[..., None], inner: Backend = INNER) -> Backend:
    """A backend that runs a method and then `change` with the same arguments."""

    def method(*args: Any) -> None:
        getattr(inner, name)(*args)
        change(*args)

    return Faulty(inner, **{name: method})


def instead(name: str, method: Callable[..., None], inner: Backend = INNER) -> Backend:
    """A backend with a method replaced."""
    return Faulty(inner, **{name: method})


def verify_with(name: str, change: Callable[..., dict[str, Any]]) -> Backend:
    """A backend whose verification gets another batch: `change(batch)` gives the fields that differ."""

    def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        getattr(INNER, name)(ops, pool, replace(batch, **change(batch)), ws, out, layer)

    return Faulty(INNER, **{name: method})


def beyond(x: Tensor) -> Tensor:
    """The element behind a contiguous tensor."""
    return torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel())


def outs(surface: str) -> str:
    return SURFACES[surface][0]


def publishes(surface: str) -> str:
    return SURFACES[surface][1]


def slot_of(batch: Batch) -> int:
    return int(batch.state_slot[0])


def free_slot(pool: Tensor, batch: Batch) -> int:
    """A slot of the pool that no request owns."""
    return next(s for s in range(pool.shape[1]) if s not in batch.state_slot.tolist())


@dataclass(frozen=True)
class Broken:
    """A backend, the case on which it is judged, the checks that must fail (exactly these) and where they point."""

    name: str
    backend: Callable[[], Backend]
    fails: set[str]
    case: dict[str, Any] = field(default_factory=dict)
    at: dict[str, Any] = field(default_factory=dict)
    got: str = ""


def one_low_bit(surface: str) -> Callable[[], Backend]:
    """The lowest bit of one element of row 3, head 1 (the conv has no heads: channel 1)."""

    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        flip(out[3, 1, :1] if out.dim() > 2 else out[3, 1:2])

    return lambda: after(outs(surface), change)


def published_bit(surface: str) -> Callable[[], Backend]:
    """The lowest bit of one element of what is published when the path ends in row 4."""

    def change(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        n = int(accepted.length[0])
        if n == 0 or int(accepted.rows[0, n - 1]) != 4:
            return
        if surface == "attention":
            target = flat_slots(batch.page_table, batch.page_size, 0, [int(batch.prefix_len[0]) + n - 1])
            flip(pool.v[0, int(target[0]), 0, :1])
        else:
            flip(pool[0, slot_of(batch)].view(-1)[5:6])

    return lambda: after(publishes(surface), change)


def guard_of_out(surface: str) -> Callable[[], Backend]:
    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        beyond(out).fill_(0)

    return lambda: after(outs(surface), change)


def guard_in_publish(surface: str) -> Callable[[], Backend]:
    def change(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        beyond(pool.k if surface == "attention" else pool).fill_(0)

    return lambda: after(publishes(surface), change)


def operand_in_place(surface: str, name: str) -> Callable[[], Backend]:
    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        getattr(ops, name).view(-1)[0] += 1

    return lambda: after(outs(surface), change)


def metadata_in_place(surface: str) -> Callable[[], Backend]:
    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        batch.position[0] += 0
        batch.plan.cut_index.fill_(-1) if surface == "plan" else batch.prefix_len.add_(1)

    return lambda: after(outs("attention"), change)


def pool_in_verify(surface: str) -> Callable[[], Backend]:
    """Verification advances the pool, which is only to be read."""

    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        if surface == "attention":
            where = flat_slots(batch.page_table, batch.page_size, 0, [0])
            pool.k[layer, where] = 0
        else:
            pool[layer, slot_of(batch)].mul_(2)

    return lambda: after(outs(surface), change)


def free_slot_written(surface: str) -> Callable[[], Backend]:
    def change(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        if surface == "attention":
            used = {*batch.row_slot.tolist(), *batch.page_table[batch.page_table >= 0].tolist()}
            pool.v[0, next(s for s in range(pool.v.shape[1]) if s not in used)] = 0
        else:
            pool[0, free_slot(pool, batch)] = 0

    return lambda: after(publishes(surface), change)


def live_slot_written(surface: str) -> Callable[[], Backend]:
    """Publication of request 0 also lands in the slot of request 2."""

    def change(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        if surface == "attention":
            pool.v[0, flat_slots(batch.page_table, batch.page_size, 2, [0])] = 0
        else:
            pool[0, int(batch.state_slot[2])] = pool[0, slot_of(batch)]

    return lambda: after(publishes(surface), change)


def rows_left_out(surface: str) -> Callable[[], Backend]:
    def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        kept = out[2].clone()
        getattr(INNER, outs(surface))(ops, pool, batch, ws, out, layer)
        out[2] = kept

    return lambda: instead(outs(surface), method)


def counted(surface: str, method: str) -> Callable[[], Backend]:
    """Bits depend on how many calls there were before: right until the case's first round of publishing is over."""

    def make() -> Backend:
        calls = [0]

        def change(*args: Any) -> None:
            calls[0] += 1
            if method == outs(surface) and calls[0] > 1:
                out = args[4]
                flip(out.view(-1)[:1])

        return after(method, change)

    return make


def order_of_requests(surface: str) -> Callable[[], Backend]:
    """Row 0 of the batch is right only when the first request is the one with six rows."""

    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        if int(batch.cu_rows[1]) != 6:
            flip(out[0].view(-1)[:1])

    return lambda: after(outs(surface), change)


def constant(surface: str) -> Callable[[], Backend]:
    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        out.zero_()

    return lambda: after(outs(surface), change)


def bf16_carry() -> Backend:
    rounded = TorchBackend(Contract(carry="bf16"))
    return instead("gdn_verify", rounded.gdn_verify)


def next_in_buffer(batch: Batch) -> Tensor:
    return torch.arange(batch.rows, dtype=torch.int32)


def free_state_read(surface: str) -> Callable[[], Backend]:
    def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        slots = torch.full_like(batch.state_slot, free_slot(pool, batch))
        getattr(INNER, outs(surface))(ops, pool, replace(batch, state_slot=slots), ws, out, layer)

    return lambda: instead(outs(surface), method)


def kv_in_slot_order() -> Backend:
    """Committed keys are gathered by ascending slot: the same set in another order."""

    def table(batch: Batch) -> dict[str, Any]:
        n = int(batch.prefix_len[0])
        row = batch.page_table.clone()
        row[0, :n] = row[0, :n].sort().values
        return {"page_table": row}

    return verify_with("attention_verify", table)


def page_zero_for_all() -> Backend:
    """The page of the first tokens is read for the second page too."""

    def table(batch: Batch) -> dict[str, Any]:
        return {"page_table": batch.page_table[:, :1].repeat(1, batch.page_table.shape[1])}

    return verify_with("attention_verify", table)


def beyond_the_prefix() -> Backend:
    """One key too many: the slot behind the committed prefix, where nothing lives yet."""
    return verify_with("attention_verify", lambda batch: {"prefix_len": batch.prefix_len + 1})


def position_from_slot() -> Backend:
    return verify_with("attention_verify", lambda batch: {"position": batch.row_slot % 8})


def off_by_one_path(surface: str) -> Callable[[], Backend]:
    """The last accepted row is not published."""

    def method(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        short = Accepted(accepted.rows, torch.clamp(accepted.length - 1, min=0))
        getattr(INNER, publishes(surface))(pool, batch, short, ws, layers)

    return lambda: instead(publishes(surface), method)


def history_ignored() -> Backend:
    """Verification starts every path from zeros."""

    def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        INNER.conv_verify(ops, torch.zeros_like(pool), batch, ws, out, layer)

    return instead("conv_verify", method)


def moved_one_by_one(order: int) -> Callable[[], Backend]:
    """KV moved row by row in place, first to last (order 1) or last to first (-1)."""

    def method(cache: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        for request in range(batch.requests):
            start, lo = int(batch.prefix_len[request]), int(batch.cu_rows[request])
            steps = range(int(accepted.length[request]))
            for step in steps[::order]:
                source = int(batch.row_slot[lo + int(accepted.rows[request, step])])
                target = int(flat_slots(batch.page_table, batch.page_size, request, [start + step])[0])
                for layer in layers:
                    cache.k[layer, target], cache.v[layer, target] = cache.k[layer, source], cache.v[layer, source]

    return lambda: instead("kv_publish", method)


def empty_is_root(surface: str) -> Callable[[], Backend]:
    def method(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        rows, live = accepted.rows.clone(), batch.state_slot >= 0
        rows[live & (accepted.length == 0), 0] = 0
        taken = Accepted(rows, torch.where(live, accepted.length.clamp(min=1), accepted.length))
        getattr(INNER, publishes(surface))(pool, batch, taken, ws, layers)

    return lambda: instead(publishes(surface), method)


def padding_is_slot_zero(surface: str) -> Callable[[], Backend]:
    """Every request's state is read, advanced and stored; the padding request's goes back, unchanged, to slot 0."""

    def method(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        kept = pool[:, 0].clone()
        getattr(INNER, publishes(surface))(pool, batch, accepted, ws, layers)
        if bool((batch.state_slot < 0).any()):
            pool[:, 0] = kept

    return lambda: instead(publishes(surface), method)


def all_layers(surface: str) -> Callable[[], Backend]:
    def method(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        count = (pool.k if surface == "attention" else pool).shape[0]
        getattr(INNER, publishes(surface))(pool, batch, accepted, ws, range(count))

    return lambda: instead(publishes(surface), method)


def inactive_counts(surface: str) -> Callable[[], Backend]:
    """Every output carries a trace of all rows' operands, those of inactive rows too (too small to see unless NaN)."""

    def change(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        value = ops.x if surface == "conv" else ops.v
        out += (value.float().sum() * 0).to(out.dtype)

    return lambda: after(outs(surface), change)


def reference(**functions: Callable[..., Any]) -> Callable[[], Backend]:
    """The reference with another row function: wrong in verification, publication and one-token decoding alike."""
    return lambda: ReferenceBackend(math=RowMath(**functions))


def error_before_decay(R: Tensor, row: Any, contract: Contract) -> tuple[Tensor, Tensor]:
    """The prediction error is taken from the state before it decays."""
    k = per_value_head(normalise(row.k.float(), contract.norm), R.shape[0], contract.head_map)[:, None, :]
    decay, beta = gates(row, contract)
    u = beta[:, None] * (row.v.float() - (R * k).sum(-1))
    updated = decay[:, None, None] * R + u[:, :, None] * k
    return updated, gdn_read(updated, row, contract)


def gate_twice(R: Tensor, row: Any, contract: Contract) -> tuple[Tensor, Tensor]:
    return gdn_step(gates(row, contract)[0][:, None, None] * R, row, contract)


def bf16_state(R: Tensor, row: Any, contract: Contract) -> tuple[Tensor, Tensor]:
    after_, o = gdn_step(R, row, contract)
    return after_.to(torch.bfloat16).float(), o


def slightly_off(R: Tensor, row: Any, contract: Contract) -> tuple[Tensor, Tensor]:
    """Every state one unit in the last place too large: far inside any error bound."""
    after_, o = gdn_step(R, row, contract)
    return after_ * (1 + 2.0**-23), o


def taps_reversed(history: Tensor, x: Tensor, weight: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
    return conv_step(history, x, weight.flip(1), contract)


def newest_history_dropped(history: Tensor, x: Tensor, weight: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
    advanced, _ = conv_step(history, x, weight, contract)
    return advanced, conv_step(torch.zeros_like(history), x, weight, contract)[1]


def one_ulp_conv(history: Tensor, x: Tensor, weight: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
    advanced, out = conv_step(history, x, weight, contract)
    flip(out[:1])
    return advanced, out


def one_ulp_attention(*args: Any) -> tuple[Tensor, Tensor]:
    out, key = attention_step(*args)
    flip(out[1, :1])
    return out, key


def late_position(q: Tensor, k: Tensor, v: Tensor, K: Tensor, V: Tensor, position: int, *tables: Tensor) -> Any:
    return attention_step(q, k, v, K, V, position + 1, *tables)


def out_of(surface: str, *more: str) -> set[str]:
    """Output checks that see a gross error."""
    return {f"{surface}.out.bitwise", f"{surface}.out.derived", *more}


def everywhere(surface: str, *more: str) -> set[str]:
    """What only the oracle can tell: verification, publication and decoding agree with one another."""
    return {f"{surface}.{part}.derived" for part in ("native", "out", *more)}


GDN_STATE = {"gdn.state.bitwise", "gdn.state.derived"}
KEYS = {"attention.state.bitwise", "attention.state.derived"}
KV_STATE = {*KEYS, "attention.values.bitwise"}

BROKEN: list[Broken] = [
    Broken("state carried in bf16", bf16_carry, {"gdn.out.bitwise", "gdn.out.derived"}, at={"row": 1}),
    *(
        Broken(f"one low bit of a row's {s} output", one_low_bit(s), out_of(s), at={"row": 3, "head": h})
        for s, h in (("gdn", 1), ("conv", None), ("attention", 1))
    ),
    *(
        Broken(f"one bit of a published {s} {what}", published_bit(s), {f"{s}.{what}.bitwise"}, at={"row": 4})
        for s, what in (("gdn", "state"), ("conv", "state"), ("attention", "values"))
    ),
    *(
        Broken(
            f"{s} verification writes beyond its output",
            guard_of_out(s),
            {f"{s}.untouched"},
            got=f"guard of out.{s}[0]",
        )
        for s in SURFACES
    ),
    *(
        Broken(
            f"{s} publication writes beyond its pool", guard_in_publish(s), {f"{s}.untouched"}, got=f"guard of {pool}"
        )
        for s, pool in (("gdn", "pool.recurrent"), ("conv", "pool.conv"), ("attention", "cache.k"))
    ),
    *(
        Broken(f"{s} operand {name} changed", operand_in_place(s, name), {f"{s}.untouched"}, got=f"{s}.0.{name}")
        for s, name in (("gdn", "v"), ("gdn", "A_log"), ("conv", "x"), ("conv", "weight"), ("attention", "q"))
    ),
    Broken(
        "gdn pool advanced by verification", pool_in_verify("gdn"), {"gdn.untouched", *GDN_STATE}, got="pool.recurrent"
    ),
    Broken("conv pool advanced by verification", pool_in_verify("conv"), {"conv.untouched", "conv.state.bitwise"}),
    Broken("committed KV changed by verification", pool_in_verify("attention"), {"attention.untouched"}, got="cache.k"),
    *(
        Broken(f"{s} publication writes a free slot", free_slot_written(s), {f"{s}.untouched"}, got="changed")
        for s in SURFACES
    ),
    Broken("gdn publication writes another's slot", live_slot_written("gdn"), GDN_STATE, THREE, {"request": 2}),
    Broken(
        "conv publication writes another's slot",
        live_slot_written("conv"),
        {"conv.state.bitwise"},
        THREE,
        {"request": 2},
    ),
    Broken("KV publication writes another's prefix", live_slot_written("attention"), {"attention.untouched"}, THREE),
    *(Broken(f"a row of the {s} output left out", rows_left_out(s), out_of(s), at={"row": 2}) for s in SURFACES),
    *(Broken(f"{s} output depends on the number of calls", counted(s, outs(s)), {f"{s}.repeat"}) for s in SURFACES),
    *(
        Broken(
            f"{s} output depends on the order of requests",
            order_of_requests(s),
            {f"{s}.rotation"},
            THREE,
            {"request": 1, "row": 0},
        )
        for s in SURFACES
    ),
    *(Broken(f"{s} outputs are zero", constant(s), out_of(s)) for s in SURFACES),
    Broken("free state slot read", free_state_read("gdn"), out_of("gdn"), at={"row": 0}),
    Broken("free conv slot read", free_state_read("conv"), out_of("conv"), at={"row": 0}),
    Broken("KV slot behind the prefix read", beyond_the_prefix, out_of("attention"), at={"row": 0}),
    Broken("keys read in slot order", kv_in_slot_order, {"attention.out.bitwise"}, WIDE),
    Broken("one page read for all", page_zero_for_all, out_of("attention"), {"prefixes": (20,), "page_size": 16}),
    Broken("position derived from slot", position_from_slot, {*out_of("attention"), *KEYS}, at={"row": 0}),
    Broken("gdn publishes all but the last row", off_by_one_path("gdn"), GDN_STATE, at={"row": 0}),
    Broken("conv publishes all but the last row", off_by_one_path("conv"), {"conv.state.bitwise"}, at={"row": 0}),
    Broken("KV of the last row is not published", off_by_one_path("attention"), KV_STATE, at={"row": 0}),
    Broken("conv history ignored by verification", history_ignored, out_of("conv"), at={"row": 0}),
    *(
        Broken(
            f"KV moved {how}, {placement}",
            moved_one_by_one(order),
            KV_STATE,
            {"trees": ("comb:3",), "placement": placement},
        )
        for how, order, placement in (
            ("last row first", -1, "inplace"),
            ("last row first", -1, "shuffled"),
            ("first row first", 1, "shuffled"),
        )
    ),
    *(
        Broken(f"{s} takes the empty path for the root", empty_is_root(s), {f"{s}.untouched"}, at={"request": 0})
        for s in ("gdn", "conv")
    ),
    Broken("KV takes the empty path for the root", empty_is_root("attention"), {"attention.untouched"}, got="cache.k"),
    Broken("gdn clamps padding to slot 0", padding_is_slot_zero("gdn"), GDN_STATE, {**THREE, "padding": 1}),
    Broken(
        "conv clamps padding to slot 0", padding_is_slot_zero("conv"), {"conv.state.bitwise"}, {**THREE, "padding": 1}
    ),
    *(
        Broken(
            f"{s} publishes layers it was not asked for",
            all_layers(s),
            {f"{s}.untouched"},
            {"dims": replace(DIMS_MICRO, layers=2)},
            got="layer",
        )
        for s in SURFACES
    ),
    Broken(
        "error taken before decay, everywhere",
        reference(gdn_step=error_before_decay),
        everywhere("gdn", "state"),
        at={"row": 0},
    ),
    Broken("gate applied twice, everywhere", reference(gdn_step=gate_twice), everywhere("gdn", "state"), at={"row": 0}),
    Broken(
        "state rounded to bf16, everywhere", reference(gdn_step=bf16_state), everywhere("gdn", "state"), at={"row": 0}
    ),
    Broken("conv taps reversed, everywhere", reference(conv_step=taps_reversed), everywhere("conv"), at={"row": 0}),
    Broken(
        "conv history ignored, everywhere",
        reference(conv_step=newest_history_dropped),
        everywhere("conv"),
        at={"row": 0},
    ),
    Broken(
        "attention position one late, everywhere",
        reference(attention_step=late_position),
        everywhere("attention", "state"),
        at={"row": 0},
    ),
    Broken("state one ulp too large, exact grid", reference(gdn_step=slightly_off), {"gdn.exact"}, EXACT),
    Broken(
        "conv one ulp off, exact grid", reference(conv_step=one_ulp_conv), {"conv.exact", *everywhere("conv")}, EXACT
    ),
    Broken(
        "attention one ulp off, exact grid", reference(attention_step=one_ulp_attention), {"attention.exact"}, EXACT
    ),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda b: b.name)
def test_a_broken_backend_fails_exactly_the_checks_that_must_see_it(broken: Broken, engine: Any) -> None:
    found, result = engine.run(broken.backend(), **broken.case)
    # What a case shows shows again when all of it is repeated, on the same surfaces.
    surfaces = {check.partition(".")[0] for check in broken.fails}
    again = {f"{s}.{kind}" for s in surfaces for kind in ("cycle", "rotation")}
    assert broken.fails <= found <= broken.fails | again
    places = [p for check in sorted(broken.fails) for p in result.tallies[check].places]
    for name, value in broken.at.items():
        by_heads = [p for p in places if name != "head" or p.head is not None]
        assert value is None or by_heads[0].__dict__[name] == value, by_heads[0]
    assert all(p.case == "case" for p in places)
    assert any(broken.got in str(p.got) for p in places)


CLEAN_CASES: list[dict[str, Any]] = [
    {}, THREE, {**THREE, "padding": 1}, EXACT, {"prefixes": (20,), "page_size": 16}, WIDE,
    {"placement": "inplace"}, {"placement": "shuffled"}, {"dims": replace(DIMS_MICRO, layers=2)},
]  # fmt: skip


@pytest.mark.parametrize("fields", CLEAN_CASES, ids=str)
@pytest.mark.parametrize("backend", [INNER, ReferenceBackend()], ids=lambda b: b.name)
def test_a_right_backend_fails_nothing_on_the_same_cases(backend: Backend, fields: dict[str, Any], engine: Any) -> None:
    found, result = engine.run(backend, **fields)
    assert found == set()
    judged = {c for c, t in result.tallies.items() if t.cells}
    expected = {c for c in CHECKS if not c.endswith((".exact", ".rotation"))}
    expected |= {c for c in CHECKS if fields is EXACT and c.endswith(".exact")}
    expected |= {c for c in CHECKS if len(fields.get("trees", ("",))) > 1 and c.endswith(".rotation")}
    if fields is EXACT or "placement" in fields:  # no second cycle: see can_cycle
        expected = {c for c in expected if not c.endswith(".cycle")}
    assert judged == expected


def test_every_judged_check_is_the_only_sign_of_some_defect_or_stands_beside_another_rung() -> None:
    seen = set().union(*(b.fails for b in BROKEN))
    cycles = {f"{surface}.cycle" for surface in SURFACES}  # test_what_a_workspace_remembers_shows_in_the_next_cycle
    assert seen == {c for c in CHECKS if c != "gdn.paired"} - cycles


def test_every_cell_of_a_case_is_counted(engine: Any) -> None:
    _, result = engine.run(INNER)
    cells = {check: tally.cells for check, tally in result.tallies.items()}
    rows, empty_path = 6, 1
    for surface in SURFACES:
        assert cells[f"{surface}.out.bitwise"] == cells[f"{surface}.out.derived"] == rows
    for check in ("gdn.state", "conv.state", "attention.state", "attention.values"):
        assert cells[f"{check}.bitwise"] == rows
    # the chain, verification, each row and the empty path published, the empty path's own state, the end of all
    assert cells["gdn.untouched"] == cells["conv.untouched"] == 2 + rows + 2 * empty_path + 1
    assert cells["gdn.native.derived"] == 2 * rows  # outputs and states
    assert cells["conv.native.derived"] == rows


@pytest.mark.parametrize("surface", SURFACES)
def test_a_native_step_that_writes_elsewhere_is_seen(engine: Any, surface: str) -> None:
    def step(ops: Any, pools: Any, batch: Batch, out: Any, layer: int) -> None:
        INNER.native_step(ops, pools, batch, out, layer)
        for name, pool in (("gdn", pools.recurrent), ("conv", pools.conv), ("attention", pools.cache.v)):
            if name == surface:
                taken = (
                    set(batch.state_slot.tolist()) if name != "attention" else set(batch.page_table.flatten().tolist())
                )
                pool[layer, next(i for i in range(pool.shape[1]) if i not in taken)] = 1.0

    _, result = engine.run(Faulty(INNER, native_step=step))
    assert engine.failing(result) == {f"{surface}.untouched"}
    assert "(native step)" in str(result.tallies[f"{surface}.untouched"].places[0].got)


def test_a_chain_that_leaves_nan_fails_its_check_and_is_not_refused_for_the_cycle_behind_it(engine: Any) -> None:
    def step(ops: Any, pools: Any, batch: Batch, out: Any, layer: int) -> None:
        INNER.native_step(ops, pools, batch, out, layer)
        pools.recurrent[layer, int(batch.state_slot[0])] = torch.nan

    _, result = engine.run(Faulty(INNER, native_step=step))
    assert "gdn.native.derived" in engine.failing(result)


def test_the_published_paired_rule_is_reported_but_decides_nothing(engine: Any) -> None:
    def tenfold(ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        out.mul_(10)

    _, result = engine.run(after("gdn_verify", tenfold))
    paired = result.tallies["gdn.paired"]
    assert paired.failed and paired.places[0].row == 0 and paired.worst > 100
    assert to_check(paired, Contract()).status == "info"


def test_a_leak_from_inactive_rows_is_flagged_by_the_control_that_must_be_harmless(engine: Any) -> None:
    fields = {"trees": ("random:9",), "inactive_fraction": 0.3, "control": True}
    clean, leaking = ({s: engine.run(make(s), **fields)[1] for s in SURFACES} for make in (lambda s: INNER, leaky))
    for surface in SURFACES:
        fault = f"poisoned_inactive.{surface}"
        assert next(o for o in clean[surface].outcomes if o.fault == fault).by is None
        assert next(o for o in leaking[surface].outcomes if o.fault == fault).by == f"{surface}.out.bitwise"
        assert engine.failing(leaking[surface]) == set()  # finite operands do not show it


def leaky(surface: str) -> Backend:
    return inactive_counts(surface)()


def test_what_the_native_step_changes_of_its_operands_is_seen(engine: Any) -> None:
    def native_step(ops: StepOps, pools: Any, batch: Batch, out: StepOut, layer: int) -> None:
        INNER.native_step(ops, pools, batch, out, layer)
        ops.gdn.A_log[0] -= 1e-3

    found, result = engine.run(instead("native_step", native_step))
    assert "gdn.untouched" in found
    assert "gdn.0.A_log" in str(result.tallies["gdn.untouched"].places[0].got)


@pytest.mark.parametrize("only", SURFACES)
def test_metadata_changed_by_a_backend_of_one_surface_is_charged_to_it(only: str, engine: Any) -> None:
    missing = {m: None for s in SURFACES if s != only for m in SURFACES[s]}
    found, result = engine.run(
        after(outs(only), lambda ops, pool, batch, *rest: batch.prefix_len.add_(1), Faulty(INNER, **missing))
    )
    assert f"{only}.untouched" in found
    assert {c.partition(".")[0] for c in result.tallies} == {only}
    assert "batch.prefix_len" in str(result.tallies[f"{only}.untouched"].places[0].got)


def test_a_backend_that_reads_the_state_late_is_caught_by_the_second_run(engine: Any) -> None:
    """Publication remembers the first path it was ever given (a stale host copy)."""
    first: list[Accepted] = []

    def method(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        first.append(accepted)
        INNER.gdn_publish(pool, batch, first[0], ws, layers)

    found, result = engine.run(instead("gdn_publish", method))
    assert found == {*GDN_STATE, "gdn.untouched", "gdn.cycle"}  # the empty path was no no-op either
    assert result.tallies["gdn.state.bitwise"].places[0].row == 1  # row 0, the first path, was right


def test_a_method_that_raises_is_named_with_the_line(engine: Any) -> None:
    def method(*args: Any) -> None:
        raise RuntimeError("illegal memory access")

    for name in ("allocate", "native_step", "gdn_verify", "conv_publish", "export"):
        with pytest.raises(BackendError, match=rf"{name} raised RuntimeError: illegal .*test_component.py:\d+"):
            engine.run(instead(name, method))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, recurrent=s.recurrent.transpose(1, 2)), "export returned recurrent torch.float32"),
        (lambda s: replace(s, recurrent=s.recurrent.double()), "export returned recurrent torch.float64"),
        (lambda s: replace(s, conv=s.conv[:, 1:]), r"export returned conv torch.bfloat16 \[20, 2\], expected"),
        (lambda s: None, "export returned recurrent NoneType"),
    ],
    ids=["transposed", "float64", "short history", "nothing"],
)
def test_an_export_of_the_wrong_form_is_refused_by_shape(change: Any, message: str, engine: Any) -> None:
    with pytest.raises(BackendError, match=message):
        engine.run(instead("export", lambda *args: change(INNER.export(*args))))


def test_a_deferred_publication_is_right_if_export_and_the_next_verification_apply_it(engine: Any) -> None:
    class Deferred(TorchBackend):
        """States are flushed by export, as TreeWY and SpecLA flush at the next verification."""

        def allocate(self, dims: Any, limits: Any, device: Any) -> dict[str, Any]:
            return {"inner": super().allocate(dims, limits, device), "due": {}}

        def flush(self, pool: Any, ws: Any, layer: int) -> None:
            for batch, accepted in ws["due"].pop(layer, []):
                super().gdn_publish(pool, batch, accepted, ws["inner"], [layer])

        def gdn_verify(self, ops: Any, pool: Any, batch: Any, ws: Any, out: Any, layer: int) -> None:
            self.flush(pool, ws, layer)
            super().gdn_verify(ops, pool, batch, ws["inner"], out, layer)

        def gdn_publish(self, pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
            for layer in layers:
                ws["due"][layer] = [(copy.deepcopy(batch), accepted)]

        def export(self, pools: Any, ws: Any, slot: int, layer: int) -> Any:
            self.flush(pools.recurrent, ws, layer)
            return super().export(pools, ws, slot, layer)

        conv_verify = conv_publish = attention_verify = kv_publish = None

    found, result = engine.run(Deferred())
    assert found == set() and result.tallies["gdn.state.bitwise"].bitwise == 6


class _FromTheFirstCycle:
    """Kernels that remember something of a workspace's first cycle; each is right in every cycle that starts afresh."""

    @staticmethod
    def committed_state(surface: str = "gdn") -> Any:
        def verify(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            now = pool if surface != "attention" else pool.k
            kept = _KEPT.setdefault(id(ws), {}).setdefault(layer, now.clone())
            if surface == "attention":  # its writes must land in the real cache
                lost = now.clone()
                now[:, batch.page_table[0].clamp(min=0).long()] = kept[:, batch.page_table[0].clamp(min=0).long()]
                INNER.attention_verify(ops, pool, batch, ws, out, layer)
                now[:, batch.page_table[0].clamp(min=0).long()] = lost[:, batch.page_table[0].clamp(min=0).long()]
            else:
                getattr(INNER, f"{surface}_verify")(ops, kept, batch, ws, out, layer)

        return Faulty(INNER, **{f"{surface}_verify": verify})

    @staticmethod
    def metadata() -> Any:
        def verify(ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            INNER.gdn_verify(ops, pool, _KEPT.setdefault(id(ws), {}).setdefault("batch", batch), ws, out, layer)

        return Faulty(INNER, gdn_verify=verify)

    @staticmethod
    def operands_by_address() -> Any:
        def verify(ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            copies = replace(ops, **{k: v.clone() for k, v in vars(ops).items()})
            kept = _KEPT.setdefault(id(ws), {}).setdefault(ops.k.data_ptr(), copies)
            INNER.gdn_verify(kept, pool, batch, ws, out, layer)

        return Faulty(INNER, gdn_verify=verify)

    @staticmethod
    def publication_only_in_export() -> Any:
        def publish(pool: Tensor, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
            _KEPT.setdefault(id(ws), {})["due"] = (batch, accepted)

        def export(pools: Any, ws: Any, slot: int, layer: int) -> Any:
            batch, accepted = _KEPT.get(id(ws), {}).get("due", (None, None))
            if batch is None:
                return INNER.export(pools, ws, slot, layer)
            own = replace(pools, recurrent=pools.recurrent.clone())
            INNER.gdn_publish(own.recurrent, batch, accepted, ws, [layer])
            return INNER.export(own, ws, slot, layer)

        return Faulty(INNER, gdn_publish=publish, export=export)


_KEPT: dict[int, dict[Any, Any]] = {}


@pytest.mark.parametrize("memory", [m for m in vars(_FromTheFirstCycle) if not m.startswith("_")])
@pytest.mark.parametrize("slack", [0, 3])
def test_what_a_workspace_remembers_shows_in_the_next_cycle(engine: Any, memory: str, slack: int) -> None:
    if memory == "metadata" and not slack:
        pytest.skip("metadata written into the first cycle's tensors reaches a kernel that kept them")
    _KEPT.clear()
    _, result = engine.run(getattr(_FromTheFirstCycle, memory)(), trees=("comb:3",), slack=slack)
    assert "gdn.cycle" in engine.failing(result)
    assert engine.failing(engine.run(INNER, trees=("comb:3",), slack=slack)[1]) == set()


@pytest.mark.parametrize("surface", SURFACES)
def test_the_first_cycles_committed_state_is_not_the_seconds(engine: Any, surface: str) -> None:
    _KEPT.clear()
    found, _ = engine.run(_FromTheFirstCycle.committed_state(surface), trees=("comb:3",))
    assert found == {f"{surface}.cycle"}


def test_operands_kept_by_reference_are_gone_when_publishing(engine: Any) -> None:
    kept: dict[int, Any] = {}

    def verify(ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        kept[layer] = ops
        INNER.gdn_verify(ops, pool, batch, ws, out, layer)

    def publish(pool: Tensor, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        for layer in layers:
            ws.record_gdn(kept[layer], layer)
        INNER.gdn_publish(pool, batch, accepted, ws, layers)

    _, result = engine.run(Faulty(INNER, gdn_verify=verify, gdn_publish=publish))
    assert {"gdn.state.bitwise", "gdn.state.derived"} <= engine.failing(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_bf16_states_pass_on_every_rung(engine: Any, dtype: torch.dtype) -> None:
    claims = "bitwise" if dtype == torch.float32 else "algebra"
    carry = "bf16" if dtype == torch.float32 else "fp32"
    backend = TorchBackend(Contract(state_dtype=dtype, carry=carry, claims=claims))
    for fields in ({}, {"regime": "exact", "dims": DIMS_MICRO_EXACT}):
        _, result = engine.run(backend, **fields)
        assert not [t.check for t in result.tallies.failures() if to_check(t, backend.contract).status == "fail"]
