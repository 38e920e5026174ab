"""What the Triton backend refuses before it launches anything, and how launches are grouped."""

from dataclasses import replace

import pytest
import torch
import triton

from lumotree.backends.protocol import Limits, covered_surfaces
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import DIMS_27B, DIMS_TINY
from lumotree.errors import BackendError, ContractError
from lumotree.mechanisms.bank_walk import BankWalkBackend
from lumotree.verifier import kernels
from lumotree.verifier.kernels import INTERPRETED, launch


@pytest.mark.parametrize(("field", "value"), [("dk", 257), ("head_dim", 513), ("conv_width", 17)])
def test_sizes_above_the_limits_are_refused(field: str, value: int) -> None:
    dims = replace(DIMS_TINY, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=f"{field}={value} is above the limit"):
        TritonBackend().allocate(dims, Limits(1, 4, 4, 2, 1), torch.device("cpu"))


def test_every_surface_is_covered() -> None:
    assert covered_surfaces(TritonBackend()) == dict.fromkeys(("gdn", "conv", "attention"), (True, True))


def test_tiles_own_the_whole_key_dimension() -> None:
    assert launch.gdn_tile(DIMS_27B.dk, DIMS_27B.dv) == launch.Tile(32, 128, 4)
    assert launch.gdn_tile(12, 20) == launch.Tile(32, 16, 1)
    assert launch.attention_tile(DIMS_27B.head_dim) == launch.Tile(16, 256, 4)


def test_launches_of_layers() -> None:
    assert launch.runs([0, 1, 2]) == [(0, 3)]
    assert launch.runs([2, 0, 1, 5]) == [(2, 1), (0, 2), (5, 1)]


@pytest.mark.skipif(not INTERPRETED or torch.cuda.is_available(), reason="the interpreter is chosen only without a GPU")
def test_compiled_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.jit, "JITFunction", object)
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        kernels.prepare_triton()


def test_a_workspace_that_the_card_has_no_room_for_is_refused_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 80 << 30))
    gpu, limits = torch.device("cuda", 0), Limits(1, 32, 12, 2, 48)
    launch.check_memory("bank", 3 << 20, gpu)
    launch.check_memory("bank", 1 << 60, torch.device("cpu"))
    with pytest.raises(
        BackendError, match=r"workspace: expected \d+ MiB of free memory on cuda:0, got 3 MiB; use fewer"
    ):
        TritonBackend().allocate(DIMS_27B, limits, gpu)
    with pytest.raises(BackendError, match=r"bank: expected 4,608 MiB of free memory"):
        BankWalkBackend().allocate(DIMS_27B, limits, gpu)
