"""What a stranger's method may do with the memory that it is lent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.calls import call
from audit.component import audit_case
from audit.fault_cases import ladder
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import BackendError


@dataclass(frozen=True)
class Pools:
    """Two tensors."""

    recurrent: Tensor
    conv: Tensor


class Swaps:
    """Does to its arguments what it is told."""

    def data(self, pool: Tensor) -> None:
        pool.data = pool.clone()

    def set(self, pool: Tensor) -> None:
        pool.set_(pool.clone())  # type: ignore[call-overload]

    def field(self, pools: Pools) -> None:
        pools.conv.data = pools.conv.clone()

    def in_place(self, pool: Tensor, pools: Pools, ws: dict[str, Tensor]) -> int:
        pool += 1
        pools.conv.mul_(2)
        ws["mine"].data = ws["mine"].clone()
        return 7


@pytest.mark.parametrize("method", ["data", "set"])
def test_other_memory_behind_a_lent_tensor_is_named(method: str) -> None:
    with pytest.raises(BackendError, match=rf"case c: {method} put other memory behind argument 0, expected values w"):
        call(Swaps(), method, "c", torch.zeros(3))


def test_other_memory_behind_a_lent_field_is_named() -> None:
    with pytest.raises(BackendError, match="field put other memory behind conv, expected values written in place"):
        call(Swaps(), "field", "c", Pools(torch.zeros(3), torch.zeros(3)))


def test_writing_in_place_and_a_workspace_of_ones_own_are_right() -> None:
    assert (
        call(Swaps(), "in_place", "c", torch.zeros(3), Pools(torch.zeros(3), torch.zeros(3)), {"mine": torch.zeros(2)})
        == 7
    )


def test_a_publication_into_other_memory_passes_no_audit() -> None:
    class Elsewhere(TorchBackend):
        def gdn_publish(self, pool: Tensor, *args: Any) -> None:
            new = pool.clone()
            super().gdn_publish(new, *args)
            pool.data = new

    spec = next(iter(ladder(1)))
    with pytest.raises(BackendError, match="gdn_publish put other memory behind argument 0"):
        audit_case(Elsewhere(), spec)
