"""The attention bench: accuracy beside every speed, no speed outside the bound, and a dry run of the whole."""

import json
from pathlib import Path

import pytest
import torch

from audit import bench_attention
from audit.bench_attention import DIMS_DRY, Measured, columns, main, markdown
from audit.bench_attention_rivals import Rival, parse_shape
from audit.bench_attention_work import Plan, Workload, errors
from audit.bench_time import Ceilings, Clock
from lumotree.errors import InputError
from lumotree.verifier.kernels.splitk_launch import DEFAULT

PLAN = Plan(DIMS_DRY, "comb:2", 20, 2, "cpu", 1)
CEILINGS = Ceilings(1e9, 1e9)


def measured(folder: Path) -> dict[str, dict]:
    data = json.loads((folder / "attention.json").read_text())
    return {m["kernel"]: m for m in data["measured"]}


def test_a_dry_run_holds_every_kernel_against_float64_and_ours_against_its_chain(tmp_path: Path) -> None:
    words = ["--dry-run", "--prefixes", "20", "--batches", "1", "--tree", "chain:2", "--probs", "bf16"]
    assert main([*words, "--seconds", "900", "--report", str(tmp_path)]) == 0
    found = measured(tmp_path)
    assert [name.split()[0].rstrip(",") for name in found] == ["split-K", "per", "sdpa", "sdpa", "FlexAttention"]
    for m in found.values():
        assert not m["refused"] and m["accuracy"]["cells"] == 64 and 0 < m["accuracy"]["worst"] <= 1
        assert m["clock"]["median"] > 0 and m["floor_ms"] > 0
    assert [m["chain"] for m in found.values()] == [[2, 2], [2, 2], None, None, None]
    assert "| 20 | 1 | split-K bf16 64/16/16" in (tmp_path / "attention.md").read_text()


def replaced(monkeypatch: pytest.MonkeyPatch, make: object) -> None:
    monkeypatch.setattr(bench_attention, "rivals", lambda *_: [("other", make)])


def test_outputs_outside_the_bound_get_no_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    zeros = torch.zeros((4, 2, 16), dtype=torch.bfloat16)
    replaced(monkeypatch, lambda: Rival("zeros", "bf16", lambda layer: None, lambda: zeros))
    assert main(["--dry-run", "--prefixes", "20", "--batches", "1", "--report", str(tmp_path)]) == 0
    found = measured(tmp_path)["zeros"]
    assert found["clock"] is None and found["accuracy"]["outside"] > 100
    assert "of 128 cells outside the bound" in found["refused"]


def test_a_kernel_that_cannot_run_says_why_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> Rival:
        raise RuntimeError("no such instruction\nand more")

    replaced(monkeypatch, fail)
    words = ["--dry-run", "--prefixes", "20", "--batches", "1,2", "--report", str(tmp_path)]
    assert main(words) == 0
    found = json.loads((tmp_path / "attention.json").read_text())["measured"]
    assert [m["refused"] for m in found] == ["RuntimeError: no such instruction"] * 2
    assert "no speed for other, 20 x 1: RuntimeError" in (tmp_path / "attention.md").read_text()


def test_nothing_starts_when_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(bench_attention.time, "monotonic", lambda: next(clock))
    words = ["--dry-run", "--prefixes", "20", "--batches", "1", "--only", "sdpa", "--seconds", "5"]
    assert main([*words, "--report", str(tmp_path)]) == 0
    assert {m["refused"] for m in measured(tmp_path).values()} == {"no time was left"}


def test_errors_count_cells_outside_and_not_a_number() -> None:
    work = Workload(PLAN)
    truth = {1: work.truth(1, "fp32")}
    out = torch.zeros((8, 2, 16), dtype=torch.bfloat16)
    out[4:] = truth[1].out.to(torch.bfloat16)
    assert errors(work, out, truth)["outside"] == 0
    out[5, 0, 3] = float("nan")
    assert errors(work, out, truth)["outside"] == 1


def test_the_floor_reads_the_prefix_once() -> None:
    work = Workload(PLAN)
    prefix, rows = 2 * 20 * 2 * 16 * 2, 8 * (2 * 2 * 16 * 2 + 2 * 2 * 16 * 2)
    assert work.floor_bytes() == prefix + rows
    assert work.flops() == 2 * 4 * 2 * 16 * (21 + 22 + 22 + 23)


def test_a_rate_is_the_floors_bytes_over_the_time() -> None:
    m = Measured("x", 8, 1, mode="graph", clock=Clock(2.0, 1.0, 3.0), floor_ms=1.0, bytes=10**6, flops=4 * 10**9)
    assert columns(m, CEILINGS)[3:8] == ["2 (1-3)", "2", "0.5", "50%", "2"]
    assert "| 8 | 1 | x | 2 (1-3) |" in markdown([m], {"bytes_s": 1e9, "flops_s": 1e9})


def test_shapes_are_read_from_words() -> None:
    assert parse_shape("") == DEFAULT
    assert parse_shape("split=128,warps=8").split == 128 and parse_shape("warps=8").keys == DEFAULT.keys
    with pytest.raises(InputError, match=r"expected NAME=INTEGER with NAME among keys, programs, .*got 'wraps=8'"):
        parse_shape("wraps=8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--try", "split=x"], "--try: expected NAME=INTEGER"),
        (["--try", "split=100"], "expected split to be a power of two"),
        (["--tree", "oak"], "unknown tree 'oak'"),
        (["--device", "cuda:99"], "cuda"),
    ],
)
def test_bad_input_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--only", "ours,theirs"], ["--probs", "fp64"], ["--prefixes", "8,x"]])
def test_words_that_are_none_of_the_allowed_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
