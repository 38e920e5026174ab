"""Arithmetic faults. They cannot be put around another sampler, so a `VariantRule` takes its place."""

from __future__ import annotations

from collections.abc import Callable

from faults.sampler_fault import SamplerFault
from faults.sampler_types import Change
from faults.sampler_variant import VariantRule
from lumotree.select_types import CoinSampler


def _in_place_of(variant: VariantRule) -> Callable[[CoinSampler], CoinSampler]:
    return lambda sampler: variant


def _fault(name: str, statement: str, provenance: str, variant: VariantRule, laws: bool = False) -> SamplerFault:
    change = Change(rule=_in_place_of(variant))
    return SamplerFault(name, statement, provenance, "arithmetic", change, needs="laws" if laws else "")


FAULTS = [
    _fault("accept_all", "every draft is accepted", "defect-classes K1 (accept_all)", VariantRule(accept="all")),
    _fault(
        "q_one", "the accept test divides by 1, the residual subtracts q", "issue item 6", VariantRule("one"), laws=True
    ),
    _fault(
        "residual_unclamped",
        "the residual p - q is not clamped at 0",
        "issue item 6",
        VariantRule(residual="unclamped"),
    ),
    _fault(
        "residual_unnormalised",
        "the residual is not renormalised; a coin beyond its sum draws the last token",
        "issue item 6",
        VariantRule(residual="unnormalised"),
    ),
    _fault(
        "residual_from_p",
        "later siblings and the correction token see the target again, not the residual",
        "issue item 6",
        VariantRule(residual="target"),
    ),
    _fault(
        "resample_from_p",
        "the correction token is drawn from the target instead of the residual",
        "defect-classes K16 (resample_from_p)",
        VariantRule(residual="target-draw"),
    ),
    _fault(
        "residual_softmax",
        "the correction token is drawn from softmax(max(p - q, 0))",
        "defect-classes K1 (residual_softmax)",
        VariantRule(residual="softmax"),
    ),
    _fault(
        "renormalisation_forgotten",
        "later siblings' declared law lacks the earlier tokens but is not renormalised",
        "issue item 6; contract section 7",
        VariantRule(declared="unrenormalised"),
        laws=True,
    ),
    _fault(
        "q_with_replacement",
        "later siblings, drawn without replacement, are scored with the first one's law",
        "contract section 7",
        VariantRule(declared="replaced"),
        laws=True,
    ),
    _fault(
        "sibling_order_ignored",
        "siblings are tried from last to first as if they had been drawn in that order",
        "issue item 6",
        VariantRule(backwards=True),
    ),
    _fault(
        "duplicate_twice",
        "a sibling that repeats a refused token gets a second chance",
        "issue item 6",
        VariantRule(again=True),
    ),
]
