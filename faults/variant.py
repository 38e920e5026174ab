"""Arithmetic faults as data: each field of a variant is one place at which a kernel's formula can be wrong.

The defaults are the contract's formulas. `faults.variant_gdn`, `variant_conv` and `variant_attention` compute them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GdnVariant:
    """Gated DeltaNet (contract section 2).

    eps, eps_at: the epsilon of the norm, added to the sum of squares ("sum"), to its root ("root"), a floor of the root
    ("floor"). unit_q, unit_k: whether they are normalised. scale: exponent of dk in the scale of the query. other_map:
    the head map that is not declared. softplus: "declared", "relu", "unbounded" (no linear part), "none"; linear_above:
    where it turns linear. decay: "exp", "none" (1), "twice", "exp2", "linear" (1 + g), "flushed" (below 0.05: 0),
    "clamped" (g at least -5), "zero_corner" (0 where g is 0), "factored" (through exp(-g), which overflows), "bf16".
    beta: "sigmoid", "none" (1), "twice", "doubled" (2 sigmoid), "bf16", "raw" (b itself). error: "decayed" (v - R'k),
    "before" (v - R k), "none" (v). decay_at: "first", or "last" (the update decays too). beta_on: "error", or "value"
    (beta v - R'k). read: "after" the update, "before" it and its decay, "decayed" (without the update). u_bf16,
    keys_bf16: rounded to bf16. state_bits: bits of the state's mantissa that are kept, 23 = all; half: the state goes
    through fp16. tail: rows of dv that no tile covers. norm_tile: the norm sums over whole tiles of so many dims, 0 =
    over all. gate_bf16: a + dt_bias is rounded to bf16. truncated: the output is cut to bf16 instead of rounded.
    """

    eps: float = 1e-6
    eps_at: str = "sum"
    unit_q: bool = True
    unit_k: bool = True
    scale: float = -0.5
    other_map: bool = False
    softplus: str = "declared"
    linear_above: float = 20.0
    decay: str = "exp"
    beta: str = "sigmoid"
    error: str = "decayed"
    decay_at: str = "first"
    beta_on: str = "error"
    read: str = "after"
    u_bf16: bool = False
    keys_bf16: bool = False
    state_bits: int = 23
    half: bool = False
    tail: int = 0
    norm_tile: int = 0
    gate_bf16: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class ConvVariant:
    """Causal convolution (contract section 3).

    act: "silu", "none", "twice", "sigmoid", "gelu", or "inputs" (SiLU before the taps). sums: "fp32", or "bf16" (each
    partial sum rounded). bias: added before the activation. last: whether the row's own input counts.
    """

    act: str = "silu"
    sums: str = "fp32"
    bias: float = 0.0
    last: bool = True


@dataclass(frozen=True)
class AttentionVariant:
    """Attention (contract section 4).

    scale: "head_dim", "none", "rotary" (head_dim / 2), "twice". shift: whether the largest score is subtracted before
    exp. base2: 2^x for e^x. other_map: query heads are spread over KV heads the other way. own: whether a row sees
    itself. window: last keys that are visible, 0 = all. sink: 1 is added to the denominator. cap: scores are bent to
    +-cap by tanh, 0 = not. probs_bf16: weights rounded. rotation: "half", "pairs" (interleaved), "none", "head"
    (a channel rotates with the one half a head away). from_zero: the running maximum starts at 0. parts: keys are
    split into parts of so many, each normalised by itself, and the parts averaged; 0 = not. truncated: as for GDN.
    """

    scale: str = "head_dim"
    shift: bool = True
    base2: bool = False
    other_map: bool = False
    own: bool = True
    window: int = 0
    sink: bool = False
    cap: float = 0.0
    probs_bf16: bool = False
    rotation: str = "half"
    from_zero: bool = False
    parts: int = 0
    truncated: bool = False


Variant = GdnVariant | ConvVariant | AttentionVariant
