"""Does a clean sampler fail as often as the stated level says? Counted over many runs of small configurations.

Bonferroni's level is a bound, so a count below it alone would agree with a battery that never rejects. Two parts:

exact    A tree of two rows whose walks have four outcomes. Each walk is a stream of its own and streams are too few to
         be compared, so that every test that runs is a function of four counts: the level of the family *is* a finite
         sum, over all counts, of their multinomial probability where the battery of `audit.sampler_tests` rejects. The
         number of runs that fail is held against that level, two-sided (exact binomial test).
battery  The whole battery on a tree of six rows with redrawn drafts. The number of runs that fail is held against the
         stated level from above, and every test by itself against its own level from both sides, so that no slack of
         Bonferroni can hide a test that rejects too often or never.

    python -m audit.clean_runs --runs 1000 --out reports/clean-runs
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from audit.arguments import natural
from audit.environment import environment
from audit.montecarlo import run_step, stream_seed
from audit.rule_law import Floats, Ints, RuleLaw, multi_round_law
from audit.sampler_guard import CoinWalker, PreparedRule
from audit.sampler_tests import TestResult, battery
from audit.walk_tally import WalkTally
from lumotree.coins import coins_for
from lumotree.select import MULTI_ROUND
from lumotree.select_types import ClosedSampler, Step, Walks
from lumotree.tree import Tree

LEVELS = (0.1, 0.8)
"""Stated levels of a run; the first is that of the whole battery. The second is there for its many rejections."""
EACH = 0.05
"""Level of one test in the second part."""
DOUBT = 1e-3
"""A count whose probability is below this, over all tests of a part, does not agree."""
WALKS = 40
BATTERY_WALKS, BATTERY_VISITS = 1_000, 100
_BLOCK = 4_096
_RARE = 1e-12
"""Outcomes less likely than this are left out of the sum, so that it is off by their number times this at most."""


@dataclass(frozen=True)
class Count:
    """How many of the runs reject, against a level; p_value: exact binomial; sides: 2, or 1 = only too many count."""

    name: str
    runs: int
    rejections: int
    level: float
    sides: int
    p_value: float

    @classmethod
    def of(cls, name: str, rejections: int, runs: int, level: float, sides: int = 2) -> Count:
        """Hold a count against its level."""
        alternative: Any = "two-sided" if sides == 2 else "greater"
        p_value = float(stats.binomtest(rejections, runs, level, alternative=alternative).pvalue)
        return cls(name, runs, rejections, level, sides, p_value)


@dataclass(frozen=True)
class CleanRuns:
    """Both parts. outcomes: counts that were summed for the exact levels; exact: one count for each of LEVELS; agrees:
    nothing is off at DOUBT."""

    outcomes: int
    exact: tuple[Count, ...]
    battery: Count
    tests: tuple[Count, ...]

    @property
    def agrees(self) -> bool:
        """Whether the counts agree with their levels, each part at DOUBT, and Bonferroni is the bound that it is."""
        parts = (self.exact, (self.battery,), self.tests)
        bound = all(count.level <= stated for count, stated in zip(self.exact, LEVELS, strict=True))
        return bound and all(min(c.p_value for c in part) * len(part) > DOUBT for part in parts)


class InTurn:
    """A closed sampler that hands out the walks of one long sequence, whatever seed it is asked with: a clean one, its
    walks being independent, and fast when asked for one walk at a time."""

    def __init__(self, seed: int) -> None:
        self._seed, self._next = seed, 0
        self._held: Walks | None = None

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        """The next `walks` selections; `seed` is not read. Blocks are drawn for one step."""
        at = self._next % _BLOCK
        if self._held is None or at == 0:
            requests = range(self._next, self._next + _BLOCK)
            coins = coins_for(self._seed, requests, 0, step.tree.n, step.tree.active_rows)
            self._held = MULTI_ROUND.select(step, torch.from_numpy(step.tree.tokens.copy())[None], coins)
        self._next += walks
        part = slice(at, at + walks)
        return Walks(self._held.last[part], self._held.bonus[part], self._held.refused[part], self._held.tokens)


def two_rows() -> Step:
    """Row 0 goes on with probability 0.7 or draws one of two tokens; row 1 draws one of two."""
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.55, 0.45, 0.0]], dtype=torch.float64)
    return Step(Tree.make([-1, 0], tokens=[0, 0], vocab=3), rows)


def exact_levels(step: Step, walks: int) -> tuple[tuple[float, ...], int]:
    """Return P(a clean run of so many walks rejects) at each of LEVELS, and the number of outcomes that were summed."""
    law = multi_round_law(step)
    joint = law.reach[:, None] * law.bonus
    ends = np.argwhere(joint > 0)
    mass = joint[tuple(ends.T)] / joint.sum()
    levels, outcomes = [0.0] * len(LEVELS), 0
    for counts in _compositions(walks, len(ends)):
        chance = float(stats.multinomial.pmf(counts, walks, mass))
        if chance < _RARE:
            continue
        outcomes += 1
        tests = _tests(step, law, ends, counts)
        for index, level in enumerate(LEVELS):
            levels[index] += chance * family_rejects(tests, level)
    return tuple(levels), outcomes


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


def _tests(step: Step, law: RuleLaw, ends: Ints, counts: Sequence[int]) -> list[TestResult]:
    last, bonus = (torch.from_numpy(np.repeat(column, counts)) for column in ends.T)
    inner = torch.tensor([bool(step.tree.active_children(row)) for row in range(step.tree.n)])
    tally = WalkTally(step)
    tally.add(Walks(last, bonus, inner[last], torch.from_numpy(step.tree.tokens.copy())[None]))
    for table in (tally.lag_last, tally.lag_bonus, tally.lag_mixed, tally.far):
        table[:] = 0  # each walk was a stream of its own
    return battery(tally, law, LEVELS[0], _least_visits(sum(counts)))


def _least_visits(walks: int) -> int:
    """More than there are pairs of streams, so that these are not compared."""
    return walks // 2 + 1


def family_rejects(tests: Sequence[TestResult], level: float) -> bool:
    """What `run_step` decides at its only look."""
    return min((t.p_value for t in tests if t.p_value is not None), default=1.0) * len(tests) <= level


def run_exact_part(runs: int, walks: int, seed: int) -> tuple[tuple[Count, ...], int]:
    """Count failing runs of the two-row configuration and hold them against its exact levels."""
    step = two_rows()
    levels, outcomes = exact_levels(step, walks)
    failed = failures(InTurn(seed), step, runs, walks, seed)
    counts = [
        Count.of(f"stated {stated:g}", count, runs, true)
        for stated, count, true in zip(LEVELS, failed, levels, strict=True)
    ]
    return tuple(counts), outcomes


def failures(sampler: ClosedSampler, step: Step, runs: int, walks: int, seed: int) -> list[int]:
    """Return how many of `runs` runs with one look each fail at each of LEVELS, each walk being a stream of its own.

    The level of a run has no part in its walks and p-values, so one run answers for all levels.
    """
    law, least, failed = multi_round_law(step), _least_visits(walks), [0] * len(LEVELS)
    for run in range(runs):
        result = run_step(
            sampler, step, walks=walks, level=LEVELS[0], law=law, seed=stream_seed(seed, run), looks=1, chunk=1,
            min_visits=least,
        )  # fmt: skip
        failed[0] += result.verdict == "FAIL"
        for index, level in enumerate(LEVELS[1:], 1):
            failed[index] += bool(result.violations) or family_rejects(result.tests, level)
    return failed


def six_rows() -> Step:
    """Redrawn drafts over 11 of 12 tokens, siblings, depth 2; no token of the target's first."""
    rng = np.random.default_rng([0, 5])
    parents, vocab = (-1, 0, 0, 0, 1, 1), 12
    target = rng.dirichlet(np.full(vocab, 0.8), len(parents)) * 0.9 + 0.1 / vocab
    target[:, 0] = 0
    target /= target.sum(1, keepdims=True)
    laws: Floats = target**0.7 * np.exp(0.4 * rng.standard_normal(target.shape))
    laws[:, 1] = 0
    laws /= laws.sum(1, keepdims=True)
    tokens = [0, 2, 3, 4, 2, 3]
    return Step(Tree.make(parents, tokens=tokens, vocab=vocab), torch.from_numpy(target), torch.from_numpy(laws))


def battery_runs(runs: int, seed: int) -> list[tuple[bool, list[TestResult]]]:
    """Whether each run of the whole battery failed at the first of LEVELS, and its tests; two streams a run."""
    step, walker, level = six_rows(), CoinWalker(PreparedRule(MULTI_ROUND)), LEVELS[0]
    law, found = multi_round_law(step), []
    for run in range(runs):
        tally = WalkTally(step)
        for stream in range(2):
            tally.add(walker.walk(step, BATTERY_WALKS // 2, stream_seed(seed, 2 * run + stream)))
        tests = battery(tally, law, level, BATTERY_VISITS)
        found.append((bool(tally.violations) or family_rejects(tests, level), tests))
    return found


def counted(found: Sequence[tuple[bool, list[TestResult]]]) -> tuple[Count, tuple[Count, ...]]:
    """Count failing runs of the whole battery, and rejections of each of its tests at EACH."""
    seen: dict[str, list[bool]] = {}
    for _, tests in found:
        for test in tests:
            if test.p_value is not None:
                seen.setdefault(test.id, []).append(test.p_value <= EACH)
    failed = sum(fails for fails, _ in found)
    counts = tuple(Count.of(name, sum(hits), len(hits), EACH) for name, hits in sorted(seen.items()))
    return Count.of("six rows, whole battery", failed, len(found), LEVELS[0], sides=1), counts


def clean_runs(runs: int, seed: int = 1, walks: int = WALKS) -> CleanRuns:
    """Run both parts."""
    exact, outcomes = run_exact_part(runs, walks, seed)
    whole, tests = counted(battery_runs(runs, seed))
    return CleanRuns(outcomes, exact, whole, tests)


def as_markdown(found: CleanRuns, command: str) -> str:
    """Render a report for people."""
    whole = found.battery
    most = max(found.tests, key=lambda test: test.rejections / test.runs)
    least = min(found.tests, key=lambda test: test.rejections / test.runs)
    worst = min(found.tests, key=lambda test: test.p_value)
    lines = [
        "# Clean runs: does the battery reject as often as it says?",
        "",
        f"{'They agree' if found.agrees else 'THEY DO NOT AGREE'}. `{command}`",
        "",
        "| configuration | runs | rejected | level | held against | exact binomial p |",
        "|---|---:|---:|---:|---|---:|",
        *(
            f"| two rows, {found.outcomes:,} outcomes summed | {each.runs:,} | {each.rejections} | {each.level:.5f} | "
            f"the exact level of the family {each.name}, two-sided | {each.p_value:.3g} |"
            for each in found.exact
        ),
        f"| six rows, whole battery | {whole.runs:,} | {whole.rejections} | {whole.level:g} | the stated level, from "
        f"above (Bonferroni is a bound) | {whole.p_value:.3g} |",
        "",
        f"Each of the {len(found.tests)} tests of the whole battery by itself, at {EACH:g}, two-sided: from "
        f"{least.rejections / least.runs:.3f} ({least.name}) to {most.rejections / most.runs:.3f} ({most.name}); least "
        f"p = {worst.p_value:.3g} ({worst.name}), times {len(found.tests)} tests "
        f"{min(1.0, worst.p_value * len(found.tests)):.3g}.",
        "",
        "| test@row | runs | rejected | exact binomial p |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {t.name} | {t.runs:,} | {t.rejections} | {t.p_value:.3g} |" for t in found.tests]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write `OUT.json` and `OUT.md`; 0 if the counts agree, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m audit.clean_runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=natural, default=1_000)
    parser.add_argument("--seed", type=natural, default=1)
    parser.add_argument("--out", type=Path, default=Path("reports/clean-runs"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.monotonic()
    found = clean_runs(options.runs, options.seed)
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = shlex.join(["python", "-m", "audit.clean_runs", *words])
    data = {
        "schema": "lumotree-audit/clean-runs/1", "command": command, "seconds": round(time.monotonic() - start, 1),
        "environment": environment(), "agrees": found.agrees, **asdict(found),
    }  # fmt: skip
    options.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    text = as_markdown(found, command)
    options.out.with_suffix(".md").write_text(text)
    print(text)
    return 0 if found.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
