"""Cases: disjoint splits, hashed specs, layouts that tell a position from a slot, poison where nothing lives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audit import families
from audit.cases import SPLITS, Case, family_sha256
from audit.operands import REGIMES
from audit.operands import draw_random as real_draw
from lumotree.backends.protocol import ConvOps
from lumotree.contract import Contract
from lumotree.errors import ContractError, TreeError

CONTRACT = Contract()
SHAPE = families.SHAPES["micro"]


def test_the_same_spec_gives_the_same_bits_and_another_entropy_gives_others(engine: Any) -> None:
    spec = engine.spec(trees=("random:9",), inactive_fraction=0.3)
    one, two, other = Case(spec, CONTRACT), Case(spec, CONTRACT), Case(replace(spec, entropy=(8, 202, 1)), CONTRACT)
    assert torch.equal(one.gdn[0].k, two.gdn[0].k) and one.state_slots == two.state_slots
    assert one.trees[0].parents.tolist() == two.trees[0].parents.tolist()
    assert not torch.equal(one.gdn[0].A_log, other.gdn[0].A_log)


def test_calibration_and_heldout_share_no_entropy_operand_or_state() -> None:
    splits = {name: families.family(SHAPE, name, seed=3) for name in ("calibration", "heldout")}
    keys = {name: {s.entropy for s in specs} for name, specs in splits.items()}
    assert not keys["calibration"] & keys["heldout"]
    assert all(len(keys[name]) == len(specs) for name, specs in splits.items())
    one, two = (Case(specs[0], CONTRACT) for specs in splits.values())
    for field in ("q", "v", "a", "A_log"):
        assert not torch.equal(getattr(one.gdn[0], field), getattr(two.gdn[0], field))
    slots = (one.state_slots[0], two.state_slots[0])
    assert not torch.equal(one.pools.recurrent[0, slots[0]], two.pools.recurrent[0, slots[1]])


def test_no_two_seeds_make_a_heldout_case_of_a_calibration_case() -> None:
    calibration = {s.entropy for seed in range(20) for s in families.units(SHAPE, "calibration", seed)}
    heldout = {s.entropy for seed in range(20) for s in families.units(SHAPE, "heldout", seed)}
    assert not calibration & heldout and len(set(SPLITS.values())) == len(SPLITS)


@pytest.mark.parametrize("shape", families.SHAPES.values(), ids=lambda s: s.name)
def test_case_ids_are_unique_and_every_contracted_kind_is_there(shape: families.Shape) -> None:
    specs = families.family(shape, "heldout", 1)
    ids = [s.id for s in specs]
    assert len(set(ids)) == len(ids)
    small = [s for s in specs if not s.unit]
    assert {s.regime for s in small} == set(REGIMES)
    assert {s.placement for s in small} == {"scattered", "inplace", "shuffled"}
    assert {1, 16} <= {s.page_size for s in small} and {0, 1} <= {p for s in small for p in s.prefixes}
    assert any(len(s.trees) == 3 and s.padding and s.control and s.dims.layers > 1 for s in small)
    assert any(s.inactive_fraction for s in small) and any(s.control for s in specs if s.unit)


def test_the_default_run_has_the_contracted_number_of_cells() -> None:
    specs = families.units(families.SHAPES["27B"], "heldout", 1)
    trees = [Case(replace(s, dims=families.DIMS_MICRO), CONTRACT).trees[0] for s in specs[:2]]
    assert len(specs) * trees[0].n == 3072 and len(specs) * len(trees[0].active_rows) == 2688


@pytest.mark.parametrize("change", [{"entropy": (7, 202, 2)}, {"prefixes": (6,)}, {"regime": "exact"}, {"padding": 1}])
def test_any_change_of_a_spec_changes_the_family_hash(change: dict[str, Any], engine: Any) -> None:
    specs = [engine.spec(), engine.spec(id="other")]
    assert family_sha256(specs) == family_sha256([engine.spec(), engine.spec(id="other")])
    assert family_sha256(specs) != family_sha256([replace(specs[0], **change), specs[1]])
    assert family_sha256(specs) != family_sha256(specs[::-1])


@pytest.mark.parametrize("placement", ["scattered", "inplace", "shuffled"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_are_no_identity_and_lie_where_the_placement_says(placement: str, page_size: int, engine: Any) -> None:
    fields = {"trees": ("comb:4", "chain:7"), "prefixes": (17, 3), "page_size": page_size, "placement": placement}
    case = Case(engine.spec(**fields), CONTRACT)
    assert case.state_slots != [0, 1] and len(set(case.state_slots)) == 2
    for i, tree in enumerate(case.trees):
        behind = case.committed(i, range(tree.prefix_len, tree.prefix_len + tree.n)).tolist()
        slots = tree.slots.tolist()
        assert tree.position.tolist() != slots
        assert (set(slots) == set(behind)) == (placement != "scattered")
        assert (slots == behind) == (placement == "inplace")
        if placement == "scattered":
            assert not set(slots) & {*behind, *case.committed(i, range(tree.prefix_len)).tolist()}


def test_slot_zero_is_live_when_there_is_padding_that_could_be_clamped_to_it(engine: Any) -> None:
    for entropy in range(12):
        case = Case(engine.spec(padding=1, entropy=(entropy,)), CONTRACT)
        assert 0 in case.state_slots
        assert case.batch.state_slot.tolist() == [*case.state_slots, -1]
        assert case.batch.cu_rows.tolist() == [0, 6, 6]


@pytest.mark.parametrize(
    ("where", "order"),
    [("end", [0, 1, 2, None, None]), ("start", [None, None, 0, 1, 2]), ("middle", [0, None, None, 1, 2])],
)
def test_padding_requests_lie_where_the_spec_says(where: str, order: list[int | None], engine: Any) -> None:
    fields = {"trees": ("chain:2", "star:3", "chain:1"), "prefixes": (1, 2, 3), "padding": 2, "padding_at": where}
    case, last = Case(engine.spec(**fields), CONTRACT), Case(engine.spec(**fields | {"padding_at": "end"}), CONTRACT)
    assert case.order == order and [case.batch_index(i) for i in range(3)] == [order.index(i) for i in range(3)]
    assert case.in_batch_order([(0, 1), (0,), (2,)]) == [() if i is None else [(0, 1), (0,), (2,)][i] for i in order]
    assert case.in_batch_order([(0,)] * 3, fill=(7,)).count((7,)) == 2
    batch, pages = case.batch, case.page_table.shape[1]
    assert batch.state_slot.tolist() == [-1 if i is None else case.state_slots[i] for i in order]
    assert batch.prefix_len.tolist() == [0 if i is None else case.spec.prefixes[i] for i in order]
    for at, i in enumerate(order):
        lo, hi = batch.cu_rows[at : at + 2].tolist()
        assert hi == lo if i is None else (lo, hi) == tuple(case.offsets[i : i + 2])
        assert batch.row_request[lo:hi].tolist() == [at] * (hi - lo)
        assert batch.page_table[at].tolist() == ([-1] * pages if i is None else case.page_table[i].tolist())
    assert torch.equal(case.gdn[0].k, last.gdn[0].k) and case.state_slots == last.state_slots
    assert torch.equal(batch.row_slot, last.batch.row_slot) and torch.equal(batch.parent, last.batch.parent)


def test_an_unknown_place_of_padding_is_refused(engine: Any) -> None:
    with pytest.raises(ContractError, match="unknown padding_at 'front'; known: end, start, middle"):
        Case(engine.spec(padding=1, padding_at="front"), CONTRACT)


def test_spare_slots_are_free_and_poisoned(engine: Any) -> None:
    case = Case(engine.spec(spare_slots=31), CONTRACT)
    assert case.slots == 32 == case.pools.recurrent.shape[1] == case.pools.conv.shape[1]
    assert int(case.pools.recurrent[0].isfinite().flatten(1).all(1).sum()) == 1


def test_everything_that_must_not_be_read_is_poison(engine: Any) -> None:
    case = Case(engine.spec(page_size=16, prefixes=(20,)), CONTRACT)
    free = [s for s in range(case.slots) if s not in case.state_slots]
    assert free and case.pools.recurrent[:, free].isnan().all() and case.pools.conv[:, free].isnan().all()
    committed = case.committed(0, range(20))
    unused = torch.ones(case.flat_slots, dtype=torch.bool)
    unused[committed] = False
    assert case.pools.cache.k[:, unused].isnan().all() and case.pools.cache.v[:, unused].isnan().all()
    assert case.pools.cache.k[:, committed].isfinite().all()
    assert case.pools.recurrent[:, case.state_slots].isfinite().all()


def test_a_layout_stores_the_same_state_transposed(engine: Any) -> None:
    vk, kv = (Case(engine.spec(), Contract(layout=x)) for x in ("VK", "KV"))
    slot = vk.state_slots[0]
    assert torch.equal(vk.pools.recurrent[0, slot], kv.pools.recurrent[0, slot].transpose(-1, -2))


def test_an_empty_prefix_starts_from_zero_state_and_history(engine: Any) -> None:
    case = Case(engine.spec(prefixes=(0,)), CONTRACT)
    slot = case.state_slots[0]
    assert not case.pools.recurrent[0, slot].any() and not case.pools.conv[0, slot].any()
    short = Case(engine.spec(prefixes=(1,)), CONTRACT)
    history = short.pools.conv[0, short.state_slots[0]]
    assert not history[:, :2].any() and history[:, 2].any()


def test_inactive_rows_hold_loud_values_so_that_a_leak_shows(engine: Any) -> None:
    case = Case(engine.spec(trees=("random:9",), inactive_fraction=0.3), CONTRACT)
    active = case.active
    assert int((~active).sum()) == 2
    assert case.gdn[0].v[~active].abs().max() > 20 * case.gdn[0].v[active].abs().max()


def test_padded_rows_are_inactive(engine: Any) -> None:
    case = Case(engine.spec(pad_rows=16), CONTRACT)
    assert case.trees[0].n == 16 and case.active.tolist() == [True] * 6 + [False] * 10


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"regime": "loud"}, ContractError, "unknown regime 'loud'; known: random"),
        ({"trees": ("bush:3",)}, TreeError, "unknown tree 'bush:3'"),
        ({"trees": ("chain:9",)}, ContractError, r"tree chain:9 has 9 rows, allowed: 8"),
        ({"regime": "exact", "prefixes": (500,), "dims": families.DIMS_MICRO_EXACT}, ContractError, "at most 96 pos"),
    ],
)
def test_an_impossible_case_is_refused(fields: dict[str, Any], error: type, message: str, engine: Any) -> None:
    with pytest.raises(error, match=message):
        Case(engine.spec(**fields), Contract(max_rows=8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_operands_are_refused_by_name(value: float, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any) -> Any:
        drawn = real_draw(*args)
        x = drawn.conv.x.clone()
        x[1, 2] = value
        return replace(drawn, conv=ConvOps(x, drawn.conv.weight))

    monkeypatch.setitem(REGIMES, "random", draw)
    with pytest.raises(ContractError, match=r"case case: expected finite operands, got a non-finite conv\[0\].x"):
        Case(engine.spec(), CONTRACT)


def test_a_chain_only_contract_gets_chains_alone() -> None:
    chains = Contract(trees=False)
    fitting = [s for s in families.family(SHAPE, "heldout", 1) if families.fits(s, chains)]
    assert fitting and all(t.partition(":")[0] in ("chain", "mtp5") for s in fitting for t in s.trees)
    assert all(families.fits(s, CONTRACT) for s in families.family(SHAPE, "heldout", 1))
