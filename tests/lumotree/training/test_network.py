"""The parallel form against the same arithmetic one row at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.model_config import FULL, LINEAR
from lumotree.training.chunked import chunked_gdn, unit_lower_inverse
from lumotree.training.network import draft_steps, initial_weights, norm, rotated, trunk
from lumotree.training.settings import SHIPPED

MICRO = replace(
    SHIPPED, vocab=24, hidden=16, intermediate=24, layer_kinds=(LINEAR, FULL), hk=1, hv=2, dk=8, dv=12,
    q_heads=2, kv_heads=1, head_dim=8, rotary_dim=4,
)  # fmt: skip


def double_weights(seed: int = 0) -> dict[str, Tensor]:
    """Float64 weights with norms that are not neutral."""
    generator = torch.Generator().manual_seed(seed)
    weights = {n: w.double() for n, w in initial_weights(MICRO, seed).items()}
    return {
        n: w + 0.3 * torch.randn(w.shape, generator=generator, dtype=w.dtype) if "norm" in n else w
        for n, w in weights.items()
    }


def gdn_operands(length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, d, generator=generator, dtype=torch.float64) for d in (12, 12, 20))
    g, beta = (torch.rand(2, 3, length, generator=generator, dtype=torch.float64) for _ in range(2))
    # Keys that point much the same way are where a careless inverse loses its digits.
    return F.normalize(q, dim=-1), F.normalize(k + 1, dim=-1), v, -0.1 * g, beta


def one_at_a_time(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Contract section 2, row by row."""
    state = v.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1])
    outs = []
    for t in range(v.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        u = beta[:, :, t, None] * (v[:, :, t] - (state @ k[:, :, t, :, None])[..., 0])
        state = state + u[..., None] * k[:, :, t, None]
        outs.append((state @ q[:, :, t, :, None])[..., 0])
    return torch.stack(outs, 2)


@pytest.mark.parametrize("length", [1, 7, 64, 150])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_equal_the_recurrence(length: int, chunk: int) -> None:
    operands = gdn_operands(length)
    torch.testing.assert_close(chunked_gdn(*operands, chunk=chunk), one_at_a_time(*operands), rtol=0, atol=1e-13)


def test_chunks_notice_a_decay_applied_late() -> None:
    q, k, v, g, beta = gdn_operands(40)
    off = chunked_gdn(q, k, v, g.roll(1, -1), beta) - one_at_a_time(q, k, v, g, beta)
    assert off.abs().max() > 1e-3


def test_inverse_where_powers_would_cancel() -> None:
    """All ones: the 32nd power of the strict part has entries of 1e17, the inverse has entries of 1."""
    lower = torch.ones(64, 64).tril(-1)
    inverse = unit_lower_inverse(lower[None])[0]
    assert torch.equal(inverse @ (lower + torch.eye(64)), torch.eye(64))


def test_trunk_is_causal_and_reads_what_is_before() -> None:
    weights = double_weights()
    tokens = torch.randint(0, 24, (1, 70), generator=torch.Generator().manual_seed(1))
    whole = trunk(MICRO, weights, tokens).logits
    part = trunk(MICRO, weights, tokens[:, :33]).logits
    torch.testing.assert_close(whole[:, :33], part, rtol=0, atol=1e-12)
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % 24
    assert (trunk(MICRO, weights, changed).logits[0, -1] - whole[0, -1]).abs().max() > 1e-9


def drafted_row(weights: dict[str, Tensor], tokens: Tensor, hidden: Tensor, row: int, step: int) -> Tensor:
    """Logits of row `row` at draft step `step` as a drafter gets them: rows 0..row-step from the target's hidden rows,
    then `step` rows from the head's own, one after the other, every key in one growing cache."""
    prefix = "mtp.layers.0."
    ends = row - step
    keys: list[Tensor] = []
    values: list[Tensor] = []
    out = hidden.new_zeros(MICRO.hidden)
    for position in range(row + 1):
        carried = hidden[position] if position <= ends else out
        embedded = weights["model.embed_tokens.weight"][tokens[position + 1]]
        x = weights["mtp.fc.weight"] @ torch.cat([
            norm(embedded, weights["mtp.pre_fc_norm_embedding.weight"], MICRO.rms_eps),
            norm(carried, weights["mtp.pre_fc_norm_hidden.weight"], MICRO.rms_eps),
        ])  # fmt: skip
        normed = norm(x, weights[f"{prefix}input_layernorm.weight"], MICRO.rms_eps)
        both = (weights[f"{prefix}self_attn.q_proj.weight"] @ normed).view(2, 2, 8)
        q, gate = both[:, 0], both[:, 1].flatten()
        k = (weights[f"{prefix}self_attn.k_proj.weight"] @ normed).view(1, 8)
        keys.append(turned(norm(k, weights[f"{prefix}self_attn.k_norm.weight"], MICRO.rms_eps), position))
        values.append((weights[f"{prefix}self_attn.v_proj.weight"] @ normed).view(1, 8))
        q = turned(norm(q, weights[f"{prefix}self_attn.q_norm.weight"], MICRO.rms_eps), position)
        probs = torch.softmax(torch.cat(keys) @ q.T / 8**0.5, 0)
        mixed = (probs.T @ torch.cat(values)).flatten() * torch.sigmoid(gate)
        x = x + weights[f"{prefix}self_attn.o_proj.weight"] @ mixed
        normed = norm(x, weights[f"{prefix}post_attention_layernorm.weight"], MICRO.rms_eps)
        gated = F.silu(weights[f"{prefix}mlp.gate_proj.weight"] @ normed)
        x = x + weights[f"{prefix}mlp.down_proj.weight"] @ (gated * (weights[f"{prefix}mlp.up_proj.weight"] @ normed))
        out = norm(x, weights["mtp.norm.weight"], MICRO.rms_eps)
    return weights["model.embed_tokens.weight"] @ out


def turned(x: Tensor, position: int) -> Tensor:
    """RoPE of heads `[heads, dim]` at one position."""
    return rotated(x[None, :, None].expand(1, -1, position + 1, -1), MICRO)[0, :, position]


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_draft_steps_equal_a_drafter_that_goes_row_by_row(step: int) -> None:
    weights = double_weights(2)
    tokens = torch.randint(0, 24, (1, 12), generator=torch.Generator().manual_seed(2))
    hidden = trunk(MICRO, weights, tokens).hidden
    drafted = draft_steps(MICRO, weights, tokens, hidden, step + 1)[step]
    for row in (step, 7, 10):
        expected = drafted_row(weights, tokens[0], hidden[0], row, step)
        torch.testing.assert_close(drafted[0, row], expected, rtol=0, atol=1e-6)
