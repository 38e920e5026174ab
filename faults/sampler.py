"""Known defects of samplers, each a wrapper that makes a right sampler wrong in exactly one way.

`SAMPLER_FAULTS` names them, `NOT_EXPRESSED` what is missing. `SamplerFault.wrap` takes a sampler with coins
(`CoinSampler`: all faults) or a closed one (`ClosedSampler`: the faults whose `closed` is true, which touch only what
goes in or out). Their laws are in `audit.fault_laws`.
"""

from __future__ import annotations

from faults import sampler_coins, sampler_harmless, sampler_laws, sampler_outcome, sampler_rules, sampler_target
from faults.sampler_fault import SamplerFault

#: Every sampler fault, by id; those with `expect == "harmless"` must pass.
SAMPLER_FAULTS: dict[str, SamplerFault] = {
    fault.id: fault
    for module in (sampler_coins, sampler_target, sampler_laws, sampler_outcome, sampler_rules, sampler_harmless)
    for fault in module.FAULTS
}

#: Classes that are no entry of `SAMPLER_FAULTS`, each with the reason.
NOT_EXPRESSED: tuple[tuple[str, str], ...] = (
    ("K4, the draft's logits", "expressed as bf16_draw on the law itself: a step carries no logits of the drafter"),
    ("K6", "a block rule's own condition: bottom-up rules have no law row by row; judged on the exact domain"),
    ("K7", "beam candidates are deterministic drafts with a declared law, as argmax_draft_softmax_q"),
    ("K13", "cause unknown; its trigger (all-zero rows, drafts of -1) is refused as bad input"),
    ("K14", "a draft of -1 is refused as bad input, so no right sampler can be made to accept one by wrapping"),
    ("K15", "NaN rows are refused as bad input"),
    ("L6, a floor on u that hides 0", "floor_24_bits cuts coins to 24 bits; a least u above 0 differs by 2^-24 only"),
    ("L7", "a coin of exactly 1 is refused; 0 and 1 - 2^-53 are fed by the summed law, accept_zero feeds 0 always"),
    ("accept iff u <= p/q", "differs only where u = p/q, of probability 2^-53 a coin: the summed law feeds such coins"),
    ("M5, M13", "temperature 0 and 1e-6 divide by nothing here: rows are the audit's, tests of lumotree.sampling"),
    ("M9, refusal of unsupported options", "expressed as penalties_ignored; whether a request is refused is no law"),
    ("X3", "near-ties of another reduction order: numerics, judged with the component audit's envelopes"),
    ("X4, X5", "no samplers"),
)
