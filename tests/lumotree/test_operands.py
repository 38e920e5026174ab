"""Operands and pools of the wrong kind are refused by every backend of ours, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audit.cases import Case, CaseSpec
from audit.stage import Stage
from lumotree.backends.loader import load_backend
from lumotree.contract import DIMS_TINY
from lumotree.errors import ContractError

BACKENDS = ["torch", "reference", "bank", "split_k", "sqrt_norm", "kv_layout", "wy"]


def stage_of(name: str) -> Stage:
    backend = load_backend(name)
    return Stage(backend, Case(CaseSpec("t", DIMS_TINY, ("comb:2",), (3,), (1,)), backend.contract))


def refused(stage: Stage, surface: str, ops: Any) -> str:
    out = stage.out[0][surface]
    with pytest.raises(ContractError) as refusal:
        stage.run_verify(surface, 0, ops, stage.case.batch, out)
    return str(refusal.value)


WRONG_DTYPE = [
    ("gdn", "q"), ("gdn", "k"), ("gdn", "v"), ("gdn", "a"), ("gdn", "b"), ("gdn", "A_log"), ("gdn", "dt_bias"),
    ("conv", "x"), ("conv", "weight"), ("attention", "q"), ("attention", "k"), ("attention", "v"), ("attention", "cos"),
]  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("surface", "operand"), WRONG_DTYPE)
def test_a_wrong_dtype_is_refused_by_name(name: str, surface: str, operand: str) -> None:
    stage = stage_of(name)
    ops = stage.operands(surface, 0)
    message = refused(stage, surface, replace(ops, **{operand: getattr(ops, operand).double()}))
    assert f" {operand}: expected torch." in message
    assert "got dtype=torch.float64" in message


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("surface", "operand"), [("gdn", "k"), ("conv", "x"), ("attention", "q")])
def test_a_stride_is_refused(name: str, surface: str, operand: str) -> None:
    stage = stage_of(name)
    ops = stage.operands(surface, 0)
    value = getattr(ops, operand)
    strided = torch.stack([value, value], -1)[..., 0]
    assert "expected a contiguous tensor, got stride=" in refused(stage, surface, replace(ops, **{operand: strided}))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("surface", "operand"), [("gdn", "v"), ("conv", "x"), ("attention", "k")])
def test_a_missing_row_is_refused(name: str, surface: str, operand: str) -> None:
    stage = stage_of(name)
    ops = stage.operands(surface, 0)
    short = getattr(ops, operand)[:-1].clone()
    message = refused(stage, surface, replace(ops, **{operand: short}))
    assert f" {operand}: expected at least {stage.case.batch.rows} rows" in message


@pytest.mark.parametrize("name", ["torch", "reference", "bank"])
def test_a_missing_tap_is_refused(name: str) -> None:
    stage = stage_of(name)
    ops = stage.operands("conv", 0)
    assert "weight: expected 4 taps" in refused(stage, "conv", replace(ops, weight=ops.weight[:, 1:].contiguous()))


@pytest.mark.parametrize("name", ["torch", "reference", "bank"])
def test_a_pool_of_another_dtype_or_layout_is_refused(name: str) -> None:
    stage = stage_of(name)
    ops, batch, out = stage.operands("gdn", 0), stage.case.batch, stage.out[0]["gdn"]
    pool = stage.pool("gdn")
    for wrong, words in ((pool.bfloat16(), "got dtype=torch.bfloat16"), (pool.mT.contiguous(), "layout VK")):
        with pytest.raises(ContractError, match=words):
            stage.backend.gdn_verify(ops, wrong, batch, stage.ws, out, 0)
