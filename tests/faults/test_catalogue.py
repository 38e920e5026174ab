"""Every fault of the catalogue changes what it says and nothing else, and says where it comes from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.cases import Case, CaseSpec
from audit.fault_cases import ladder
from audit.guard import poison_, tensors_of
from audit.native import row_ops, step_batch
from audit.scene import scene_of
from audit.stage import Stage
from faults import BLIND, CATALOGUE, EVERY, NEEDS, Fault
from faults.catalogue import EXPECTATIONS, STAGES, by_id
from faults.classes import CLASSES, NOT_EXPRESSED, covered
from faults.paths import changed as changed_paths
from faults.paths import paths_of, short_from
from faults.sampler import SAMPLER_FAULTS
from faults.topology import roots
from faults.variant import AttentionVariant, ConvVariant, GdnVariant
from faults.variant_backend import TORCH, variant
from faults.variant_math import softplus, unit
from lumotree.backends.batch import accepted_paths, build_batch, replan
from lumotree.backends.protocol import SHARED_OPERANDS, SURFACES, StepOut
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import InputError
from lumotree.tree_named import chain

INNER = TorchBackend()
SPECS = list(ladder(3))


@cache
def scene(index: int) -> Any:
    return scene_of(Case(SPECS[index], INNER.contract))


#: Faults that only trees or cycles other than `drive`'s reach: see test_blind.
BY_PROGRAM = ("cut_ring", "fewer_rows", "double_buffer")


def reaching(fault: Fault) -> list[CaseSpec]:
    return [spec for i, spec in enumerate(SPECS) if fault.reaches(scene(i))]


Results = dict[tuple[str, str], dict[str, Tensor]]


def drive(backend: Any, spec: CaseSpec) -> Results:
    """Plain step, verify, publish, plain step, then another tree with other operands one token further, publish.

    What each call left of its surface, by (surface, stage), and the inputs at the end.
    """
    case = Case(spec, INNER.contract)
    stage = Stage(backend, case)
    found: Results = {(s, stage_): {} for s in SURFACES for stage_ in ("verify", "publish", "between")}
    found["", "inputs"] = {}
    layers = list(range(case.dims.layers))

    def keep(what: str, when: str, surface: str, out: Tensor | None = None) -> None:
        pool = stage.pool(surface)
        parts = {"pool": pool} if isinstance(pool, Tensor) else {"k": pool.k, "v": pool.v}
        if out is not None:
            parts["out"] = out[case.batch.active] if len(out) == case.batch.rows else out
        found[surface, what] |= {f"{when}.{name}": value.clone() for name, value in parts.items()}

    def plain(when: str) -> None:
        for request, tree in enumerate(case.trees):
            for layer in layers:
                ops, batch = (
                    row_ops(case, case.offsets[request] + tree.active_rows[-1], layer, list(SURFACES)),
                    step_batch(case, request, tree.prefix_len),
                )
                d = case.dims
                shapes = {"gdn": (1, d.hv, d.dv), "conv": (1, d.conv_channels), "attention": (1, d.q_heads, d.head_dim)}
                out = StepOut(**{s: poison_(torch.empty(n, dtype=torch.bfloat16)) for s, n in shapes.items()})
                backend.native_step(ops, case.pools, batch, out, layer)
                for s in SURFACES:
                    keep("between", f"{when}.{request}.{layer}", s, getattr(out, s))

    def verify(when: str, batch: Any, change: Any) -> None:
        for layer in layers:
            for s in SURFACES:
                ops = change(stage.operands(s, layer))
                backend_out = poison_(stage.out[layer][s])
                stage.run_verify(s, layer, ops, batch, backend_out)
                keep("verify", f"{when}.{layer}", s, backend_out)

    def publish(when: str, batch: Any, paths: list[tuple[int, ...]], chosen: list[int]) -> None:
        accepted = accepted_paths(case.in_batch_order(paths), longest=stage.longest)
        for s in SURFACES:
            stage.run_publish(s, batch, accepted, chosen)
            keep("publish", when, s)

    second = replan(case.batch, roots(case.batch))
    second = replace(
        second, position=second.position + 1, prefix_len=second.prefix_len + (second.state_slot >= 0).int()
    )
    rolled = lambda ops: replace(  # noqa: E731
        ops, **{k: v if k in SHARED_OPERANDS else v.roll(1, 0) for k, v in vars(ops).items()}
    )
    verify("first", case.batch, lambda ops: ops)
    deepest = [t.path(max(t.leaves, key=lambda row: int(t.depth[row]))) for t in case.trees]
    publish("none", case.batch, [() for _ in case.trees], layers)
    publish("inner", case.batch, [p[:-1] or p for p in deepest], layers)
    publish("first", case.batch, [deepest[0], *[p[:1] for p in deepest[1:]]], layers)
    plain("then")
    verify("second", second, rolled)
    publish(
        "one layer",
        second,
        [(0, t.active_rows[-1]) if len(t.active_rows) > 1 else (0,) for t in case.trees],
        layers[:1],
    )
    found["", "inputs"] = {
        k: v.clone() for k, v in tensors_of([case.gdn, case.conv, case.attention, case.batch]).items()
    }
    found["", "inputs"]["guards"] = torch.tensor(len(case.arena.broken()))
    return found


CLEAN: dict[str, Results] = {}


def clean(spec: CaseSpec) -> Results:
    if spec.id not in CLEAN:
        CLEAN[spec.id] = drive(INNER, spec)
    return CLEAN[spec.id]


def changed(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return any(not torch.equal(numbers(x), numbers(b[k])) for k, x in a.items())


def numbers(x: Tensor) -> Tensor:
    return x.nan_to_num(7.5) if x.is_floating_point() else x


WRITES_ELSEWHERE = ("operands_overwritten", "positions_advanced", "writes_behind_outputs")


@pytest.mark.parametrize("fault", [f for f in EVERY.values() if f.kind not in BY_PROGRAM], ids=lambda f: f.id)
def test_a_fault_changes_its_own_surface_at_its_own_stage_and_nothing_else(fault: Fault) -> None:
    for spec in reaching(fault)[: None if fault.blind else 1]:
        right, faulty = clean(spec), fault.wrap(INNER)
        try:
            wrong = drive(faulty, spec)
        except InputError:
            pytest.fail("the backend refused the fault: it is bad input, not a wrong kernel")
        if faulty.changed:
            break
    differing = {key for key in right if changed(right[key], wrong[key])}
    surfaces = {s for s, _ in differing if s}
    assert surfaces <= {fault.surface}
    assert (("", "inputs") in differing) == (fault.kind in WRITES_ELSEWHERE)
    if fault.expect == "harmless":
        assert not differing and faulty.changed
        return
    assert differing and faulty.changed
    if fault.stage == "publish" and not fault.kind.startswith("swapped"):
        for name, value in right[fault.surface, "verify"].items():
            if name.startswith("first"):
                assert torch.equal(numbers(value), numbers(wrong[fault.surface, "verify"][name]))


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("index", [0, 2, 7, 11, 12], ids=lambda i: SPECS[i].id.rsplit("/", 1)[-1])
def test_a_variant_without_a_change_has_the_bits_of_the_kernel(backend: Any, index: int) -> None:
    for surface, same in (("gdn", GdnVariant()), ("conv", ConvVariant()), ("attention", AttentionVariant())):
        faulty = variant(surface, same)(backend)
        right, again = drive(backend, SPECS[index]), drive(faulty, SPECS[index])
        assert not faulty.changed and not [key for key in right if changed(right[key], again[key])]


def test_every_fault_says_where_it_comes_from_and_what_it_needs() -> None:
    for name, fault in EVERY.items():
        assert name == fault.id == f"{fault.kind}.{fault.surface}" and fault.surface in SURFACES
        assert fault.statement and fault.provenance and fault.stage in STAGES and fault.expect in EXPECTATIONS
        assert set(fault.needs) <= set(NEEDS) and (fault.expect == "detected") == (not fault.proof)
        assert reaching(fault) or fault.kind in BY_PROGRAM, f"no small case has what {name} needs"
        if fault.knob:
            assert len(set(fault.knob.sizes)) == len(fault.knob.sizes) > 2 and fault.knob.unit
    assert len(CATALOGUE) >= 120 and not set(CATALOGUE) & set(BLIND)
    assert {f.id for f in EVERY.values() if f.blind} == set(BLIND) and 10 * len(BLIND) >= len(CATALOGUE)


def test_a_path_is_cut_from_its_size_on() -> None:
    batch = build_batch([chain(4)], state_slots=[0], page_table=torch.zeros(1, 9, dtype=torch.int32), page_size=1)
    for least, left in ((3, [0, 1, 2, 2, 3, 4]), (5, [0, 1, 2, 3, 4, 4])):
        made = [changed_paths(short_from(least))(accepted_paths([list(range(n))], longest=6), batch) for n in range(6)]
        assert [paths_of(accepted)[0] for accepted, _ in made] == [list(range(n)) for n in left]


def test_a_variant_of_the_gate_or_the_norm_differs_where_its_size_says() -> None:
    x = torch.tensor([[-2.0, 3.5, 4.5, 19.0, 21.0]])
    right, early = (softplus(x, Contract(), v, TORCH) for v in (GdnVariant(), GdnVariant(linear_above=4.0)))
    assert (right == early).tolist() == [[True, True, False, True, True]] and early[0, 2] == 4.5
    row = torch.full((1, 1, 4), 1e-3)  # a sum of squares of 4e-6
    assert torch.allclose(unit(row, Contract(), GdnVariant(eps=1e-5), TORCH), row / 14e-6**0.5)
    assert torch.allclose(unit(row, Contract(), GdnVariant(), TORCH), row / 5e-6**0.5)


def test_ids_are_unique() -> None:
    one = next(iter(CATALOGUE.values()))
    with pytest.raises(ValueError, match=r"got id='wrong_parent\.gdn' twice"):
        by_id([one], [one])


def test_an_arithmetic_fault_does_not_fit_a_kernel_whose_formulas_are_out_of_reach() -> None:
    fault = CATALOGUE["gate_twice.gdn"]
    assert fault.fits(INNER) and fault.fits(ReferenceBackend()) and not fault.fits(object())


def test_every_public_class_is_a_fault_or_is_listed_with_the_reason() -> None:
    found = covered(CATALOGUE, SAMPLER_FAULTS)
    assert len(set(CLASSES)) == len(CLASSES) == 175
    assert set(found) | set(NOT_EXPRESSED) == set(CLASSES) and not set(found) & set(NOT_EXPRESSED)
    assert {c for f in EVERY.values() for c in f.classes} <= set(CLASSES)
    assert {c[0] for c in CLASSES if c in found} >= set("ABCDEFGHIJKLMNOPQR")
    named = [word for reason in NOT_EXPRESSED.values() for word in reason.split() if word in SAMPLER_FAULTS]
    assert set(named) == {"penalties_flat", "fixed_seed", "late_generator", "duplicate_twice"}
