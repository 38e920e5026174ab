"""Monte Carlo audit of a closed sampler on one step: all tests at one level, extended by doubling, never re-rolled.

Level. `STEP_LEVEL` bounds the false-alarm probability of one step. If the fault laws of alternatives are given, half of
it goes to their e-processes, in equal shares; the rest goes to the tests. Their part is spent over the looks, 1/2,
1/4, .., the last look taking what is left, and within a look every test has an equal (Bonferroni) share.

Looks. The first comes after `walks` walks. The run goes on with as many walks again, to the next look, while

* a test is suspicious: its p-value times the number of tests is below `SUSPICIOUS`, but it does not reject, or
* an alternative is neither accused nor excluded.

It ends as soon as something rejects, an e-process accuses, or an outcome is impossible. More walks are added to those
seen: none is dropped or drawn anew. A step that ends with an alternative still open had too little power for it:
`StepResult.open` says so, and the run is to be called inconclusive.

Streams. Walks come in chunks, each drawn with a seed of its own, as separate requests would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from audit.evidence import Alternative, EProcess
from audit.power import empirical_tv, likelihood_ratio_tv, tv_certificate
from audit.rule_law import RuleLaw
from audit.sampler_tests import MIN_VISITS, TestResult, adjusted, band_cells, battery
from audit.walk_tally import Violation, WalkTally
from lumotree.errors import InputError
from lumotree.select_types import ClosedSampler, Step

RUN_LEVEL = 1e-6
"""False-alarm probability of a run over all its steps (the alpha of field/methods.md; published: 1e-3 a step)."""
STEPS = 6
STEP_LEVEL = RUN_LEVEL / STEPS
"""False-alarm probability of one step of the default run."""
WALKS = 200_000
"""Walks before the first look (contract section 6)."""
LOOKS = 4
SUSPICIOUS = 0.1
CHUNK = 50_000


@dataclass(frozen=True)
class Certificate:
    """Upper bound for the TV between emitted law and target row, given a visit: `bound` for all tokens, `bands` for the
    law of the bands of probability alone. row: the visited row; visits: how often; tv: the observed TV of tokens."""

    row: int
    visits: int
    tv: float
    bound: float
    bands: float


@dataclass(frozen=True)
class StepResult:
    """What one step showed. verdict: "FAIL" or "PASS"; open alternatives or untested rows do not show in it.

    walks, looks: used; level: of the step; test_level: that each test was held to at the last look; tests: all of them;
    adjusted: their p-values by Holm within the look; violations: impossible outcomes; certificates: one per tested row,
    all of them valid together with probability 1 - level; evidence: one e-process per alternative.
    """

    verdict: str
    walks: int
    looks: int
    level: float
    test_level: float
    tests: tuple[TestResult, ...]
    adjusted: tuple[float, ...]
    violations: tuple[Violation, ...]
    certificates: tuple[Certificate, ...]
    evidence: tuple[EProcess, ...]

    @property
    def rejected(self) -> tuple[TestResult, ...]:
        """The tests that reject, strongest first."""
        hits = [t for t in self.tests if t.p_value is not None and t.p_value <= self.test_level]
        return tuple(sorted(hits, key=lambda t: t.p_value or 0.0))

    @property
    def accused(self) -> tuple[str, ...]:
        """Alternatives whose law the walks speak for."""
        return tuple(e.name for e in self.evidence if e.state == "accused")

    @property
    def open(self) -> tuple[str, ...]:
        """Alternatives that the walks could neither accuse nor exclude."""
        return tuple(e.name for e in self.evidence if e.state == "open")

    @property
    def untested_rows(self) -> tuple[int, ...]:
        """Rows without enough visits for the node test."""
        return tuple(t.row for t in self.tests if t.name == "node" and t.p_value is None and t.row is not None)

    @property
    def detectable(self) -> float:
        """Smallest TV that is seen with 99% power in every direction, whatever row it is in: the weakest node test.

        1 if a row was not tested. Of the cells' law, given a visit; see `audit.power`.
        """
        return max((1.0 if t.detectable is None else t.detectable for t in self.tests if t.name == "node"), default=1.0)

    @property
    def detectable_known(self) -> float:
        """Smallest TV of a walk's law at which the e-process of a known fault is expected to have crossed."""
        return likelihood_ratio_tv(self.walks, self.evidence[0].level if self.evidence else self.level)

    def messages(self) -> list[str]:
        """Return one line per finding, naming row, test and token."""
        lines = [f"impossible outcome, {violation}" for violation in self.violations]
        for test in self.rejected:
            row = "" if test.row is None else f" at row {test.row}"
            lines.append(
                f"{test.name}{row}: p = {test.p_value:.3g} <= {self.test_level:.3g} on {test.n} draws; most from "
                f"{test.where}, seen {test.observed:.0f} times where {test.expected:.1f} were expected"
            )
        lines += [
            f"likelihood ratio: {e.name} explains the walks 1 / {e.level:.3g} times better than the clean rule after "
            f"{e.accused_at} walks"
            for e in self.evidence
            if e.accused_at is not None
        ]
        return lines


def run_step(
    sampler: ClosedSampler,
    step: Step,
    *,
    walks: int = WALKS,
    level: float = STEP_LEVEL,
    law: RuleLaw | None = None,
    alternatives: Mapping[str, Alternative] | None = None,
    seed: int = 0,
    looks: int = LOOKS,
    chunk: int = CHUNK,
    min_visits: int = MIN_VISITS,
) -> StepResult:
    """Audit a sampler on one step.

    law: of the clean rule, for the tests that need more than the target; alternatives: name -> log likelihood ratio of
    walks (give those that differ enough to matter, say by a TV of 0.002: the run goes on until each is decided or
    `looks` looks are used up); seed: of the whole run; chunk: walks in one call of the sampler.
    Raises InputError for counts below 1 or a level outside (0, 1), and for outcomes of the wrong shape.
    """
    if min(walks, looks, chunk, min_visits) < 1 or not 0 < level < 1:
        raise InputError(f"run: expected counts >= 1 and 0 < level < 1, got {walks=}, {looks=}, {chunk=}, {level=}")
    alternatives = alternatives or {}
    test_part = level / 2 if alternatives else level
    evidence = [EProcess(name, (level - test_part) / len(alternatives)) for name in alternatives]
    tally = WalkTally(step)
    for look in range(1, looks + 1):
        _walk(sampler, tally, walks * 2 ** (look - 1), seed, chunk, dict(alternatives), evidence)
        part = test_part * 2.0 ** -min(look, looks - 1)
        tests = battery(tally, law, part, min_visits)
        least = min((t.p_value for t in tests if t.p_value is not None), default=1.0) * len(tests)
        failed = bool(tally.violations) or least <= part or any(e.accused_at for e in evidence)
        waiting = least < SUSPICIOUS or any(e.state == "open" for e in evidence)
        if failed or not waiting:
            break
    return StepResult(
        "FAIL" if failed else "PASS",
        tally.walks,
        look,
        level,
        part / len(tests),
        tuple(tests),
        tuple(adjusted(tests)),
        tuple(tally.violations),
        tuple(_certificates(tally, level / looks, min_visits)),
        tuple(evidence),
    )


def _walk(
    sampler: ClosedSampler,
    tally: WalkTally,
    until: int,
    seed: int,
    chunk: int,
    alternatives: Mapping[str, Alternative],
    evidence: list[EProcess],
) -> None:
    """Draw streams up to `until` walks in all, fewer if an outcome is impossible or an e-process accuses."""
    while tally.walks < until and not tally.violations and not any(e.accused_at for e in evidence):
        size = min(chunk, until - tally.walks)
        drawn = sampler.walk(tally.step, size, stream_seed(seed, tally.walks))
        if len(drawn.last) != size:
            raise InputError(f"sampler: expected {size} walks, got {len(drawn.last)}")
        tally.add(drawn)
        tally.note_zero_emissions()
        if not tally.violations:
            for process in evidence:
                process.update(alternatives[process.name](drawn))


def stream_seed(seed: int, start: int) -> int:
    """Return the seed, in 0..2^63-1, of the stream whose first walk has this number."""
    return int(np.random.SeedSequence([seed, start]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _certificates(tally: WalkTally, level: float, min_visits: int) -> list[Certificate]:
    """level: of one look; it is shared by the rows and by the two bounds of each."""
    rows = [row for row in tally.step.tree.active_rows if tally.visits(row) >= min_visits]
    share = level / (2 * len(tally.step.tree.active_rows))
    found = []
    for row in rows:
        n, counts, target = tally.visits(row), tally.emitted(row), tally.target[row]
        cells = band_cells(target, n)
        tv = empirical_tv(counts, target)
        bands = tv_certificate(empirical_tv(cells.count(counts), cells.law), n, share)
        found.append(Certificate(row, n, tv, tv_certificate(tv, n, share), bands))
    return found


def false_alarms(
    sampler: ClosedSampler, step: Step, runs: int, *, level: float, walks: int, law: RuleLaw | None, min_visits: int
) -> int:
    """Return how many of `runs` runs with one look each fail; for a clean sampler at most `level` of them should.

    The look is one, so that it gets the whole level: the count can then be held against it (exact binomial test).
    """
    half = -(-walks // 2)  # two streams, so that these are compared too
    failed = 0
    for seed in range(runs):
        result = run_step(
            sampler, step, walks=walks, level=level, law=law, seed=seed, looks=1, chunk=half, min_visits=min_visits
        )
        failed += result.verdict == "FAIL"
    return failed
