"""Faults of a kernel's own formulas, as variants of the reference and of the built-in kernels in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from faults.catalogue import Fault, Knob, Wrap
from faults.variant import AttentionVariant, ConvVariant, GdnVariant, Variant
from faults.variant_backend import fits, variant

ALL = ("verify", "publish", "native")

#: kind -> (statement, classes, needs, variant).
_GDN: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], GdnVariant]] = {
    "error_before_decay": ("the error is taken against the state before its decay", ("X4", "N8"), ("prefix",),
                           GdnVariant(error="before")),
    "decay_after_update": ("the update decays with the state", ("X4", "N7"), (), GdnVariant(decay_at="last")),
    "decay_missing": ("the state does not decay", ("N1", "G5"), ("prefix",), GdnVariant(decay="none")),
    "gate_twice": ("the gate is applied twice", ("N9", "N10"), ("prefix",), GdnVariant(decay="twice")),
    "decay_base_two": ("the decay is 2^g", ("N10",), ("prefix",), GdnVariant(decay="exp2")),
    "decay_linear": ("the decay is 1 + g", ("N4",), ("prefix",), GdnVariant(decay="linear")),
    "decay_flushed": ("decays below 0.05 are flushed to 0", ("N3",), ("mid_gates",), GdnVariant(decay="flushed")),
    "gate_clamped": ("g is clamped at -5", ("N2", "N17"), ("near_zero",), GdnVariant(decay="clamped")),
    "safe_exp_zero_corner": ("a gate of exactly 1 is taken for a mask", ("N1",), ("large_gates",),
                             GdnVariant(decay="zero_corner")),
    "factored_decay": ("the decay is a quotient of factors that overflow", ("N2", "N4", "N17"), ("large_gates",),
                       GdnVariant(decay="factored")),
    "decay_bf16": ("the decay is rounded to bf16", ("N16", "DF19"), ("prefix",), GdnVariant(decay="bf16")),
    "no_error_term": ("the value is written without the error term", ("N8",), ("prefix",), GdnVariant(error="none")),
    "beta_missing": ("beta is 1", ("N8",), (), GdnVariant(beta="none")),
    "beta_twice": ("beta is applied twice", ("N9",), (), GdnVariant(beta="twice")),
    "beta_doubled": ("beta is 2 sigmoid(b)", ("N8",), (), GdnVariant(beta="doubled")),
    "beta_raw": ("b is used without its sigmoid", ("N8",), (), GdnVariant(beta="raw")),
    "beta_bf16": ("beta is rounded to bf16 although fp32 is declared", ("N16", "DF19"), (), GdnVariant(beta="bf16")),
    "beta_on_value": ("beta scales the value but not the error", ("N8",), ("prefix",), GdnVariant(beta_on="value")),
    "softplus_missing": ("the gate has no softplus", ("N5",), ("prefix",), GdnVariant(softplus="none")),
    "softplus_relu": ("softplus is a relu", ("N5",), ("prefix",), GdnVariant(softplus="relu")),
    "softplus_unbounded": ("softplus has no linear part and overflows", ("N5", "N2"), ("large_gates",),
                           GdnVariant(softplus="unbounded")),
    "key_not_normalised": ("keys are not normalised", ("N18",), (), GdnVariant(unit_k=False)),
    "query_not_normalised": ("queries are not normalised", ("N18",), (), GdnVariant(unit_q=False)),
    "eps_at_root": ("the epsilon is added to the root", ("N12",), ("tiny_keys",), GdnVariant(eps_at="root")),
    "eps_as_floor": ("the epsilon is a floor of the root", ("N12",), ("tiny_keys",), GdnVariant(eps_at="floor")),
    "eps_missing": ("the norm has no epsilon", ("N12",), ("zero_keys",), GdnVariant(eps=0.0)),
    "eps_1e-12": ("the epsilon is 1e-12", ("N12",), ("tiny_keys",), GdnVariant(eps=1e-12)),
    "scale_missing": ("queries are not scaled by dk^-1/2", ("DF32",), (), GdnVariant(scale=0.0)),
    "scale_twice": ("queries are scaled by 1 / dk", ("DF32",), (), GdnVariant(scale=-1.0)),
    "head_map_other": ("value heads read key heads by the map that is not declared", ("X5", "O3"), ("hk>=2, hv>hk",),
                       GdnVariant(other_map=True)),
    "read_before_update": ("the output reads the state before the row", ("G1", "DF18"), (), GdnVariant(read="before")),
    "read_without_update": ("the output reads the decayed state without the row's update", ("DF18",), (),
                            GdnVariant(read="decayed")),
    "update_bf16": ("the update is rounded to bf16", ("DF15", "DF19", "N14"), (), GdnVariant(u_bf16=True)),
    "keys_bf16": ("normalised keys are rounded to bf16 although fp32 is declared", ("N16", "DF19"), (),
                  GdnVariant(keys_bf16=True)),
    "state_bf16": ("the state is kept in bf16 from token to token", ("N14", "R2"), (), GdnVariant(state_bits=7)),
    "state_fp16": ("the state is kept in fp16 from token to token", ("N14",), (), GdnVariant(half=True)),
    "state_tf32": ("the state is kept in 10 bits from token to token", ("N14", "R2"), (), GdnVariant(state_bits=10)),
    "tail_rows_dropped": ("the last value dim is not updated", ("B12", "O6"), (), GdnVariant(tail=1)),
}  # fmt: skip
_CONV: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], ConvVariant]] = {
    "silu_missing": ("there is no activation", ("B13",), (), ConvVariant(act="none")),
    "silu_twice": ("the activation is applied twice", ("B3",), (), ConvVariant(act="twice")),
    "silu_on_inputs": ("inputs are activated instead of the sum", ("B3",), (), ConvVariant(act="inputs")),
    "sigmoid_for_silu": ("the activation is a sigmoid", ("B13",), (), ConvVariant(act="sigmoid")),
    "gelu_for_silu": ("the activation is a GELU", ("B13",), (), ConvVariant(act="gelu")),
    "sums_bf16": ("partial sums of taps are rounded to bf16", ("DF19", "N14"), (), ConvVariant(sums="bf16")),
    "own_input_missing": ("the row's own input does not count", ("B13", "DF9"), (), ConvVariant(last=False)),
}  # fmt: skip
_ATTENTION: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], AttentionVariant]] = {
    "scores_unscaled": ("scores are not scaled", ("DF14",), ("depth>=1",), AttentionVariant(scale="none")),
    "scores_scaled_twice": ("scores are scaled twice", ("DF14",), ("depth>=1",), AttentionVariant(scale="twice")),
    "softmax_unshifted": ("the largest score is not subtracted before exp", ("N4", "N2"), ("cold",),
                          AttentionVariant(shift=False, scale="none")),
    "softmax_base_two": ("weights are powers of two", ("DF14",), ("depth>=1",), AttentionVariant(base2=True)),
    "kv_map_other": ("query heads read KV heads by another map", ("O3", "X5"), ("kv heads>=2", "prefix"),
                     AttentionVariant(other_map=True)),
    "self_invisible": ("a row does not see itself", ("H8", "J1"), ("depth>=1",), AttentionVariant(own=False)),
    "softmax_sink": ("1 is added to the denominator", ("DF14",), (), AttentionVariant(sink=True)),
    "scores_capped": ("scores are bent to +-2", ("DF14",), ("depth>=1",), AttentionVariant(cap=2.0)),
    "rotation_in_pairs": ("neighbouring channels rotate instead of halves", ("DF13",), ("depth>=1",),
                          AttentionVariant(rotation="pairs")),
    "rotation_missing": ("queries and keys are not rotated", ("DF13",), ("depth>=1",),
                         AttentionVariant(rotation="none")),
}  # fmt: skip


def _fault(kind: str, surface: str, entry: tuple[str, tuple[str, ...], tuple[str, ...], Variant],
           arms: Sequence[str] = ALL, stage: str = "verify") -> Fault:  # fmt: skip
    statement, classes, needs, change = entry
    return Fault(f"{kind}.{surface}", statement, surface, stage, classes, needs, variant(surface, change, arms),
                 arithmetic=True, fits=fits)  # fmt: skip


def _sized(kind: str, surface: str, what: str, classes: tuple[str, ...], unit: str, sizes: tuple[float, ...],
           change: Callable[[float], Variant], needs: tuple[str, ...] = ("prefix",)) -> Fault:  # fmt: skip
    def at(size: float) -> Wrap:
        return variant(surface, change(size))

    return Fault(f"{kind}.{surface}", what, surface, "verify", classes, needs, at(sizes[0]),
                 knob=Knob(sizes, unit, at), arithmetic=True, fits=fits)  # fmt: skip


_ONE_ARM = ("state_bf16", "error_before_decay", "beta_bf16", "head_map_other")

FAULTS = [
    *(_fault(kind, "gdn", entry) for kind, entry in _GDN.items()),
    *(_fault(kind, "conv", entry) for kind, entry in _CONV.items()),
    *(_fault(kind, "attention", entry) for kind, entry in _ATTENTION.items()),
    *(
        _fault(f"{kind}_in_verify", "gdn", (f"{_GDN[kind][0]}, in verification alone", *_GDN[kind][1:]), ("verify",))
        for kind in _ONE_ARM
    ),
    *(
        _fault(f"{kind}_in_replay", "gdn", (f"{_GDN[kind][0]}, in replay alone", *_GDN[kind][1:]), ("publish",),
               "publish")
        for kind in _ONE_ARM
    ),
    _sized("state_mantissa", "gdn", "the state keeps fewer bits from token to token", ("N14", "R2"), "bits kept",
           (8, 12, 14, 16, 18, 20, 21, 22), lambda bits: GdnVariant(state_bits=int(bits))),
    _sized("softplus_early", "gdn", "softplus is linear from too low on", ("N5",), "linear above",
           (1, 2, 4, 6, 8, 10, 12), lambda x: GdnVariant(linear_above=x), ("mid_gates",)),
    _sized("eps_larger", "gdn", "the epsilon of the norm is larger", ("N12",), "epsilon",
           (1e-3, 1e-4, 1e-5, 4e-6, 2e-6), lambda x: GdnVariant(eps=x), ("tiny_keys",)),
    _sized("conv_bias", "conv", "a bias is added that is not there", ("B13",), "added before the activation",
           (0.1, 1e-2, 1e-3, 1e-4, 1e-5), lambda x: ConvVariant(bias=x)),
    _sized("key_window", "attention", "only the last keys are visible", ("C4", "I4"), "keys",
           (1, 2, 4, 8, 16, 32), lambda n: AttentionVariant(window=int(n))),
]  # fmt: skip
