"""The project holds itself to ruff, mypy and its own rules of the house."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {"lumotree": 0, "faults": 1, "audit": 2}
SOURCES = sorted(p for top in LAYERS for p in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_linters_have_nothing_to_say(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_imports_run_from_lumotree_over_faults_to_audit() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        for name in _imports(path)
        if LAYERS.get(name, -1) > LAYERS[path.relative_to(ROOT).parts[0]]
    ]
    assert not wrong


def test_no_module_is_longer_than_400_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := p.read_text().count("\n")) > 400}
    assert not long
