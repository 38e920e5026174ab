"""The bench: no speed without an audit, accuracy beside every time, floors that can be counted by hand."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audit import bench
from audit.bench import Options, run_bench
from audit.bench_render import Outcome, columns, markdown, picture, replay_section, verdict
from audit.bench_time import Ceilings, Clock, Timed, Work, measure_ceilings
from audit.cases import Case
from audit.cli import main
from audit.families import SHAPES, units
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import ContractError, InputError


class Refusing(TorchBackend):
    """Says no to every case."""

    def gdn_verify(self, *_: object) -> None:
        raise ContractError("expected another shape")


class Interpreted(TorchBackend):
    """Claims to run under an interpreter."""

    interpreted = True


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    here = f"{__name__}:"
    names = ("torch", "treewy_tf32", here + "Refusing", here + "Interpreted")
    found = {here + "Refusing": Refusing(), here + "Interpreted": Interpreted()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "load_backend", lambda name: found[name] if name in found else LOAD(name))
        patch.setattr(bench, "measure_ceilings", lambda device: Ceilings(1e10, 1e11))
        assert run_bench(Options(names, "micro", repeat=2, batch=2, report=str(folder))) == 0
    return folder


LOAD = bench.load_backend


def outcomes(folder: Path) -> dict[str, dict[str, object]]:
    data = json.loads((folder / "bench.json").read_text())
    return {o["backend"].rpartition(":")[2]: o for o in data["outcomes"]}


def test_every_time_stands_beside_its_accuracy(written: Path) -> None:
    found = outcomes(written)
    ours, rounded = found["torch"], found["treewy_tf32"]
    assert ours["outside"] == 0 and ours["bitwise"] == 1.0 and 0 < ours["worst"] <= 1
    assert rounded["outside"] > 0 and rounded["worst"] > 1 and rounded["bitwise"] < 1
    for o in (ours, rounded):
        assert o["verify"]["median"] > 0 and o["publish"]["median"] > 0 and o["floors"][0] > 0
        assert o["mode"] == "eager" and o["batch"] == 2 and sum(o["buffers"].values()) > 0
        assert set(o["publish_by_length"]) == {"1", "2", "3"}


def test_no_speed_without_an_audit_or_under_an_interpreter(written: Path) -> None:
    found = outcomes(written)
    assert found["Refusing"]["verify"] is None and "expected another shape" in found["Refusing"]["refused"]
    assert found["Interpreted"]["verify"] is None and "interpreter" in found["Interpreted"]["refused"]
    assert found["Interpreted"]["cells"] > 0
    text = (written / "bench.md").read_text()
    assert text.startswith("# fastest bitwise on binary:2: torch") and "no speed for" in text
    assert (written / "bench.svg").read_text().count("<circle") == 2


def test_floors_are_what_a_hand_count_gives() -> None:
    spec = replace(units(SHAPES["micro"], "heldout", 1, sets=1, instances=1)[0], control=False)
    timed = Timed(TorchBackend(), Case(spec, TorchBackend.contract), "cpu")
    verify, publish = timed.work(3)
    state, rows = 3 * 12 * 8, 7  # binary:2 has seven rows, the deepest path three
    row = 2 * (8 + 3 * 12 + 2 * 3)
    assert verify == Work(4 * state + rows * (row + 2 * 8 + 2 * 3 * 12), 7 * rows * state)
    assert publish == Work(8 * state + 3 * row, 5 * 3 * state)
    assert Work(10, 4).floor_ms(Ceilings(1e3, 1e2)) == pytest.approx(40.0)
    assert Work(10, 0).floor_ms(Ceilings(1e3, 1e2)) == pytest.approx(10.0)


def test_a_clock_summarises() -> None:
    assert Clock.of([5.0, 1.0, 3.0]) == Clock(3.0, 1.0, 5.0)


def test_ceilings_are_positive_and_leave_tf32_as_it_was() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found = measure_ceilings("cpu", 1 << 12)
    assert math.isfinite(found.bytes_s) and found.bytes_s > 0 < found.flops_s
    assert torch.backends.cuda.matmul.allow_tf32 == before


def timed_outcome(name: str, ms: float, **more: object) -> Outcome:
    clock = Clock(ms / 2, ms / 2, ms / 2)
    base = Outcome(
        name, claims="bitwise", tree="hydra27", cells=10, worst=0.5, bitwise=1.0, verify=clock, publish=clock,
        work=(Work(1, 1), Work(1, 1)), floors=(0.1, 0.1), mode="eager",
    )  # fmt: skip
    return replace(base, **more)


def test_the_verdict_names_the_fastest_bitwise_one_and_what_the_fastest_costs() -> None:
    ours = timed_outcome("ours", 2.0)
    quick = timed_outcome("quick", 1.0, claims="algebra", outside=4, outside_checks=("gdn.out.derived",), worst=3.0)
    chain = timed_outcome("chain", 0.1, tree="mtp5")
    assert verdict([ours]) == "fastest bitwise on hydra27: ours, 2 ms"
    assert verdict([ours, quick, chain]).endswith("fastest: quick, 1 ms, 4 cells outside")
    assert verdict([quick]) == "no bitwise backend was timed"
    assert verdict([]) == "no bitwise backend was timed"
    drawn = picture([ours, quick])
    assert drawn.count('fill="#fff"') == 1 and ">quick</text>" in drawn
    assert "nothing timed" in picture([Outcome("none", refused="why")])
    assert columns(Outcome("none", refused="why"))[2:] == ["-"] * 10
    assert "* no speed for none: why" in markdown([Outcome("none", refused="why")], {})


def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ON_CPU", ())
    monkeypatch.setattr(bench, "PEERS", ("nobody",))
    (found,) = bench._all(Options(shape="micro"), Ceilings(1.0, 1.0))
    assert found.refused.startswith("not installed: backend 'nobody' is unknown")


def test_bad_input_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "huge"]) == 2
    assert "--shape: expected one of" in capsys.readouterr().err
    with pytest.raises(InputError, match="is unknown"):
        bench._all(Options(("nobody",), "micro"), Ceilings(1.0, 1.0))
    with pytest.raises(SystemExit):
        main(["bench", "--repeat", "0"])


def test_the_report_says_when_replay_pays(written: Path) -> None:
    text = (written / "bench.md").read_text()
    assert "## When does replay pay?" in text and "Replay measured on torch" in text
    bank = timed_outcome("bank", 1.0, publish_by_length={1: 1.0, 2: 1.0}, buffers={"bank": 1})
    assert replay_section([bank], 1e9) == []


def test_labels_of_points_that_lie_together_do_not_overlap() -> None:
    same = Clock(3.0, 3.0, 3.0)
    outcomes = [Outcome(name, worst=0.9, verify=same, publish=same) for name in ("triton", "bank_walk", "cuda")]
    heights = [float(y) for y in re.findall(r'y="([\d.]+)">(?:triton|bank_walk|cuda)<', picture(outcomes))]
    assert len(heights) == 3
    assert min(abs(a - b) for a, b in itertools.combinations(heights, 2)) >= 12
