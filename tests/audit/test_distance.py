"""Every metric, with a pair that it must tell apart and one that it must not."""

from __future__ import annotations

import math

import pytest
import torch

from audit import distance as d
from lumotree.errors import ContractError

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_equal_tensors_have_equal_bits(dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(3, 4).to(dtype)
    assert d.same_bits(x, x.clone())
    assert d.differing(x, x.clone()) == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_signed_zeros_differ_in_their_bits(dtype: torch.dtype) -> None:
    a, b = torch.tensor([0.0, 1.0]).to(dtype), torch.tensor([-0.0, 1.0]).to(dtype)
    assert torch.equal(a, b)  # what a comparison by value would say
    assert d.differing(a, b) == 1


def test_nan_equals_itself_but_not_another_payload() -> None:
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert d.same_bits(quiet, quiet.clone())
    assert d.differing(quiet, other) == 1


def test_one_last_bit_is_one_differing_element_in_its_cell() -> None:
    a = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    b = a.clone()
    b.view(torch.int16)[1, 2, 3] += 1
    assert d.differing_cells(a, b, cells=2).tolist() == [[0, 0, 0], [0, 0, 1]]


def test_bits_of_a_strided_view() -> None:
    a = torch.randn(4, 6)
    assert d.same_bits(a.T, a.T.contiguous())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3), "one shape"),
        (torch.zeros(2, dtype=torch.float64), "one dtype"),
    ],
)
def test_bits_refuse_to_broadcast_or_promote(other: torch.Tensor, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        d.same_bits(torch.zeros(2), other)


def test_bits_refuse_complex() -> None:
    with pytest.raises(ContractError, match="real, integer or bool"):
        d.bit_pattern(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2**-7), (torch.float32, 2**-23)])
def test_ulp_distance(dtype: torch.dtype, step: float) -> None:
    big = torch.finfo(dtype).max
    a = torch.tensor([1.0, 1.0, 0.0, INF, NAN, 2.0]).to(dtype)
    b = torch.tensor([1.0 + step, 1.0, -0.0, big, NAN, -2.0]).to(dtype)
    to_two = int(torch.tensor([2.0]).to(dtype).view(torch.int16 if dtype == torch.bfloat16 else torch.int32))
    assert d.ulp_distance(a, b).tolist() == [1, 0, 0, 1, d.ULP_NAN, 2 * to_two]


def test_ulp_distance_across_zero_counts_both_smallest_numbers() -> None:
    tiny = torch.tensor([1, 0], dtype=torch.int32).view(torch.float32)
    assert d.ulp_distance(tiny, -tiny).tolist() == [2, 0]


def test_ulp_distance_refuses_other_dtypes() -> None:
    with pytest.raises(ContractError, match="bf16 or fp32"):
        d.ulp_distance(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


def test_rms_and_max_error_are_per_cell() -> None:
    reference = torch.zeros(2, 4, dtype=torch.float64)
    got = torch.tensor([[0.0, 0, 0, 0], [2.0, 0, 0, 0]])
    assert d.rms_error(got, reference, 1).tolist() == [0.0, 1.0]
    assert d.max_error(got, reference, 1).tolist() == [0.0, 2.0]
    assert d.max_error(got, reference, 0).item() == 2.0


def test_one_bad_row_shows_in_its_own_cell_only() -> None:
    reference = torch.zeros(1000, 8, dtype=torch.float64)
    got = torch.zeros(1000, 8)
    got[7] = 1.0
    assert d.rms_error(got, reference, 1)[7] == 1.0
    assert d.rms_error(got, reference, 0) < 0.04  # pooled, it would nearly vanish


def test_nan_in_a_cell_survives() -> None:
    reference = torch.zeros(2, 2, dtype=torch.float64)
    got = torch.tensor([[NAN, 5.0], [1.0, 1.0]])
    for metric in (d.rms_error, d.max_error):
        error = metric(got, reference, 1)
        assert error.isnan().tolist() == [True, False]
        assert d.worst_ratio(error, 1.0) == INF


def test_errors_demand_a_float64_reference_and_a_non_empty_cell() -> None:
    with pytest.raises(ContractError, match="float64 reference"):
        d.rms_error(torch.zeros(2), torch.zeros(2), 0)
    with pytest.raises(ContractError, match="no element"):
        d.max_error(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.float64), 1)
    with pytest.raises(ContractError, match="cells=3"):
        d.max_error(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float64), 3)


def test_relative_l2() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    got = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.0, 1.0]])
    assert d.relative_l2(got, reference, 1).tolist() == [0.1, 0.0, INF]


@pytest.mark.parametrize(
    ("error", "bound", "ratio"),
    [(1.0, 2.0, 0.5), (0.0, 0.0, 0.0), (1e-300, 0.0, INF), (NAN, 1.0, INF), (INF, 1.0, INF), (NAN, 0.0, INF)],
)
def test_worst_ratio(error: float, bound: float, ratio: float) -> None:
    assert d.worst_ratio(torch.tensor([0.0, error], dtype=torch.float64), bound) == ratio


def test_worst_ratio_of_nothing_is_refused() -> None:
    with pytest.raises(ContractError, match="at least one cell"):
        d.worst_ratio(torch.zeros(0), 1.0)


@pytest.mark.parametrize("bound", [NAN, INF, -1.0])
def test_a_bound_that_judges_nothing_is_refused(bound: float) -> None:
    with pytest.raises(ContractError, match="finite and >= 0"):
        d.worst_ratio(torch.zeros(1), bound)


def test_paired_rule_is_the_published_formula() -> None:
    native, m64 = torch.tensor([1e-3, 0.0, 0.0]).double(), torch.tensor([2.0, 4.0, 0.0]).double()
    bound = 1.10 * native + 2.0**-24 * m64 + 2.0**-149
    assert d.paired_rule(bound, native, m64).tolist() == [1.0, 1.0, 1.0]
    assert bool((d.paired_rule(bound * 1.01, native, m64) > 1).all())


def test_paired_rule_without_a_finite_native_arm_holds_nowhere() -> None:
    zero, bad = torch.zeros(2).double(), torch.tensor([NAN, INF]).double()
    assert d.paired_rule(zero, bad, zero).tolist() == [INF, INF]


def test_kl_and_tv_of_known_rows() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)]
    assert d.kl_rows(p, q).tolist() == pytest.approx(expected)
    assert d.tv_rows(p, q).tolist() == [0.25, 0.5]
    assert d.kl_rows(q, p)[1] == INF
    assert d.kl_rows(p, p).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.5, NAN], "p: expected every probability finite, got nan in row 1 of 2"),
        ([1.5, -0.5], "p: expected every probability >= 0, got -0.5 in row 1 of 2"),
        ([0.5, 0.25], "p: expected a sum of 1 within 1e-05, got 0.75 in row 1 of 2"),
    ],
)
@pytest.mark.parametrize("metric", [d.kl_rows, d.tv_rows])
def test_bad_probability_rows_are_named(metric: object, row: list[float], message: str) -> None:
    good = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    with pytest.raises(ContractError, match=message):
        metric(torch.tensor([[0.5, 0.5], row]), good)  # type: ignore[operator]


def test_probabilities_must_be_floats() -> None:
    with pytest.raises(ContractError, match="floating rows"):
        d.tv_rows(torch.tensor([[1, 0]]), torch.tensor([[1, 0]]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_metrics_stay_on_the_device_of_their_tensors() -> None:
    a, b = torch.ones(4, 8, device="cuda"), torch.ones(4, 8, device="cuda") * 1.5
    assert d.differing(a, b) == 32
    for result in (d.ulp_distance(a, b), d.max_error(a, b.double(), 1), d.ratios(a, 2.0), d.tv_rows(a / 8, a / 8)):
        assert result.device.type == "cuda"
    with pytest.raises(ContractError, match="one device"):
        d.same_bits(a, b.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_same_bits_does_not_depend_on_where_a_tensor_starts(dtype: torch.dtype, offset: int, count: int) -> None:
    plain = torch.arange(count).remainder(2).to(dtype)
    moved = torch.cat([torch.zeros(offset, dtype=dtype), plain])[offset:]
    assert d.same_bits(plain, moved)
    changed = moved.clone()
    changed[-1] = 1 - changed[-1].int()
    assert not d.same_bits(plain, changed)
