"""Guards, poison and snapshots notice every bit that is written where nothing may be written."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from audit.guard import GUARD, Arena, Snapshot, poison_, tensors_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


def element(x: Tensor, index: int) -> Tensor:
    """Element `index` of the storage behind a contiguous tensor, counted from the tensor's first."""
    return torch.as_strided(x, (1,), (1,), x.storage_offset() + index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [-GUARD, -1, 6, 6 + GUARD - 1])
def test_one_element_written_beyond_a_tensor_breaks_its_guard_alone(dtype: torch.dtype, offset: int) -> None:
    arena = Arena("cpu")
    arena.empty("left", (2, 3), dtype)
    x = arena.empty("x", (2, 3), dtype)
    arena.empty("right", (4,), dtype)
    assert arena.broken() == []
    element(x, offset).fill_(1)
    assert arena.broken() == ["x"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing_all_of_a_tensor_leaves_its_guard_whole(dtype: torch.dtype) -> None:
    arena = Arena("cpu")
    x = arena.empty("x", (2, 3), dtype)
    x.fill_(1)
    arena.copy("y", x).zero_()
    arena.empty("nothing", (0, 3), dtype)
    assert arena.broken() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_an_ordinary_nan_written_into_a_guard_is_seen(dtype: torch.dtype) -> None:
    arena = Arena("cpu")
    x = arena.empty("x", (3,), dtype)
    element(x, 3).fill_(float("nan"))
    assert arena.broken() == ["x"]


def test_a_read_beyond_a_tensor_poisons_what_it_feeds() -> None:
    x = Arena("cpu").copy("x", torch.ones(3))
    assert torch.as_strided(x, (4,), (1,), x.storage_offset()).sum().isnan()


def test_poison_is_nan_or_an_index_that_is_out_of_range() -> None:
    assert poison_(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
    assert poison_(torch.zeros(3, dtype=torch.int32)).tolist() == [-1, -1, -1]
    assert poison_(torch.ones(2, dtype=torch.bool)).tolist() == [False, False]


def test_a_copy_has_the_bits_of_its_source() -> None:
    source = torch.tensor([[1.0, -0.0], [float("nan"), 3.0]])
    assert torch.equal(Arena("cpu").copy("x", source).view(torch.int32), source.view(torch.int32))


@dataclass
class Inner:
    x: Tensor
    n: int = 3


class Plain:
    def __init__(self) -> None:
        self.kept = torch.zeros(2)
        self.name = "plain"


def test_every_tensor_of_a_nest_is_found_by_name() -> None:
    nest = {"a": Inner(torch.zeros(1)), "b": [torch.zeros(2), (torch.zeros(3),)], "c": Plain(), "d": "text", "e": None}
    assert sorted(tensors_of(nest)) == ["a.x", "b.0", "b.1.0", "c.kept"]


@pytest.mark.parametrize("bit", [0, 15])
def test_a_snapshot_names_the_tensor_in_which_one_bit_changed(bit: int) -> None:
    live = {"same": torch.zeros(4, dtype=torch.bfloat16), "moved": torch.zeros(4, dtype=torch.bfloat16)}
    before = Snapshot(live)
    assert before.changed() == []
    live["moved"].view(torch.int16)[2] ^= -(2**15) if bit == 15 else 1  # the sign bit alone makes -0 of 0
    assert before.changed() == ["moved"]


def test_restore_writes_back_in_place() -> None:
    x = torch.arange(4.0)
    before, address = Snapshot([x]), x.data_ptr()
    x.fill_(9)
    before.restore()
    assert before.changed() == [] and x.tolist() == [0, 1, 2, 3] and x.data_ptr() == address
    assert before.saved("0").tolist() == [0, 1, 2, 3]


class Node:
    """A node that knows its parent and its children, as those of a tree do."""

    def __init__(self, parent: Node | None) -> None:
        self.parent, self.value = parent, torch.zeros(3)
        self.children = [] if parent is not None else [Node(self), Node(self)]


def test_a_workspace_that_points_at_itself_is_followed_once() -> None:
    root = Node(None)
    ws: dict[str, object] = {"tree": root, "same": root.children[0], "count": torch.ones(2)}
    ws["me"] = ws
    assert {n for n in tensors_of(ws) if not n.startswith("same.parent")} >= {
        "tree.value", "tree.children.0.value", "tree.children.1.value", "same.value", "count"
    }  # fmt: skip
    kept = Snapshot(ws)
    root.children[1].value += 1
    assert any("children.1.value" in name for name in kept.changed())
    kept.restore()
    assert not kept.changed() and not root.children[1].value.any()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(7), torch.ones(2, 1).expand(2, 3), torch.nn.Parameter(torch.ones(3)), torch.ones(())],
    ids=["expanded", "expanded in one", "parameter", "scalar"],
)
def test_whatever_a_workspace_holds_is_put_back(tensor: torch.Tensor) -> None:
    kept = Snapshot({"x": tensor})
    with torch.no_grad():
        tensor.as_strided((1,), (1,)).fill_(5.0)
    assert kept.changed() == ["x"]
    kept.restore()
    assert not kept.changed() and bool((tensor == 1).all())
