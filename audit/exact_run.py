"""Prove rules lossless on part of the bounded domain, and write the committed report.

python -m audit.exact_run --count 1000000 --processes 2 --out reports/exact-law
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from audit.exact_forms import block_efficiency
from audit.exact_law import Engine, Nodes, is_lossless, target_law, variation
from audit.law_domain import DEFAULT_COUNT, FULL_COUNT, SEED, Configuration, configurations, describe
from audit.law_rows import Rule
from audit.law_rules import LOSSLESS_FAULTS, RULES, controls, faults_of
from lumotree.errors import InputError

Progress = Callable[[int], None]
"""Told how many configurations are done, now and then."""

REPORT_EVERY = 500

CONTROL_COUNT = 5_000
"""Configurations on which the faulty rules are run beside a report."""


@dataclass(frozen=True)
class ExactResult:
    """What was found for one rule.

    configurations: those that the rule applies to. lossy: those in which its emitted law is not the target's. worst:
    largest exact TV, as a fraction in text. first: the first lossy configuration, in full. forms: configurations with a
    closed form of block efficiency; forms_wrong: those in which the engine's mean length differs from it.
    """

    rule: str
    configurations: int = 0
    lossy: int = 0
    worst: str = "0"
    first: str = ""
    forms: int = 0
    forms_wrong: int = 0

    @property
    def lossless(self) -> bool:
        """Whether the rule applied somewhere, was lossless there and agreed with every closed form."""
        return self.configurations > 0 and not self.lossy and not self.forms_wrong

    def merged(self, other: ExactResult) -> ExactResult:
        """Add the counts of another part of the domain."""
        return ExactResult(
            self.rule,
            self.configurations + other.configurations,
            self.lossy + other.lossy,
            str(max(Fraction(self.worst), Fraction(other.worst))),
            self.first or other.first,
            self.forms + other.forms,
            self.forms_wrong + other.forms_wrong,
        )


def applies(rule: Rule, config: Configuration) -> bool:
    """Tell whether a rule is meant for the drafts: "deterministic" for fixed ones, "multiround" for sampled ones."""
    base = rule.name.split("/")[0]
    if base == "deterministic":
        return config.tokens is not None
    return base != "multiround" or config.laws is not None


def run_exact(
    count: int = DEFAULT_COUNT,
    rules: Iterable[Rule] = tuple(RULES.values()),
    progress: Progress | None = None,
    seed: int = SEED,
    part: int = 0,
    parts: int = 1,
) -> list[ExactResult]:
    """Compare the emitted law of each rule with the target's on `count` configurations, exactly; one result a rule.

    Rules may be faulty ones (`law_rules.faults_of`), whose lossy configurations are then counted. About 1 ms a
    configuration for the five rules. part, parts: do one of several equal parts.
    """
    judges = [_Judge(rule) for rule in rules]
    for done, config in enumerate(configurations(count, seed, part, parts), 1):
        nodes: dict[Callable[..., Any], Nodes] = {}
        for judge in judges:
            if applies(judge.rule, config):
                if judge.rule.truth not in nodes:
                    nodes[judge.rule.truth] = target_law(config, judge.rule)
                judge.judge(config, nodes[judge.rule.truth])
        if progress is not None and done % REPORT_EVERY == 0:
            progress(done)
    return [judge.result for judge in judges]


class _Judge:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.result = ExactResult(rule.name)
        self._engine = Engine(rule)
        self._right = RULES.get(rule.name) == rule

    def judge(self, config: Configuration, nodes: Nodes) -> None:
        law = self._engine.emitted(config, nodes)
        truth, den = nodes[0][0], config.den ** (config.depth + 1)
        found = ExactResult(self.rule.name, 1)
        if not is_lossless(law, truth, den):
            found = replace(found, lossy=1, worst=str(variation(law, truth, den)), first=repr(config))
        form = block_efficiency(config, self.rule) if self._right else None
        if form is not None:
            found = replace(found, forms=1, forms_wrong=int(form != 1 + law.mean_length))
        self.result = self.result.merged(found)


def run_parallel(count: int, rules: Sequence[str], processes: int, seed: int = SEED) -> list[ExactResult]:
    """Run `run_exact` on rules by name ("multiround" or "multiround/q-one") in several processes."""
    with ProcessPoolExecutor(processes) as pool:
        parts = list(pool.map(_part, [(count, tuple(rules), seed, part, processes) for part in range(processes)]))
    merged = parts[0]
    for more in parts[1:]:
        merged = [first.merged(second) for first, second in zip(merged, more, strict=True)]
    return merged


def _part(task: tuple[int, tuple[str, ...], int, int, int]) -> list[ExactResult]:
    count, names, seed, part, parts = task

    def progress(done: int) -> None:
        if done % 20_000 == 0:
            print(f"part {part}: {done} of about {count // parts}", file=sys.stderr, flush=True)

    return run_exact(count, [rule_named(name) for name in names], progress, seed, part, parts)


def rule_named(name: str) -> Rule:
    """Return a rule or a fault of one by name. Raises InputError listing the names."""
    base, _, fault = name.partition("/")
    found = RULES.get(base)
    if found is not None and fault:
        found = faults_of(found).get(fault)
    if found is None:
        raise InputError(f"unknown rule {name!r}; rules: {', '.join(RULES)}; faults: RULE/FAULT as in law_rules")
    return found


def missed_controls(found: Iterable[ExactResult]) -> list[str]:
    """Return the controls that came out wrong: a fault that was nowhere lossy, or a lossless one that was."""
    return [control.rule for control in found if (control.lossy == 0) != (control.rule in LOSSLESS_FAULTS)]


def verdict_of(results: Sequence[ExactResult], found: Sequence[ExactResult]) -> str:
    """Return FAIL if a rule is lossy, INCONCLUSIVE if there are no controls or one came out wrong, else PASS."""
    if not all(result.lossless for result in results):
        return "FAIL"
    return "PASS" if found and not missed_controls(found) else "INCONCLUSIVE"


def report(
    results: Sequence[ExactResult], found: Sequence[ExactResult], count: int, seconds: float, command: str
) -> dict[str, Any]:
    """Return the report as plain data; found: what `controls()` came to on a part of the domain."""
    return {
        "schema": "lumotree-audit/exact-law/1",
        "verdict": verdict_of(results, found),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "seconds": round(seconds, 1),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "platform": platform.platform()},
        "cpus": os.cpu_count(),
        "domain": describe(count),
        "results": [asdict(result) for result in results],
        "controls": [asdict(control) | {"first": ""} for control in found],
        "controls_missed": missed_controls(found),
    }


def as_markdown(data: dict[str, Any]) -> str:
    """Render a report for people."""
    lines = [
        "# Exact law of the selection rules",
        "",
        f"{data['verdict']}: the law of what each rule emits, over drafts and coins, continued by plain target draws, "
        "compared with the target's own sequence law in integer arithmetic.",
        "",
        "| rule | configurations | lossy | largest TV | closed forms checked | closed forms wrong |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in data["results"]:
        counts = (row[key] for key in ("configurations", "lossy", "worst", "forms", "forms_wrong"))
        lines.append("| " + " | ".join((row["rule"], *map(str, counts))) + " |")
    lines += ["", "## Controls", ""]
    lines.append(f"Faulty rules on a part of the domain. Each must be lossy somewhere, except {len(LOSSLESS_FAULTS)} ")
    lines[-1] += f"that emit the target's law all the same. Wrong: {', '.join(data['controls_missed']) or 'none'}."
    lines += ["", "| faulty rule | configurations | lossy | largest TV |", "|---|---:|---:|---:|"]
    for row in data["controls"]:
        worst = f"{float(Fraction(row['worst'])):.4f}"
        lines.append(f"| {row['rule']} | {row['configurations']} | {row['lossy']} | {worst} |")
    lines += ["", "## Domain", ""]
    lines += [f"* {name.replace('_', ' ')}: {value}" for name, value in data["domain"].items()]
    lines += ["", "## Run", "", f"* command: `{data['command']}`", f"* date: {data['date']}"]
    lines += [f"* time: {data['seconds']} s, {data['cpus']} CPUs", f"* versions: {data['versions']}", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write `OUT.json` and `OUT.md`; 0 if PASS, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m audit.exact_run", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=FULL_COUNT)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--controls", type=int, default=CONTROL_COUNT, help="configurations for the faulty rules")
    parser.add_argument("--out", type=Path, default=Path("reports/exact-law"))
    options = parser.parse_args(arguments)
    for name in options.rules:
        rule_named(name)
    start = time.monotonic()
    results = run_parallel(options.count, options.rules, options.processes)
    found = run_parallel(options.controls, [control.name for control in controls()], options.processes)
    words = list(sys.argv[1:] if arguments is None else arguments)
    data = report(
        results, found, options.count, time.monotonic() - start, shlex.join(["python", "-m", "audit.exact_run", *words])
    )
    options.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_markdown(data))
    return 0 if data["verdict"] == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
