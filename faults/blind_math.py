"""Blind faults of a kernel's own formulas."""

from __future__ import annotations

from faults.catalogue import Fault, Knob, Wrap
from faults.variant import AttentionVariant, GdnVariant, Variant
from faults.variant_backend import fits, variant


def _fault(kind: str, surface: str, statement: str, classes: tuple[str, ...], needs: tuple[str, ...],
           change: Variant) -> Fault:  # fmt: skip
    return Fault(f"{kind}.{surface}", statement, surface, "verify", classes, needs, variant(surface, change),
                 arithmetic=True, blind=True, fits=fits)  # fmt: skip


def _parts(size: float) -> Wrap:
    return variant("attention", AttentionVariant(parts=int(size)))


FAULTS = [
    _fault("gate_sum_bf16", "gdn", "a + dt_bias is rounded to bf16 before its softplus", ("N16", "DF19"), ("prefix",),
           GdnVariant(gate_bf16=True)),
    _fault("norm_of_tiles", "gdn", "norms leave out the dims behind the last whole tile of 8", ("B12", "N12"),
           ("ragged keys",), GdnVariant(norm_tile=8)),
    _fault("output_truncated", "gdn", "outputs are cut to bf16 instead of rounded", ("DF19", "DF29"), (),
           GdnVariant(truncated=True)),
    _fault("output_truncated", "attention", "outputs are cut to bf16 instead of rounded", ("DF19", "DF29"),
           ("depth>=1",), AttentionVariant(truncated=True)),
    _fault("maximum_from_zero", "attention", "the running maximum of the scores starts at 0", ("N2", "N4"), ("cold",),
           AttentionVariant(scale="head_dim", from_zero=True)),
    _fault("weights_bf16", "attention", "attention weights are rounded to bf16 although fp32 is declared",
           ("DF19", "N14"), ("depth>=1",), AttentionVariant(probs_bf16=True)),
    _fault("rotation_across_head", "attention", "a channel rotates with the one half a head away", ("DF13", "DF14"),
           ("partial rotation", "depth>=1"), AttentionVariant(rotation="head")),
    Fault("parts_averaged.attention", "keys are split into parts that are averaged without their weights",
          "attention", "verify", ("DF14", "G7"), ("keys>=3",), _parts(2),
          knob=Knob((2, 4, 8, 16, 32), "keys of a part", _parts), arithmetic=True, blind=True, fits=fits),
]  # fmt: skip
