"""When replay pays: the model on numbers counted by hand, the break-even of made-up points, a run on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audit import bench_replay_run
from audit.bench_replay import Match, Measured, Model, Point, table
from audit.bench_replay_run import Setup, measure, run_replay, setup
from audit.bench_time import Ceilings, Clock
from audit.cli import main
from audit.families import DIMS_MICRO
from audit.render.replay import best_replay, break_even_table, extras, markdown, pays_from, picture, sentence
from lumotree.backends import loader
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import DIMS_27B
from lumotree.errors import InputError

#: A state takes 1 ms to move, a row 0.1, a factor 0.01.
MODEL = Model(state=1000, row=100, factor=10, bytes_s=1e6, step=0.5, walk_step=0.25)


def test_bytes_of_a_model_are_counted_by_hand() -> None:
    model = Model.of(replace(DIMS_27B, layers=48), 4e12)
    assert model.state == 48 * 3 * 2**20
    assert model.row == 48 * 2 * (16 * 128 + 48 * 128 + 2 * 48)
    assert model.factor == 48 * 48 * 4 * (128 + 128 + 1)


def test_times_are_bytes_and_steps() -> None:
    assert MODEL.replay_ms(4) == pytest.approx(2 + 0.4 + 2.0)
    assert MODEL.replay_ms(4, 3) == pytest.approx(3 * 4.4)
    assert MODEL.copy_ms() == 2.0 and MODEL.copy_ms(4) == 8.0
    assert MODEL.bank_ms(4) == 7.0 and MODEL.walk_ms(4) == 8.0 + 1.0 and MODEL.walk_ms(4, 2) == 16.0 + 1.0
    assert MODEL.deferred_ms(5) == pytest.approx(1.1)


def test_steps_are_what_bytes_leave_of_a_measurement() -> None:
    assert MODEL.fitted_step({1: 3.0, 5: 7.0, 3: 99.0}) == pytest.approx(1.0 - 0.1)
    assert MODEL.fitted_step({1: 3.0}) == 0.0 and MODEL.fitted_step({1: 7.0, 5: 3.0}) == 0.0
    assert MODEL.fitted_walk_step(4, 10.0) == pytest.approx(0.5) and MODEL.fitted_walk_step(4, 1.0) == 0.0


def test_the_break_even_tree_is_the_smallest_that_costs_as_much() -> None:
    for replay_ms, trees in ((3.0, 1), (5.0, 2), (7.0, 3), (11.0, 5)):
        assert MODEL.break_even(replay_ms) == trees == MODEL.break_even(4 * replay_ms, 4)
        assert MODEL.copy_ms() + MODEL.bank_ms(trees) >= replay_ms
        assert trees == 1 or MODEL.copy_ms() + MODEL.bank_ms(trees - 1) < replay_ms
    assert table(MODEL, {9: 11.0}, [4])[2] == "| 9 | 11 | 2 | 1.18 | 7 | 9 rows |"


def point(policy: str, backend: str, what: str, ms: float, **more: Any) -> Point:
    known = {"tree": "hydra27", "rows": 28, "depth": 12, "batch": 1, "accepted": 0, **more}
    return Point(policy, backend, what, clock=Clock(ms, ms, ms), **known)


def measured(small: float = 9.0) -> Measured:
    """Replay of twelve rows takes 6 ms more than a copy; a bank adds 1 ms to eight rows and `small` to twenty-eight."""
    points = [
        point("replay", "fast", "publish", 3.0, accepted=1, modelled=2.6),
        point("replay", "fast", "publish", 8.0, accepted=12, modelled=9.2),
        point("replay", "fast", "verify", 1.0), point("replay", "slow", "verify", 90.0),
        point("replay", "slow", "publish", 1.0, accepted=1, modelled=2.6),
        point("bank", "kept", "publish", 2.0, accepted=1, modelled=2.0),
        point("bank", "kept", "publish", 2.0, accepted=12, modelled=2.0),
        point("bank", "kept", "verify", 1.0 + small, modelled=63.0),
        point("replay", "fast", "verify", 0.5, tree="star:8", rows=8, depth=2),
        point("bank", "kept", "verify", 1.5, tree="star:8", rows=8, depth=2, modelled=18.0),
        point("deferred", "later", "publish", 0.1, accepted=12),
        point("deferred", "later", "update", 4.0, accepted=12, modelled=1.24),
    ]  # fmt: skip
    matches = {"fast": Match(True, 0.0), "later": Match(False, 1e-7)}
    return Measured(tuple(points), matches, {"gone": "expected a card"}, {"fast": MODEL, "slow": MODEL})


def test_the_best_backend_is_best_where_all_were_timed() -> None:
    assert best_replay(measured()) == "fast"
    assert best_replay(Measured((), {}, {}, {"": MODEL})) == ""


def test_what_a_bank_adds_is_its_walk_less_the_other_verification() -> None:
    assert [(e.tree, e.measured, e.modelled) for e in extras(measured())] == [
        ("star:8", 1.0, 15.0), ("hydra27", 9.0, 55.0),
    ]  # fmt: skip
    assert measured().points[0].error == pytest.approx(2.6 / 3.0 - 1)


def test_the_measured_break_even_is_behind_the_last_tree_that_costs_too_little() -> None:
    assert pays_from(measured(), 0.5) == (8, 8) and pays_from(measured(), 6.0) == (28, 8)
    assert pays_from(measured(), 10.0) == (None, 8)
    assert pays_from(measured(small=0.5), 0.75) == (None, 8)


def test_a_sentence_says_where_replay_pays() -> None:
    start = "replay of 12 rows (fast) takes 6 ms more than the bank's copy"
    assert sentence(measured()) == f"{start}: it pays from 28 rows (smallest measured 8); modelled from 12 rows"
    assert sentence(measured(small=5.0)).startswith(f"{start}, and no measured tree costs the bank that much")
    assert sentence(Measured((), {}, {}, {"": MODEL})).startswith("no break-even")
    cheap = [replace(p, clock=Clock(1, 1, 1)) if p.policy == "replay" and p.what == "publish" else p
             for p in measured().points]  # fmt: skip
    assert "takes 1 ms less than the bank's copy: it pays for every measured tree" in sentence(
        replace(measured(), points=tuple(cheap))
    )


def test_tables_hold_measurement_model_and_error() -> None:
    rows = break_even_table(measured())
    assert rows[3] == "| 1 | 12 | 8 | 2 | +6 | 0.1 | 4 | 1.24 | 28 rows | 12 rows |"
    text = markdown(measured(), {"date": "today"})
    assert "| star:8 | 8 | 2 | 1 | 1.5 | 18 | +1100% | 0.5 | 1 | 15 | +1400% |" in text
    assert "| replay | fast | publish | 1 | 12 | 8 | 8-8 | 9.2 | +15% |" in text
    assert "* no time for gone: expected a card" in text and "* later: relative L2 1e-07" in text


def test_the_picture_holds_every_measured_point() -> None:
    drawn = picture(measured())
    assert drawn.count("<circle") == 6 + 2  # publications and updates, marking left out; two trees
    for title in ("fast publish, 12 rows, batch 1: 8 ms", "later update, 12 rows, batch 1: 4 ms",
                  "star:8, depth 2, batch 1: 1 ms", "hydra27, depth 12, batch 1: 9 ms"):  # fmt: skip
        assert f"<title>{title}</title>" in drawn
    assert "replay of 12 rows, less the copy" in drawn and "pays from 28 rows" in drawn
    assert "<circle" not in picture(Measured((), {}, {}, {"": MODEL}))


class Lossy(TorchBackend):
    """Claims to be bitwise and publishes something else."""

    name = "lossy"

    def gdn_publish(self, pool: torch.Tensor, *rest: Any) -> None:
        super().gdn_publish(pool, *rest)
        pool *= 1.5


MICRO = Setup(replace(DIMS_MICRO, layers=2), ("torch",), "bank", ("specla",), (1, 2), (1, 3), "mtp5", ("chain:4",))


def test_a_run_times_every_policy_at_every_batch_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_replay_run, "setup", lambda *_: MICRO)
    monkeypatch.setattr(bench_replay_run, "measure_ceilings", lambda device: Ceilings(1e10, 1e11))
    assert run_replay("cpu", repeat=2, report=str(tmp_path)) == 0
    data = json.loads((tmp_path / "replay.json").read_text())
    kinds = [(p["policy"], p["what"]) for p in data["points"]]
    counts = {k: kinds.count(k) for k in set(kinds)}
    assert counts == {
        ("replay", "verify"): 3, ("bank", "verify"): 3, ("replay", "publish"): 4, ("bank", "publish"): 4,
        ("deferred", "publish"): 4, ("deferred", "update"): 4,
    }  # fmt: skip
    assert all(p["clock"]["median"] > 0 for p in data["points"])
    assert data["matches"]["torch"] == {"bitwise": True, "distance": 0.0} == data["matches"]["bank"]
    assert not data["matches"]["specla"]["bitwise"] and 0 < data["matches"]["specla"]["distance"] < 1e-5
    assert (tmp_path / "replay.md").read_text().startswith("# When does replay pay?")
    assert (tmp_path / "replay.svg").read_text().count("<circle") == 4 + 4 + 4 + 3


def test_a_backend_that_is_not_its_own_chain_or_is_not_there_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_replay_run, "load_backend", lambda n: Lossy() if n == "lossy" else loader.load_backend(n))
    found = measure(replace(MICRO, replay=("lossy", "nobody"), batches=(1,), deferred=()), "cpu", 1e10, 1)
    assert {p.backend for p in found.points} == {"bank"}
    assert (
        "expected a published state equal to the backend's own chain, got a relative L2 of 0." in found.refused["lossy"]
    )
    assert "'nobody' is unknown" in found.refused["nobody"] and found.models[""].step == 0.0


def test_the_card_gets_its_kernels_and_the_cpu_its_own() -> None:
    gpu, cpu = setup("cuda", None, None), setup("cpu", None, None)
    assert gpu.replay == ("cuda", "triton") and gpu.bank == "bank_walk" and gpu.dims.layers == 48
    assert {"chain:8", "hydra27", "star:128"} <= set(gpu.trees) and gpu.batches == (1, 4, 16)
    assert cpu.replay == ("torch",) and cpu.dims.name == "tiny"
    with pytest.raises(InputError, match="--shape: expected one of 27B, tiny, micro, got 'huge'"):
        setup("cpu", "huge", None)


def test_bad_input_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--shape", "huge"], "--shape: expected one of"),
        (["--device", "tpu9"], "--device: expected"),
        (["--backends", "torch"], "--replay: expected neither --backends nor --batch"),
        (["--batch", "4"], "--replay: expected neither --backends nor --batch"),
    ):
        assert main(["bench", "--replay", *words]) == 2
        assert message in capsys.readouterr().err
