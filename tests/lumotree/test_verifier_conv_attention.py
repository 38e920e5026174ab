"""Convolution and attention over tree paths, against values worked out another way."""

import torch

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import AttentionOps, Batch, Limits
from lumotree.state import KVCache
from lumotree.tree import Tree
from lumotree.verifier import attention, conv
from lumotree.verifier.lanes import accepted_lanes

LIMITS = Limits(2, 8, 8, 4, 1)


def batch_of(parents: list[int], slots: list[int], prefix: int, page_table: torch.Tensor) -> Batch:
    tree = Tree.make(parents, slots=slots, prefix_len=prefix)
    return build_batch([tree], state_slots=[1], page_table=page_table, page_size=2)


def test_window_holds_ancestors_and_reaches_back_into_the_history() -> None:
    batch = batch_of([-1, 0, 1, 2, 0], [0, 1, 2, 3, 4], 0, torch.tensor([[0, 1, 2]]))
    x = torch.arange(10, 15, dtype=torch.bfloat16).reshape(5, 1)
    history = torch.tensor([[[-9.0, -9, -9]], [[1, 2, 3]]], dtype=torch.bfloat16)
    rows, window = conv.windows(x, history, batch, 4)
    assert rows == [0, 1, 2, 3, 4]
    assert window[..., 0].tolist() == [[1, 2, 3, 10], [2, 3, 10, 11], [3, 10, 11, 12], [10, 11, 12, 13], [2, 3, 10, 14]]


def test_taps_are_summed_oldest_first_and_products_rounded_on_demand() -> None:
    window = torch.tensor([[[2.0**25], [1.0], [1.0], [-(2.0**25)]]], dtype=torch.bfloat16)
    ones = torch.ones(1, 4, dtype=torch.bfloat16)
    assert conv.convolve(window, ones, "fp32").item() == 0.0  # newest first or in pairs would give silu(2) or silu(1)
    fine = torch.tensor([[[1 + 2.0**-7], [-1.0]]], dtype=torch.bfloat16)
    weight = torch.tensor([[1 + 2.0**-7, 1 + 2.0**-6]], dtype=torch.bfloat16)  # (1 + 2^-7)^2 - (1 + 2^-6) = 2^-14
    exact, rounded = (conv.convolve(fine, weight, form).item() for form in ("fp32", "bf16_product"))
    assert abs(exact - 2.0**-15) < 2.0**-22 and rounded == 0.0
    total = torch.tensor([[-200.0, 0.0, 200.0, torch.nan]])
    assert torch.equal(conv.silu(total)[0, :3], torch.tensor([-0.0, 0.0, 200.0])) and conv.silu(total)[0, 3].isnan()


def test_conv_publish_shifts_short_and_long_paths() -> None:
    batch = batch_of([-1, 0, 1, 2, 3], [0, 1, 2, 3, 4], 0, torch.tensor([[0, 1, 2]]))
    x = torch.arange(10, 15, dtype=torch.bfloat16).reshape(5, 1)
    for path, want in (((0,), [2, 3, 10]), ((0, 1), [3, 10, 11]), ((0, 1, 2, 3, 4), [12, 13, 14])):
        history = torch.tensor([[[7.0, 7, 7]], [[1, 2, 3]]], dtype=torch.bfloat16)
        lanes = accepted_lanes(batch, accepted_paths([path]), LIMITS, empty_path=True)
        conv.publish(x, history, lanes, batch.state_slot.tolist())
        assert history[:, 0].tolist() == [[7, 7, 7], want]


def test_attention_matches_float64_softmax_over_the_path() -> None:
    gen = torch.Generator().manual_seed(0)
    batch = batch_of([-1, 0, 0, 2], [9, 8, 7, 6], 5, torch.tensor([[2, 0, 1, 5, 6]]))
    q, k, v = (torch.randn(4, h, 6, generator=gen).bfloat16() for h in (4, 2, 2))
    angle = torch.rand(16, 2, generator=gen)
    cache = KVCache(*(torch.randn(1, 16, 2, 6, generator=gen).bfloat16() for _ in range(2)))
    out = torch.full((4, 4, 6), torch.nan, dtype=torch.bfloat16)
    attention.verify(AttentionOps(q, k, v, angle.cos(), angle.sin()), cache, batch, out, 0)
    assert torch.equal(cache.v[0, [9, 8, 7, 6]], v)
    turn = torch.complex(angle.cos(), angle.sin())[[5, 6, 6, 7]].unsqueeze(1)
    z = torch.complex(k[..., :2].float(), k[..., 2:4].float()) * turn
    rotated = torch.cat([z.real, z.imag, k[..., 4:].float()], -1).bfloat16()
    torch.testing.assert_close(cache.k[0, [9, 8, 7, 6]], rotated, rtol=0.01, atol=1e-6)
    z = torch.complex(q[..., :2].float(), q[..., 2:4].float()) * turn
    query = torch.cat([z.real, z.imag, q[..., 4:].float()], -1).bfloat16().double()
    prefix = [4, 5, 0, 1, 2]
    for row, path in enumerate(([9], [9, 8], [9, 7], [9, 7, 6])):
        keys, values = (c[0, prefix + path].double() for c in (cache.k, cache.v))
        for h in range(4):
            p = torch.softmax(keys[:, h // 2] @ query[row, h] * 6**-0.5, 0)
            torch.testing.assert_close(out[row, h].double(), p @ values[:, h // 2], rtol=0.01, atol=1e-4)


def test_first_token_without_a_prefix_sees_itself() -> None:
    batch = batch_of([-1], [1], 0, torch.tensor([[0]]))
    q = torch.randn(1, 2, 4).bfloat16()
    cache = KVCache(*(torch.full((1, 2, 1, 4), torch.nan).bfloat16() for _ in range(2)))
    out = torch.empty(1, 2, 4).bfloat16()
    ops = AttentionOps(q, q[:, :1], q[:, :1], torch.ones(1, 2), torch.zeros(1, 2))
    attention.verify(ops, cache, batch, out, 0)
    assert torch.equal(out, q[:, :1].expand(1, 2, 4))


def test_a_lone_row_has_the_window_that_it_has_beside_others() -> None:
    history = torch.arange(12, dtype=torch.bfloat16).reshape(2, 2, 3)
    x = torch.arange(20, 28, dtype=torch.bfloat16).reshape(4, 2)
    many = conv.windows(x, history, batch_of([-1, 0, 0, 1], [0, 1, 2, 3], 0, torch.tensor([[0, 1]])), 4)
    alone = conv.windows(x[:1], history, batch_of([-1], [0], 0, torch.tensor([[0, 1]])), 4)
    assert alone[0] == [0] and torch.equal(alone[1], many[1][:1])


def test_kv_publish_reads_every_source_before_it_writes() -> None:
    """Candidates sit exactly in the committed slots of each other's positions, a cycle."""
    batch = batch_of([-1, 0, 1], [4, 2, 3], 2, torch.tensor([[0, 1, 2]]))
    cache = KVCache(*(torch.arange(6.0).reshape(1, 6, 1, 1).bfloat16() for _ in range(2)))
    lanes = accepted_lanes(batch, accepted_paths([(0, 1, 2)]), LIMITS, empty_path=True)
    attention.publish(cache, batch, lanes, [0])
    for tensor in (cache.k, cache.v):
        assert tensor.flatten().tolist() == [0, 1, 4, 2, 3, 5]
