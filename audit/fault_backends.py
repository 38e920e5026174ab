"""The verdict of the quick detection matrix on several backends, as one table that later runs complete.

python -m audit.fault_backends torch bank --out reports/faults/backends.md
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from audit.arguments import natural
from audit.environment import environment
from audit.fault_matrix import Plan, Row, run_matrix
from audit.fault_report import to_report
from audit.fault_trial import STATES
from audit.files import write_atomically

_HEAD = """# Every fault of the component's catalogue on every kernel of ours

Each fault on the smallest case that has what it needs, until a check catches it (`lumotree-audit faults --quick`).
Equivalent: harmless, or without effect on this kernel, with the proof in the catalogue. Not reached: arithmetic faults
of kernels whose formulas are compiled, surfaces that the kernel does not have, and what its contract excludes.
treewy_tf32 is not here: it leaves the bounds without any fault (`reports/h200-bench-all`), so nothing is caught on it.
Nor are the adapters to kernels of others that need a card (fla, sglang, tokenspeed; `reports/peers.md`).
Faults of samplers do not depend on the kernel: `reports/faults/summary.md` has them. Each line by
`python -m audit.fault_backends KERNEL` (Triton kernels on a CPU: with TRITON_INTERPRET=1).

| kernel | {states} | verdict | CPU seconds | seed | date | versions |
|---|{marks}---|---:|---:|---|---|
"""


def table_row(backend: str, rows: Sequence[Row], seed: int, cpu_s: float) -> str:
    """One line of the table; the states are counted in the order of `STATES`."""
    counts, facts = Counter(row.state for row in rows), environment()
    verdict = to_report(rows, Plan(backend, seed, quick=True), "", 0.0).verdict
    versions = f"torch {facts['torch']}, triton {facts['triton']}, commit {str(facts['git_commit'])[:9]}"
    cells = [
        backend,
        *(str(counts[s]) for s in STATES),
        verdict,
        f"{cpu_s:.0f}",
        str(seed),
        facts["date"][:16],
        versions,
    ]
    return f"| {' | '.join(cells)} |"


def add_row(path: Path, row: str) -> None:
    """Write a line into the table, in the place of the same kernel's line if there is one, lines in order of name."""
    old = path.read_text().splitlines() if path.exists() else []
    lines = {line.split("|")[1].strip(): line for line in old if line.startswith("| ") and "| kernel" not in line}
    lines[row.split("|")[1].strip()] = row
    head = _HEAD.format(states=" | ".join(STATES), marks="---:|" * len(STATES))
    write_atomically({path: (head + "\n".join(lines[name] for name in sorted(lines)) + "\n").encode()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix on each named backend and add its line; 1 if a verdict was not PASS. Raises InputError."""
    parser = argparse.ArgumentParser(prog="python -m audit.fault_backends", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--seed", type=natural, default=1)
    parser.add_argument("--workers", type=natural, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/faults/backends.md"))
    options = parser.parse_args(arguments)
    wrong = False
    for backend in options.backends:
        before = sum(os.times()[:4])
        rows = run_matrix(Plan(backend, options.seed, quick=True), workers=options.workers)
        line = table_row(backend, rows, options.seed, sum(os.times()[:4]) - before)
        add_row(options.out, line)
        wrong = wrong or "| PASS |" not in line
        print(line, *(f"  {r.fault} {r.state}: {r.note}" for r in rows if r.state in ("Missed", "Crashed")), sep="\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
