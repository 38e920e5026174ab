"""Samplers that other people wrote, behind the protocol: sglang's tree, chain and greedy ones, tokenspeed's greedy one.

Read off sglang 0.5.23 (`kernels/ops/speculative/reject_sampling.py`, `spec_tree.py`, the CUDA tree sampler) and
tokenspeed-kernel 0.1.4 (`ops/sampling/triton/tree_verify.py`). On a machine without a GPU the Triton ones run in
Triton's interpreter, some milliseconds a walk, so they claim few walks and a small vocabulary there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lumotree.backends import interpreter
from lumotree.backends.peer_cuda import tree_sampling
from lumotree.backends.peer_loading import attribute, load_kernel_module, sglang_stand_ins, tokenspeed_stand_ins
from lumotree.errors import BackendError, InputError
from lumotree.select_types import Coins, Step, Walks
from lumotree.tree import Tree

#: What is asked of the interpreter at most.
SLOW_WALKS, SLOW_VOCAB = 512, 64
SLOW_CHAIN = 32
"""Walks of the chain kernel, whose every program runs two scans of a vocabulary block of 4,096."""


class _Peer:
    """Claims of a peer: few walks and a small vocabulary where there is no GPU."""

    def __init__(self) -> None:
        slow = interpreter.prepare()
        self.device = "cpu" if interpreter.wanted() else "cuda"
        self.walks = SLOW_WALKS if slow else None
        self.vocab = SLOW_VOCAB if slow else None


class SglangChain(_Peer):
    """`chain_speculative_sampling_triton`: rejection along a chain of redrawn drafts, float32, coins as an argument.

    The kernel takes one coin for the final token; it is called twice, the second time with the coin of the row at which
    the first call ended, so that both rules read the same coins. Coins are rounded *down* to float32: 1 is no coin.
    """

    rule = "multi-round"
    drafts = ("sampled",)
    trees = False

    def __init__(self) -> None:
        super().__init__()
        self.walks = SLOW_CHAIN if self.walks else None
        module = load_kernel_module("sglang", "kernels/ops/speculative/reject_sampling.py", {})
        self._kernel = attribute("sglang", module, "chain_speculative_sampling_triton")

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """As `CoinSampler.select`. Raises InputError for a tree with siblings or a step without laws."""
        tree, count = step.tree, len(coins.accept)
        if step.laws is None or any(len(tree.active_children(row)) > 1 for row in tree.active_rows):
            raise InputError("sglang chain sampling: expected a chain with draft laws")
        wide = tokens.expand(count, -1)
        final = _single(coins.residual)
        length, _ = self._run(step, wide, _single(coins.accept), final[:, 0])
        length, bonus = self._run(step, wide, _single(coins.accept), final.gather(1, length[:, None])[:, 0])
        return Walks(length, bonus, length < tree.n - 1, tokens)

    def _run(self, step: Step, tokens: Tensor, accept: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Number of accepted drafts and final token of each walk. Row r of a chain is its r-th draft."""
        assert step.laws is not None
        (count, n), on = tokens.shape, self.device
        predicts = torch.full((count * n,), -1, dtype=torch.int32, device=on)
        index = torch.full((count, n), -1, dtype=torch.int32, device=on)
        length = torch.full((count,), -1, dtype=torch.int32, device=on)
        rows = torch.arange(count * n, device=on).view(count, n)
        target = step.target.to(on, torch.float32).expand(count, -1, -1)
        laws = step.laws[: max(n - 1, 1)].to(on, torch.float32).expand(count, -1, -1)
        self._kernel(
            predicts, index, length, tokens.to(on).contiguous(), rows, rows, rows, accept[:, 1:].to(on).contiguous(),
            final.to(on).contiguous(), target, laws, 1.0, 1.0, True,
        )  # fmt: skip
        accepted = length.to(torch.int64)
        bonus = predicts.view(count, n).gather(1, accepted.clamp(0, n - 1)[:, None])[:, 0]
        return accepted.cpu(), bonus.to(torch.int64).cpu()


def _single(coins: Tensor) -> Tensor:
    """Coins as float32, rounded down."""
    rounded = coins.to(torch.float32)
    return torch.where(rounded.double() > coins, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


class SglangTree:
    """`tree_speculative_sampling_target_only`, float32, coins as an argument; CUDA only.

    It walks down with one coin a row, against the running sum of the children's target probabilities, and so draws from
    the target alone: the law of the naive rule for any drafts. A repeated sibling would be counted twice, so siblings
    have to differ. The coin of a row's first child chooses among its children; as in `SglangChain` a second call has
    the final coin of the row at which the first one ended. kernel, device: for tests of the adapter.
    """

    rule = "naive"
    duplicates = False
    MEMORY = 8 << 30
    """Bytes of target rows in one launch: each walk has its own copy of all rows, as each request has."""

    def __init__(self, kernel: Callable[[Sequence[Tensor], int], None] = tree_sampling, device: str = "cuda") -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise BackendError("sampler 'sglang-tree': a CUDA kernel; needs a GPU that torch can see")
        self._kernel, self.device = kernel, device
        self._rows: tuple[Step, Tensor, Tensor] | None = None

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """As `CoinSampler.select`. Inactive rows are linked nowhere."""
        tree, count = step.tree, len(coins.accept)
        accept = torch.zeros(count, tree.n)
        for row in tree.active_rows:
            if tree.active_children(row):
                accept[:, row] = _single(coins.accept[:, tree.active_children(row)[0]])
        final, wide = _single(coins.residual), tokens.expand(count, -1)
        last, bonus = torch.zeros(2, count, dtype=torch.int64)
        size = max(1, min(count, self.MEMORY // (4 * step.target.numel())))
        for start in range(0, count, size):
            part = slice(start, start + size)
            ends, _ = self._run(step, wide[part], accept[part], final[part, 0], size)
            own = final[part].gather(1, ends[:, None])[:, 0]
            last[part], bonus[part] = self._run(step, wide[part], accept[part], own, size)
        return _walks(tree, last, bonus, tokens)

    def _run(self, step: Step, tokens: Tensor, accept: Tensor, final: Tensor, size: int) -> tuple[Tensor, Tensor]:
        tree, (count, n), on = step.tree, tokens.shape, self.device
        child, sibling = (links.to(on).expand(count, -1).contiguous() for links in _links(tree))
        path = int(tree.depth.max()) + 1
        rows = torch.arange(count * n, device=on).view(count, n)
        predicts = torch.full((count * n,), -1, dtype=torch.int32, device=on)
        index = torch.full((count, path), -1, dtype=torch.int32, device=on)
        length = torch.full((count,), -1, dtype=torch.int32, device=on)
        target, draft = self._buffers(step, size)
        draft.zero_()  # the kernel marks refused siblings here
        self._kernel(
            (predicts, index, length, tokens.to(on).contiguous(), rows, child, sibling, accept.to(on).contiguous(),
             final.to(on).contiguous(), target[:count], draft[:count]), path,
        )  # fmt: skip
        at = index.gather(1, length.clamp(0, path - 1)[:, None].to(torch.int64))[:, 0].to(torch.int64)
        bonus = predicts[at.clamp(0, count * n - 1)].to(torch.int64)
        return (at % n).cpu(), bonus.cpu()

    def _buffers(self, step: Step, size: int) -> tuple[Tensor, Tensor]:
        """Target rows of `size` walks and room for refused siblings, float32 `[size, N, V]`; kept for a step."""
        if self._rows is None or self._rows[0] is not step or len(self._rows[1]) < size:
            self._rows = None
            target = step.target.to(self.device, torch.float32).expand(size, -1, -1).contiguous()
            self._rows = step, target, torch.empty_like(target)
        return self._rows[1], self._rows[2]


class SglangGreedy(_Peer):
    """`verify_tree_greedy_triton`: follow the child that carries the target's argmax, over the whole tree."""

    rule = "greedy"

    def __init__(self) -> None:
        super().__init__()
        module = load_kernel_module("sglang", "kernels/ops/speculative/spec_tree.py", _spec_tree_stand_ins())
        self._kernel = attribute("sglang", module, "verify_tree_greedy_triton")

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """As `CoinSampler.select`; reads no coin. Inactive rows are linked nowhere."""
        tree, count, on = step.tree, len(coins.accept), self.device
        child, sibling = (links.to(on).expand(count, -1).contiguous() for links in _links(tree))
        rows = torch.arange(count * tree.n, device=on).view(count, tree.n)
        predicts = torch.full((count * tree.n,), -1, dtype=torch.int32, device=on)
        index = torch.full((count, tree.n), -1, dtype=torch.int32, device=on)
        length = torch.full((count,), -1, dtype=torch.int32, device=on)
        best = _argmax(step).to(on).expand(count, -1).contiguous()
        self._kernel(predicts, index, length, tokens.expand(count, -1).to(on).contiguous(), rows, child, sibling, best)
        ends = index.gather(1, length.clamp(min=0)[:, None].to(torch.int64))[:, 0].to(torch.int64)
        bonus = predicts[ends.clamp(min=0)].to(torch.int64)
        return _walks(tree, (ends % tree.n).cpu(), bonus.cpu(), tokens)


class TokenspeedGreedy(_Peer):
    """tokenspeed-kernel's `verify_tree`: as sglang's, by parents instead of links."""

    rule = "greedy"

    def __init__(self) -> None:
        super().__init__()
        module = load_kernel_module("tokenspeed", "ops/sampling/triton/tree_verify.py", tokenspeed_stand_ins())
        self._kernel = attribute("tokenspeed", module, "verify_tree")

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """As `CoinSampler.select`; reads no coin. Inactive rows get the parent -2, which no row is."""
        tree, count, on = step.tree, len(coins.accept), self.device
        parents = torch.from_numpy(tree.parents.astype("int32"))
        parents[~torch.from_numpy(tree.active.copy())] = -2
        predicts = torch.full((count * tree.n,), -1, dtype=torch.int32, device=on)
        length = torch.full((count,), -1, dtype=torch.int32, device=on)
        path = torch.full((count, tree.n), -1, dtype=torch.int32, device=on)
        best = _argmax(step).to(on, torch.int32).expand(count, -1).contiguous()
        drafts = tokens.expand(count, -1).to(on, torch.int32).contiguous()
        self._kernel(predicts, length, path, drafts, parents.to(on).expand(count, -1).contiguous(), best.view(-1))
        final = (length.to(torch.int64) - 1).clamp(min=0)[:, None]
        last = path.gather(1, final)[:, 0].to(torch.int64)
        bonus = predicts.view(count, tree.n).gather(1, final)[:, 0].to(torch.int64)
        return _walks(tree, last.cpu(), bonus.cpu(), tokens)


def _argmax(step: Step) -> Tensor:
    """First largest token of each row, int64 `[1, N]`; NumPy promises the first of tied ones."""
    return torch.from_numpy(step.target.cpu().numpy().argmax(1))[None]


def _links(tree: Tree) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each row, int64 `[N]`, -1 = none; inactive rows are left out."""
    child, sibling = torch.full((2, tree.n), -1, dtype=torch.int64)
    for row in tree.active_rows:
        children = tree.active_children(row)
        if children:
            child[row] = children[0]
        for left, right in itertools.pairwise(children):
            sibling[left] = right
    return child, sibling


def _walks(tree: Tree, last: Tensor, bonus: Tensor, tokens: Tensor) -> Walks:
    has_children = torch.tensor([bool(tree.active_children(row)) for row in range(tree.n)])
    return Walks(last, bonus, has_children[last.clamp(0, tree.n - 1)], tokens)


def _spec_tree_stand_ins() -> dict[str, dict[str, Any]]:
    """What `spec_tree.py` asks of its package: which device this is. It builds trees with a compiled kernel elsewhere;
    here only its Triton verifier is used, so the machine is said to be none of those it knows."""
    known = sglang_stand_ins()
    questions = dict.fromkeys(("is_cpu", "is_cuda", "is_hip", "is_musa", "is_npu", "is_xpu"), lambda: False)
    utils = {**known["sglang.srt.utils"], **questions}
    platform = {"current_platform": None}
    interface = {"reject_out_of_tree_path": lambda *_, **__: None}
    return {**known, "sglang.srt.utils": utils, "sglang.srt.platforms": platform,
            "sglang.srt.platforms.interface": interface}  # fmt: skip
