"""What a backend declares about its arithmetic, and the shapes it is asked to run.

The variants are the ones in which correct kernels of this field legitimately differ. The native chain and the float64
oracle follow the declared variant; a deviation that is not declared is a finding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from lumotree.errors import ContractError

#: Allowed values of each rounding variant; the first one is the contract's own (section 2 and 3).
VARIANTS: dict[str, tuple[str, ...]] = {
    "layout": ("VK", "KV"),
    "beta": ("fp32", "bf16"),
    "norm": ("rsqrt", "sqrt", "bf16"),
    "conv": ("fp32", "bf16_product"),
    "softplus": ("log1p", "log_exp"),
    "head_map": ("grouped", "tiled"),
    "carry": ("fp32", "bf16"),
    "probs": ("fp32", "bf16"),
    "zeros": ("signed", "unsigned"),
    "claims": ("bitwise", "algebra"),
}

SURFACE_NAMES = ("gdn", "conv", "attention")
STATE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Contract:
    """The contract variant that a backend declares.

    layout: recurrent pool is `[.., HV, dv, dk]` ("VK") or `[.., HV, dk, dv]` ("KV").
    state_dtype: dtype of the recurrent pool.
    beta: sigmoid(b) kept in fp32, or rounded to bf16 before use.
    norm: `x * rsqrt(sum + eps)`, `x / sqrt(sum + eps)`, or the rsqrt form rounded to bf16.
    conv: tap products accumulated in fp32, or each product rounded to bf16 first.
    softplus: `log1p(exp(x))` or `log(1 + exp(x))`; both linear above 20.
    head_map: value head h reads key head `h // (HV // HK)` ("grouped") or `h % HK` ("tiled").
    carry: a parent's state reaches its child in fp32, or through a bf16 buffer.
    probs: attention weights multiply the values in fp32, or each is rounded to bf16 first, as flash kernels do.
    zeros: the sign of a zero in a state or output is part of its bits, or ("unsigned") it is not: a kernel that adds a
        loaded state to 0 turns -0 into +0 in one place and not in another, which changes no other value.
    claims: "bitwise" if tree outputs and published states equal the backend's own one-token chain bit for bit;
        "algebra" if verification re-associates the recurrence (WY, split reductions) and only error bounds apply.
    algebra: surfaces ("gdn", "conv", "attention") that claim only "algebra" although `claims` is "bitwise".
    max_rows: most physical rows a request may have; trees: whether a row may have more than one child.
    empty_path: an accepted path of length 0 is a bitwise no-op (otherwise it is refused).
    graph_safe: verify and publish neither allocate nor synchronise with the host.

    Raises ContractError when a value is not one of `VARIANTS`.
    """

    layout: str = "VK"
    state_dtype: torch.dtype = torch.float32
    beta: str = "fp32"
    norm: str = "rsqrt"
    conv: str = "fp32"
    softplus: str = "log1p"
    head_map: str = "grouped"
    carry: str = "fp32"
    probs: str = "fp32"
    zeros: str = "signed"
    claims: str = "bitwise"
    algebra: tuple[str, ...] = ()
    max_rows: int = 1024
    trees: bool = True
    empty_path: bool = True
    graph_safe: bool = False
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name, allowed in VARIANTS.items():
            value = getattr(self, name)
            if value not in allowed:
                known = ", ".join(allowed)
                raise ContractError(f"contract: expected {name} to be one of {known}, got {name}={value!r}")
        if self.state_dtype not in STATE_DTYPES:
            raise ContractError(f"contract: expected state_dtype fp32 or bf16, got state_dtype={self.state_dtype}")
        unknown = [s for s in self.algebra if s not in SURFACE_NAMES]
        if unknown:
            raise ContractError(
                f"contract: expected algebra to name surfaces among {', '.join(SURFACE_NAMES)}, got {unknown[0]!r}"
            )
        if self.claim("gdn") == "bitwise" and self.state_dtype == torch.bfloat16 and self.carry == "fp32":
            # Decoding rounds the state at every token, publication of a path carried in fp32 only at its end.
            raise ContractError(
                "contract: a bf16 state pool with carry='fp32' cannot be bitwise equal to one-token decoding; "
                "expected carry='bf16' or claims='algebra'"
            )
        if not (isinstance(self.max_rows, int) and self.max_rows >= 1):
            raise ContractError(f"contract: expected max_rows >= 1, got max_rows={self.max_rows!r}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ContractError(f"contract: expected 0 <= tp_rank < tp_size, got {self.tp_rank} of {self.tp_size}")

    def claim(self, surface: str) -> str:
        """What the tree of a surface claims against the backend's own one-token chain: "bitwise" or "algebra"."""
        return "algebra" if surface in self.algebra else self.claims

    def as_dict(self) -> dict[str, Any]:
        """Plain data for envelopes and reports."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["algebra"] = list(self.algebra)
        return {**values, "state_dtype": str(self.state_dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class Dims:
    """Shapes of one hybrid model, per layer kind (contract section 5).

    hk, hv: key and value heads of GDN; dk, dv: their dims; conv_width W and conv_channels D; attention: q_heads,
    kv_heads, head_dim, rotary_dim (even, <= head_dim). layers: how many layers the pools hold.
    """

    hk: int
    hv: int
    dk: int
    dv: int
    conv_channels: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    conv_width: int = 4
    layers: int = 1
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "name" and (not isinstance(value, int) or value < 1):
                raise ContractError(f"dims: expected a positive integer, got {f.name}={value!r}")
        if self.hv % self.hk:
            raise ContractError(f"dims: expected hv to be a multiple of hk, got hv={self.hv}, hk={self.hk}")
        if self.q_heads % self.kv_heads:
            raise ContractError(
                f"dims: expected q_heads to be a multiple of kv_heads, got {self.q_heads} and {self.kv_heads}"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ContractError(
                f"dims: expected an even rotary_dim <= head_dim={self.head_dim}, got rotary_dim={self.rotary_dim}"
            )
        if self.conv_width < 2:
            raise ContractError(f"dims: expected conv_width >= 2, got conv_width={self.conv_width}")

    def key_head(self, head_map: str) -> list[int]:
        """Key head that each value head reads, `[HV]`, under a declared head map."""
        group = self.hv // self.hk
        return [h // group if head_map == "grouped" else h % self.hk for h in range(self.hv)]

    def recurrent_shape(self, layout: str) -> tuple[int, int, int]:
        """Shape of one slot of the recurrent pool."""
        return (self.hv, self.dv, self.dk) if layout == "VK" else (self.hv, self.dk, self.dv)


#: One layer of each kind of a 27B hybrid model (contract section 5).
DIMS_27B = Dims(16, 48, 128, 128, 10240, 24, 4, 256, 64, name="27B")
#: Seconds on a CPU; K != V, HV = 3 HK, sizes that are not powers of two.
DIMS_TINY = Dims(2, 6, 12, 20, 36, 4, 2, 24, 8, name="tiny")
