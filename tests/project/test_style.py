"""The project holds itself to ruff, mypy and its own rules of the house."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {"lumotree": 0, "faults": 1, "audit": 2}
SOURCES = sorted(p for top in LAYERS for p in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_linters_have_nothing_to_say(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def _names(path: Path) -> tuple[set[str], set[str]]:
    """The packages that a module imports, and every `a.b.c` of its imports and attributes as it stands there."""
    tree = ast.parse(path.read_text())
    return _imports(tree), _dotted(tree)


def _dotted(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            found.add(ast.unparse(node))
    return found


def test_what_mypy_passes_over_is_named_nowhere() -> None:
    """Or it would be of any type, and mypy would say nothing about its use."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    (skipped,) = [o["module"] for o in overrides if o.get("follow_imports") == "skip"]
    parts = tuple(name.removesuffix("*") for name in skipped)

    def named(names: set[str]) -> list[str]:
        return [name for name in names if f"{name}.".startswith(parts)]

    for wrong in ("from torch import fx", "import torch.distributed as d", "torch.fx.Node", "import torch.fx.graph"):
        assert len(parts) > 20 and named(_dotted(ast.parse(wrong)))
    assert not [(str(path.relative_to(ROOT)), found) for path in SOURCES if (found := named(_names(path)[1]))]


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_imports_run_from_lumotree_over_faults_to_audit() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        for name in _names(path)[0]
        if LAYERS.get(name, -1) > LAYERS[path.relative_to(ROOT).parts[0]]
    ]
    assert not wrong


def test_no_module_is_longer_than_400_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := p.read_text().count("\n")) > 400}
    assert not long
