"""The comparison of the fused convolution: bits first, floors counted by hand, no speed where bits differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audit import bench_conv
from audit.bench_conv import Line, Publication, Verification, batches, main, table
from audit.bench_scene import Scene
from audit.bench_time import Ceilings, Clock, Work, clock
from audit.families import DIMS_MICRO
from lumotree.errors import InputError
from lumotree.verifier.kernels import fused_conv

DIMS = replace(DIMS_MICRO, layers=2, conv_channels=52)
CPU = torch.device("cpu")


def test_the_command_compares_bits_and_gives_no_speed_under_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layers", "1", "--tree", "mtp5", "--batches", "2", "--accepted", "3", "--report", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "bits are compared, a speed would be the interpreter's" in printed
    data = json.loads((tmp_path / "bench-conv.json").read_text())
    assert [(x["what"], x["batch"], x["differing"], x["fused"]) for x in data["lines"]] == [
        ("verify", 2, 0, None), ("publish", 2, 0, None),
    ]  # fmt: skip
    assert all(x["compared"] > 0 for x in data["lines"])


def test_other_bits_are_counted_and_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def swapped(ops: Any, pool: Any, batch: Any, recorded: Any, parts: Any, layer: int) -> None:
        own(ops, pool, batch, recorded, (parts[1], parts[0], parts[2]), layer)

    own = fused_conv.verify
    monkeypatch.setattr(fused_conv, "verify", swapped)
    monkeypatch.setattr(bench_conv, "INTERPRETED", False)  # what differs is not timed on a GPU either
    monkeypatch.setattr(bench_conv, "clock", lambda *_, **__: Clock(2.0, 1.0, 3.0))
    monkeypatch.setattr(bench_conv, "measure_ceilings", lambda device: Ceilings(1e9, 1e9))
    assert main(["--layers", "1", "--tree", "chain:2", "--batches", "1", "--accepted", "1"]) == 1
    verify, publish = capsys.readouterr().out.splitlines()[-2:]
    assert verify.split()[2] != "0" and verify.split()[5:8] == ["-", "-", "-"]
    assert publish.split()[2] == "0" and publish.split()[5:8] == ["2.0000", "2.0000", "1.00"]


def test_floors_are_what_a_hand_count_gives() -> None:
    scene = Scene(DIMS, "hydra27", 2, CPU)
    # 28 active rows a request: x, three parts and the record once; 52 channels of four taps, of three old inputs.
    rows = 2 * 28
    assert Verification(scene).work() == Work(2 * 2 * 52 * (3 * rows + 4 + 2 * 3), 2 * rows * 52 * 12)
    # One attention layer of 16 channels; two requests, three accepted rows, read and written.
    assert Publication(scene, 3).work() == Work(2 * 2 * (2 * (2 * 52 * 3) + 2 * (2 * 3 * 16)), 0)


def test_a_table_line_says_speed_up_and_distance_to_the_floor() -> None:
    line = Line("verify", 4, 100, 0, Work(2_000_000, 0), Clock(0.3, 0.3, 0.3), Clock(0.1, 0.1, 0.1))
    text = table([line], Ceilings(4e10, 1e9)).splitlines()[1]
    assert text.split() == ["verify", "4", "0", "of", "100", "0.3000", "0.1000", "3.00", "2.00", "0.0500", "2.00"]


def test_a_clock_of_calls_runs_warm_ups_first() -> None:
    calls: list[int] = []
    found = clock(lambda: calls.append(1), "cpu", 5, graph=True)
    assert len(calls) == 1 + 3 + 5 and 0 <= found.low <= found.median <= found.high


def test_a_scene_is_the_same_every_time_and_its_requests_lie_apart() -> None:
    a, b = (Scene(DIMS, "mtp5", 3, CPU) for _ in range(2))
    assert torch.equal(a.gdn[1].k, b.gdn[1].k) and torch.equal(a.conv[1].x, b.conv[1].x)
    assert not torch.equal(a.gdn[0].k, a.gdn[1].k)
    assert torch.equal(a.cache(1).k, a.cache(1).k) and a.cache(1).k.shape[1] > int(a.batch.row_slot.max())
    pages = a.batch.page_table.flatten().tolist() + sorted({int(s) // 16 for s in a.batch.row_slot})
    assert len(pages) == len(set(pages)) and len(set(a.batch.state_slot.tolist())) == 3
    assert a.accepted(2).rows[:, :3].tolist() == [[0, 1, -1]] * 3


def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="expected at most 2, the deepest path of chain:2, got 3; take fewer"):
        Scene(DIMS, "chain:2", 1, CPU).accepted(3)
    for text in ("", "1,", "0", "1,x"):
        with pytest.raises(InputError, match="--batches: expected positive integers between commas"):
            batches(text)
    for words, message in (
        (["--shape", "huge"], "--shape: expected one of 27B, tiny, micro"),
        (["--tree", "bush"], "unknown tree 'bush'"),
        (["--tree", "chain:2", "--accepted", "3", "--batches", "1", "--layers", "1"], "the deepest path of chain:2"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
