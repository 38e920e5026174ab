"""What the README shows is run: the adapter example, the two Quick start lines' shape, the commands it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from audit.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def test_quick_start_is_exactly_two_command_lines() -> None:
    section = README.split("## Quick start", 1)[1]
    first = re.search(r"^```sh\n(.*?)^```", section, flags=re.M | re.S)
    assert first is not None
    lines = [line for line in first[1].splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) == 2
    assert "lumotree-audit check" in lines[0]
    assert "pytest" in lines[1]


def test_the_adapter_example_is_complete_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter,) = [b for b in blocks("python") if "class MyKernel" in b]
    assert adapter.count("\n") <= 40
    (tmp_path / "my_adapter.py").write_text(adapter)
    monkeypatch.chdir(tmp_path)
    words = ["--backend", "my_adapter:MyKernel", "--shape", "micro", "--workers", "0"]
    size = ["--sets", "1", "--instances", "14"]  # the fewest that give the envelope power
    assert main(["calibrate", *words, *size]) == 0
    assert main(["check", *words, *size]) == 0
    assert "conv not covered, attention not covered" in capsys.readouterr().out
    # Programs also step with padding requests, which the component suite's chain of one request never has.
    assert main(["fuzz", "--backend", "my_adapter:MyKernel", "--examples", "25", "--workers", "0"]) == 0
