"""`lumotree-audit sample` and `check --suite`: exit codes, report files, bad input with row and value, help."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from audit import cli, sampler
from audit.report import Report, from_json

QUICK = ("--vocab", "32", "--walks", "8000", "--min-visits", "20", "--exact", "0", "--workers", "0")
ONE = (*QUICK, "--only", "truncated-fixed")

SAMPLERS = """
from dataclasses import replace
import torch
from lumotree.select import MULTI_ROUND

class Warm:
    def select(self, step, tokens, coins):
        rows = step.target ** 0.8
        return MULTI_ROUND.select(replace(step, target=rows / rows.sum(1, keepdim=True)), tokens, coins)

class NoMethod:
    pass

class TwoArguments:
    def select(self, step, coins):
        pass

class OddRule(Warm):
    rule = "eagle"

class NoWalks(Warm):
    def select(self, step, tokens, coins):
        return None

broken = Warm.missing if hasattr(Warm, "missing") else Warm()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "samplers_of_a_stranger.py").write_text(SAMPLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*words: str) -> int:
    return cli.main(["sample", *words])


def test_pass_writes_a_report_that_parses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*ONE, "--report", "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("PASS  multi-round  sampler")
    assert max(map(len, lines)) <= 80
    assert any("detectable: smallest TV" in line for line in lines)
    report = from_json(json.loads((folder / "out/report.json").read_text()))
    assert report.facts["steps"]["truncated-fixed"]["detectable_any_row"] <= 1
    assert report.facts["conventions"]["truncated-fixed"]["top-k ties: index / all"]["tv"] > 0
    assert report.facts["faults"]["residual_half"]["truncated-fixed"]["detected"]
    suite = ElementTree.parse(folder / "out/junit.xml").getroot()
    assert suite.get("failures") == "0"
    assert "## Conventions" in (folder / "out/summary.md").read_text()
    assert list(folder.glob("out/cells.*"))


def test_fail_names_a_command_that_fails_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*ONE, "--sampler", "samplers_of_a_stranger:Warm", "--report", "out") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL")
    finding = json.loads((folder / "out/report.json").read_text())["findings"][0]
    words = shlex.split(finding["reproduce"])
    assert words[:2] == ["lumotree-audit", "sample"]
    assert cli.main([*words[1:], "--workers", "0"]) == 1


def test_inconclusive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*ONE[:4], "--min-visits", "7000", *ONE[6:]) == 3
    assert "too few walks visited row" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sampler", "eagle"), "sampler 'eagle' is unknown; known: greedy, naive"),
        (("--sampler", "samplers_of_a_stranger:Nothing"), "has no object 'Nothing'"),
        (("--sampler", "no_such_module:it"), "module 'no_such_module' cannot be imported"),
        (("--sampler", "samplers_of_a_stranger:NoMethod"), "lacks a method: write select(step, tokens, coins)"),
        (("--sampler", "samplers_of_a_stranger:TwoArguments"), "cannot be called with the 3 positional arguments"),
        (("--sampler", "samplers_of_a_stranger:OddRule"), "expected attribute rule to be one of greedy"),
        (("--sampler", "samplers_of_a_stranger:NoWalks"), "select returned NoneType; expected lumotree.select_types"),
        (("--only", "peaked"), "--only: unknown step 'peaked'"),
        (("--step", "missing.npz"), "step missing.npz: expected a NumPy archive"),
        (("--report", "samplers_of_a_stranger.py"), "expected a writable folder"),
    ],
)
def test_bad_input_exits_2(folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str):
    assert run(*(QUICK if "--step" in words or "--only" in words else ONE), *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--walks", "0"), ("--exact", "-1"), ("--seed", "x"), ("--walks", "1e5")])
def test_usage_errors_exit_2(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*words)
    assert stop.value.code == 2


def arrays() -> dict[str, np.ndarray]:
    """A good step: row 0 with two children; vocabulary 4; drafts from a law."""
    rows = np.array([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    return {"parents": np.array([-1, 0, 0]), "tokens": np.array([-1, 0, 1]), "target": rows, "laws": rows[[1, 1, 1]]}


def changed(name: str, place: tuple[int, ...], value: float) -> dict[str, np.ndarray]:
    made = arrays()
    made[name] = made[name].astype(float) if name in ("target", "laws") else made[name].copy()
    made[name][place] = value
    return made


COINS = {"accept": np.full((2, 3), 0.5), "residual": np.full((2, 3), 0.5)}
WIDE = {**COINS, "accept": np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 1.0]])}

BAD = {
    "sum": (changed("target", (1, 2), 0.5), "target row 1 sums to 1.25"),
    "nan": (changed("target", (1, 2), np.nan), "target row 1 has nan at token 2"),
    "negative": (changed("target", (0, 3), -0.25), "target row 0 has -0.25 at token 3"),
    "all zero": (changed("target", (2, 0), 0.0), "target row 2 is all zero"),
    "law nan": (changed("laws", (0, 1), np.inf), "laws row 0 has inf at token 1"),
    "short law": (
        {**arrays(), "laws": np.eye(4)[[2, 2, 2]]},
        "laws row 0 gives weight to 1 tokens, fewer than the row's 2 active children",
    ),
    "duplicate": (changed("tokens", (2,), 0), "row 2: drafted token 0 repeats its sibling row 1 under row 0"),
    "minus one": (changed("tokens", (2,), -1), "row 2"),
    "outside": (changed("tokens", (2,), 4), "row 2: drafted token 4 is outside the vocabulary; allowed: 0..3"),
    "coin": ({**arrays(), **WIDE}, "accept coin of walk 1, row 2 is 1.0; allowed: [0, 1)"),
    "one kind of coins": ({**arrays(), "accept": COINS["accept"]}, "expected both arrays, accept and residual"),
    "cycle": ({**arrays(), "parents": np.array([-1, 2, 1])}, "cycle: rows 1 -> 2 -> 1"),
    "unknown": ({**arrays(), "logits": np.zeros(3)}, "missing or unknown arrays: logits"),
    "missing": ({k: v for k, v in arrays().items() if k != "target"}, "missing or unknown arrays: target"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_steps_exit_2_with_row_and_value(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    made, message = BAD[name]
    np.savez("step.npz", **made)
    assert run(*QUICK, "--step", "step.npz") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "step step.npz: " in error


def test_good_step_from_a_file(folder: Path) -> None:
    made = arrays()
    np.savez("mine.npz", **made, **COINS)
    assert run(*QUICK, "--step", "mine.npz", "--report", "out") == 0
    report = from_json(json.loads((folder / "out/report.json").read_text()))
    assert [c.id for c in report.checks if c.id.startswith("walks.")] == ["walks.mine"]


def test_samplers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samplers"]) == 0
    assert {"multi-round", "naive", "greedy", "traversal", "sglang-greedy"} <= set(capsys.readouterr().out.split())


# Which suites `check` runs


def suites(*words: str) -> tuple[str, ...]:
    return cli._suites(cli.parser().parse_args(["check", *words]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("component", "sampler", "continuation")),
        (("--backend", "triton"), ("component", "sampler")),
        (("--backend", "mine:It"), ("component",)),
        (("--shape", "micro"), ("component",)),
        (("--only", "case"), ("component",)),
        (("--graph", "--device", "cuda"), ("component",)),
        (("--suite", "component"), ("component",)),
        (("--suite", "sampler", "--shape", "micro"), ("sampler",)),
        (("--suite", "all", "--shape", "micro", "--backend", "mine:It"), ("component", "sampler", "continuation")),
        (("--suite", "continuation", "--device", "cuda"), ("continuation",)),
    ],
)
def test_which_suites_run(words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert suites(*words) == expected


def test_the_sampler_suite_is_not_run_in_the_name_of_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--backend", "reference", "--suite", "sampler"]) == 2
    assert "would not touch --backend reference" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["sampler", "continuation", "all"])
def test_only_belongs_to_the_component_suite(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--suite", suite, "--only", "case"]) == 2
    assert "belong to the component suite" in capsys.readouterr().err


@pytest.mark.parametrize(("codes", "worst"), [((0, 0), 0), ((0, 3), 3), ((3, 1), 1), ((1, 0), 1), ((0,), 0)])
def test_codes_combine(codes: tuple[int, ...], worst: int) -> None:
    assert cli._worst(codes) == worst


def test_check_runs_the_sampler_suite_on_the_default_rule(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[sampler.Options] = []
    real = sampler.check

    def small(options: sampler.Options) -> sampler.Run:
        asked.append(options)
        return real(sampler.Options(vocab=32, walks=8_000, min_visits=20, workers=0, only=("flat-fixed",)))

    monkeypatch.setattr(sampler, "check", small)
    monkeypatch.setattr(cli, "_audit", lambda args, command: 3)
    monkeypatch.setattr(cli.continuation_cli, "check", lambda args, command, nested: 0)
    assert cli.main(["check", "--suite", "all", "--seed", "5", "--report", "out"]) == 3
    assert (asked[0].sampler, asked[0].seed, asked[0].walks) == ("multi-round", 5, 200_000)
    report = from_json(json.loads((folder / "out/sampler/report.json").read_text()))
    assert isinstance(report, Report)
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS")
    assert cli.main(["check", "--suite", "sampler", "--report", "alone"]) == 0
    assert (folder / "alone/report.json").exists()
