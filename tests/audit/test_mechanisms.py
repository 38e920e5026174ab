"""Each published policy through the component audit, as it claims; and what each keeps."""

from dataclasses import replace

import pytest
import torch

from audit.cases import CaseSpec
from audit.component import CaseResult, audit_case
from audit.families import DIMS_MICRO
from audit.tally import judged
from lumotree.backends.loader import load_backend
from lumotree.mechanisms.factors import PathFactors, fused_update, tf32

SPEC = CaseSpec(
    id="mechanism", dims=replace(DIMS_MICRO, layers=2), trees=("comb:3", "mtp5"), prefixes=(3, 5), entropy=(1, 2),
    page_size=16, padding=1,
)  # fmt: skip
CHAIN = replace(SPEC, id="chain", trees=("mtp5", "chain:3"))


def run(name: str, spec: CaseSpec = SPEC) -> tuple[CaseResult, set[str]]:
    """The result and the checks that failed, of those that the contract's claims make a duty."""
    torch.set_num_threads(1)
    backend = load_backend(name)
    result = audit_case(backend, spec)
    return result, {t.check for t in result.tallies.failures() if judged(t.check, backend.contract)}


@pytest.mark.parametrize("name", ["treewy", "specla", "weaver", "bank_walk"])
def test_a_policy_passes_the_audit(name: str) -> None:
    result, failed = run(name)
    assert failed == set()
    assert result.tallies["gdn.out.derived"].cells and result.tallies["gdn.state.derived"].cells


def test_a_chain_from_a_snapshot_passes_bit_for_bit() -> None:
    result, failed = run("snapshot_chain", CHAIN)
    assert failed == set()
    assert result.tallies["gdn.state.bitwise"].bitwise == result.tallies["gdn.state.bitwise"].cells > 0


def test_tf32_products_leave_the_bounds() -> None:
    assert "gdn.state.derived" in run("treewy_tf32")[1]


def test_a_fused_update_is_the_recurrence() -> None:
    gen = torch.Generator().manual_seed(3)
    k, u, decay = (
        torch.randn(2, 4, 5, generator=gen),
        torch.randn(2, 4, 3, generator=gen),
        torch.rand(2, 4, generator=gen),
    )
    decay[0, 2] = 0.0
    start = torch.randn(2, 5, 3, generator=gen)
    state = start
    for s in range(4):
        state = decay[:, s, None, None] * state + k[:, s, :, None] * u[:, s, None, :]
    torch.testing.assert_close(fused_update(start, PathFactors(0, k, u, decay)), state)


def test_tf32_keeps_ten_bits_and_rounds_to_even() -> None:
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11 + 2**-20)])
    assert tf32(x).tolist() == [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, -(1 + 2**-10)]
