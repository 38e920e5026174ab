"""The adapter of sglang's CUDA tree sampler: what it hands to the kernel, with the kernel's steps in plain Python."""

from __future__ import annotations

import pytest
import torch

from audit.law_rules import NAIVE
from audit.sampler_cases import small_step
from audit.summed_law import summed_law
from lumotree.backends import peer_cuda
from lumotree.backends.peer_samplers import SglangTree
from lumotree.errors import BackendError


def plain_kernel(tensors, path):
    """What the kernel does, walk by walk: one coin a row against the running sum of its children's target."""
    predicts, index, length, drafts, rows, child, sibling, coins, final, target, draft = tensors
    for w in range(len(drafts)):
        at, count = 0, 0
        index[w, 0] = rows[w, 0]
        while count + 1 < path:
            running, next_row = torch.tensor(0.0), int(child[w, at])
            while next_row != -1:
                token = int(drafts[w, next_row])
                running = running + target[w, at, token]
                if target[w, at, token] > 0 and coins[w, at] < running:
                    break
                draft[w, at, token] = target[w, at, token]
                next_row = int(sibling[w, next_row])
            if next_row == -1:
                break
            predicts[rows[w, at]] = drafts[w, next_row].to(torch.int32)
            at, count = next_row, count + 1
            index[w, count] = rows[w, at]
        length[w] = count
        left = (target[w, at] - (draft[w, at] if count + 1 < path else 0)).clamp(min=0)
        cdf = torch.cumsum(left, 0)
        place = int(torch.searchsorted(cdf, final[w] * cdf[-1], right=True))
        predicts[rows[w, at]] = min(place, int(torch.nonzero(left)[-1]))


@pytest.mark.parametrize(("tree", "sampled"), [("fork-3", False), ("chain-3", False), ("chain-2", True)])
def test_the_adapter_follows_the_law_it_claims(tree: str, sampled: bool) -> None:
    """The last row that the first call finds takes its own coin in the second: the law is summed over all coins."""
    sampler, step = SglangTree(plain_kernel, "cpu"), small_step(tree, sampled)
    sampler.MEMORY = 4 * step.target.numel() * 100  # several launches a call
    assert summed_law(sampler, step, NAIVE, 1 << 9).bound < 1e-6


def test_without_a_gpu_it_says_so() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="needs a GPU that torch can see"):
            SglangTree()


def test_a_compiler_that_is_missing_or_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(peer_cuda.shutil, "which", lambda name: None)
    with pytest.raises(BackendError, match="needs nvcc of the CUDA toolkit"):
        peer_cuda._compiled("x", "", [])
    (fake := tmp_path / "nvcc").write_text("#!/bin/sh\necho no such header >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(peer_cuda.shutil, "which", lambda name: str(fake))
    with pytest.raises(BackendError, match="exit status 3: no such header"):
        peer_cuda._compiled("x", "", [tmp_path])
