"""Where a way to decode departs from plain decoding: first token, first surface."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from audit.decode_types import Digests, Mark, ModeRun, Truth

SURFACES = ("R", "C", "K", "D")
NAMES = {"R": "recurrent", "C": "conv", "K": "attention", "D": "drafter", "tokens": "tokens"}


@dataclass(frozen=True)
class Departure:
    """One place where bits differ. what: "tokens" or a surface; cycle as in `Mark`; layer and part of a surface; got,
    allowed: the tokens, or what the bits are and whose they should be."""

    run: str
    what: str
    request: int
    cycle: int
    got: str
    allowed: str
    part: str = ""
    layer: int | None = None


@dataclass
class Verdict:
    """Counts over runs: compared and equal cells of tokens and of each surface, and where each first differs."""

    cells: dict[str, int]
    equal: dict[str, int]
    departures: list[Departure]

    @classmethod
    def empty(cls) -> Verdict:
        """Nothing compared yet."""
        keys = ("tokens", *SURFACES)
        return cls(dict.fromkeys(keys, 0), dict.fromkeys(keys, 0), [])

    def first(self) -> Departure | None:
        """The earliest departure: by cycle, tokens after surfaces of the cycle that they came from."""
        order = (*SURFACES, "tokens")
        return min(self.departures, key=lambda d: (d.cycle, order.index(d.what), d.request), default=None)


def judge_tokens(verdict: Verdict, run: ModeRun, truth: Truth) -> None:
    """Every emitted token against plain decoding's own; the first that differs of each request is kept.

    Of a run that was stopped, what it had emitted is judged.
    """
    for number, output in run.outputs.items():
        if run.stopped and number not in truth.outputs:
            continue  # it ended before its first token; that it ended is the finding
        wanted = truth.outputs[number][: len(output) if run.stopped else None]
        longest = max(len(output), len(wanted))
        same = [i < len(output) and i < len(wanted) and output[i] == wanted[i] for i in range(longest)]
        verdict.cells["tokens"] += longest
        verdict.equal["tokens"] += sum(same)
        if not all(same):
            at = same.index(False)
            ends = run.ends[number]
            cycle = ends[at] if at < len(ends) else ends[-1] if ends else 0
            verdict.departures.append(
                Departure(run.name, "tokens", number, cycle, _token(output, at), _token(wanted, at))
            )


def _token(tokens: tuple[int, ...], at: int) -> str:
    return f"token {at} = {tokens[at]}" if at < len(tokens) else f"no token {at}"


def judge_surfaces(verdict: Verdict, run: ModeRun, truth: Truth) -> None:
    """Every tensor of every mark against plain decoding's at the same length; the first of each request, surface kept.

    A mark whose length plain decoding never had counts as different in full.
    """
    seen: set[tuple[int, str]] = set()
    for mark in run.marks:
        if run.stopped and mark.number not in truth.digests:
            continue  # it ended before its first token; that it ended is the finding
        wanted = truth.digests[mark.number].get(mark.committed, {})
        for key in sorted(mark.digests.keys() | wanted.keys(), key=str):
            surface, part, layer = key
            verdict.cells[surface] += 1
            if mark.digests.get(key) == wanted.get(key):
                verdict.equal[surface] += 1
            elif (mark.number, surface) not in seen:
                seen.add((mark.number, surface))
                verdict.departures.append(
                    Departure(run.name, surface, mark.number, mark.cycle, "other bits", "plain decoding's", part, layer)
                )


def same_runs(one: ModeRun, other: ModeRun) -> Verdict:
    """Where `other` differs from `one`, in the tokens of its requests or in any surface at a length that both had."""
    truth = Truth(one.outputs, _by_length(one.marks))
    verdict = Verdict.empty()
    judge_tokens(verdict, other, truth)
    shared = [m for m in other.marks if m.committed in truth.digests.get(m.number, {})]
    judge_surfaces(verdict, replace(other, marks=tuple(shared)), truth)
    return verdict


def _by_length(marks: Iterable[Mark]) -> dict[int, dict[int, Digests]]:
    found: dict[int, dict[int, Digests]] = {}
    for mark in marks:
        found.setdefault(mark.number, {})[mark.committed] = mark.digests
    return found
