"""The table of refusals is made from what tests demand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_plugin_writes_a_line_for_each_refusal_that_a_test_demands(tmp_path: Path) -> None:
    target = tmp_path / "refusals.md"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.refusals", "--refusals",
             str(target), "-k", "refuse", "tests/lumotree/test_tree.py", "tests/lumotree/test_batch.py"]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    text = target.read_text()
    for part in (
        "| TreeError |",
        "| ContractError |",
        "`lumotree/tree_validate.py`",
        "share state_slot",
        "test_tree.py::",
    ):
        assert part in text, part
    assert "raise statements were reached" in text and str(tmp_path) not in text
    assert not target.with_suffix(".jsonl").exists()
