"""Positive controls of a decode run: decoders that are wrong on purpose, judged by the comparison that judges the run.

They decode `hydra27` trees of an oracle (`audit.decode_oracle`), so that they are reached with any model; the right
decoder does so too, and must not be flagged. A fault counts as seen when the first cycle that departs from plain
decoding departs on the surface that the fault is about (tokens may depart with it): a comparison that only notices the
consequences much later would not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from audit.decode_judge import SURFACES, Departure, Verdict, judge_surfaces, judge_tokens, same_runs
from audit.decode_oracle import OracleDrafter
from audit.decode_run import run_mode, truth_of
from audit.decode_setup import capacity_for
from audit.decode_types import Mark, Truth
from audit.report import Control
from faults.decoding import DECODING, DecodingFault
from lumotree.cycle import Decoder
from lumotree.cycle_types import Record, Stack, Verified
from lumotree.decide import Decision
from lumotree.requests import Request
from lumotree.sampling import SamplingParams
from lumotree.tree_named import hydra27

#: Requests and tokens of a control.
REQUESTS, TOKENS = 2, 24


@dataclass(frozen=True)
class Seen:
    """What became of one fault: where the run first departed, None if nowhere."""

    fault: str
    where: Departure | None

    @property
    def control(self) -> Control:
        """As the report has it; a fault of bits is over every bound."""
        if self.where is None:
            return Control(self.fault, "detected", False, cases=1)
        return Control(self.fault, "detected", True, by=self.where.what, ratio=float("inf"), cases=1)


@dataclass(frozen=True)
class Controls:
    """The faults, and the right decoder under the same drafts: its comparison, how many different rows were accepted
    ends, and why it ended early, or ""."""

    seen: tuple[Seen, ...]
    oracle: Verdict
    ends: int
    stopped: str = ""


def run_controls(stack: Stack, greedy: Sequence[Request], ids: Sequence[str]) -> Controls:
    """Every fault, and none, on the first requests; one that is missing is the first with its prompt turned round,
    since some faults take two requests to show."""
    plain = [replace(r, max_tokens=min(r.max_tokens, TOKENS), drafter=None) for r in greedy[:REQUESTS]]
    first = plain[0]
    plain += [replace(first, number=first.number + i, prompt=first.prompt[::-1]) for i in range(len(plain), REQUESTS)]
    truth = truth_of(stack, plain)
    known = {r.number: (*r.prompt, *truth.outputs[r.number]) for r in plain}
    oracle = OracleDrafter(hydra27(), stack.model.vocab, known)
    requests = [replace(r, drafter=oracle) for r in plain]
    verdict, ends, stopped = _right(stack, requests, truth)
    return Controls(tuple(_run(stack, requests, truth, DECODING[name]) for name in ids), verdict, ends, stopped)


def _right(stack: Stack, requests: Sequence[Request], truth: Truth) -> tuple[Verdict, int, str]:
    verdict, ends = Verdict.empty(), set[int]()

    class Noting(Decoder):
        def publish(self, verified: Verified, decisions: Sequence[Decision]) -> list[Record]:
            ends.update(d.path[-1] for t, d in zip(verified.turns, decisions, strict=True) if not t.feed)
            return super().publish(verified, decisions)

    run = run_mode(stack, requests, capacity_for(requests, REQUESTS), ("oracle", "greedy", 0), every=True, make=Noting)
    judge_tokens(verdict, run, truth)
    judge_surfaces(verdict, run, truth)
    return verdict, len(ends), run.stopped


def _run(stack: Stack, requests: Sequence[Request], truth: Truth, fault: DecodingFault) -> Seen:
    if fault.surface == "batch":
        return Seen(fault.id, _batch_fault(stack, requests, fault))

    def departs(mark: Mark, output: tuple[int, ...]) -> bool:
        wanted = truth.digests[mark.number].get(mark.committed)
        return mark.digests != wanted or output != truth.outputs[mark.number][: len(output)]

    capacity = capacity_for(requests, 1 if fault.reuse else len(requests))
    run = run_mode(stack, requests, capacity, ("control", "greedy", 0), every=True, make=fault.make, until=departs)
    verdict = Verdict.empty()
    judge_tokens(verdict, run, truth)
    judge_surfaces(verdict, run, truth)
    return Seen(fault.id, first_on(verdict.departures, fault.surface))


def first_on(departures: Sequence[Departure], surface: str) -> Departure | None:
    """The departure on `surface` if it belongs to the earliest departing cycle of its request, else None.

    A fault of tokens must leave every surface right in that cycle: the pending token is not materialised yet.
    """
    for request in sorted({d.request for d in departures}):
        own = [d for d in departures if d.request == request]
        earliest = [d for d in own if d.cycle == min(e.cycle for e in own)]
        found = [d for d in earliest if d.what == surface]
        if found and (surface in SURFACES or len(earliest) == len(found)):
            return found[0]
    return None


def _batch_fault(stack: Stack, requests: Sequence[Request], fault: DecodingFault) -> Departure | None:
    """Tokens that depend on the batch: the same requests in two orders, by the wrong decoder."""
    sampled = [replace(r, sampling=SamplingParams(temperature=1.0), drafter=None) for r in requests]
    capacity = capacity_for(sampled, len(sampled))
    one, other = (
        run_mode(stack, order, capacity, ("control", "sampled", 0), every=False, make=fault.make)
        for order in (sampled, sampled[::-1])
    )
    return next((d for d in same_runs(one, other).departures if d.what == "tokens"), None)
