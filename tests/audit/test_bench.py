"""The bench: no speed without an audit, accuracy beside every time, floors that can be counted by hand."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audit import bench
from audit.bench import Options, run_bench
from audit.bench_render import Outcome, columns, markdown, picture, replay_section, verdict
from audit.bench_time import Ceilings, Clock, Timed, Work, measure_ceilings
from audit.cases import Case
from audit.cli import main
from audit.families import SHAPES, units
from audit.shortage import shortage
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import ContractError, InputError


class Refusing(TorchBackend):
    """Says no to every case."""

    def gdn_verify(self, *_: object) -> None:
        raise ContractError("expected another shape")


FULL = (
    "CUDA out of memory. Tried to allocate 72.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 61.20 GiB is "
    "free. Of the allocated memory 72.00 GiB is allocated by PyTorch."
)


class Hungry(TorchBackend):
    """Has no room for more than one layer."""

    def allocate(self, dims: Any, limits: Any, device: Any) -> Any:
        if limits.layers > 1:
            raise torch.OutOfMemoryError(FULL)
        return super().allocate(dims, limits, device)


class Uncopied(torch.Tensor):
    """May not be copied."""

    def clone(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a second copy of the workspace")


class Banked(TorchBackend):
    """Keeps a bank beside the workspace."""

    def allocate(self, dims: Any, limits: Any, device: Any) -> Any:
        return super().allocate(dims, limits, device), torch.zeros(8).as_subclass(Uncopied)

    def gdn_verify(self, ops: Any, pool: Any, batch: Any, ws: Any, out: Any, layer: int) -> None:
        super().gdn_verify(ops, pool, batch, ws[0], out, layer)

    def gdn_publish(self, pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        super().gdn_publish(pool, batch, accepted, ws[0], layers)


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


def write_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, methods: str = "", more: str = "") -> None:
    """`module:Kernel`: our torch kernel with other methods, and `more` in its class."""
    (folder / f"{module}.py").write_text(
        "from faults import Faulty\nfrom lumotree.backends.torch_backend import TorchBackend\n"
        f"class Kernel(Faulty):\n    def __init__(self):\n        super().__init__(TorchBackend(), {methods})\n{more}"
    )
    monkeypatch.syspath_prepend(str(folder))


def test_a_backend_is_called_what_the_user_called_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nameless = (
        "\n    def __getattr__(self, name):\n"
        "        if name == 'name':\n            raise AttributeError(name)\n"
        "        return super().__getattr__(name)\n"
    )
    write_kernel(tmp_path, monkeypatch, "nameless", more=nameless)
    assert main(["bench", "--shape", "micro", "--backends", "nameless:Kernel", "--repeat", "1"]) == 0
    assert "nameless:Kernel" in capsys.readouterr().out


def test_a_backend_without_what_is_timed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_kernel(tmp_path, monkeypatch, "conv_alone", "gdn_verify=None, gdn_publish=None")
    monkeypatch.setattr(bench, "_one", lambda *args: pytest.fail("timed before all names were looked at"))
    assert main(["bench", "--shape", "micro", "--backends", "torch,conv_alone:Kernel"]) == 2
    assert "conv_alone:Kernel does not verify and publish gdn, which is what bench times" in capsys.readouterr().err
    assert main(["bench", "--shape", "micro", "--backends", "torch,no_such"]) == 2
    assert "backend 'no_such' is unknown" in capsys.readouterr().err


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


def some(monkeypatch: pytest.MonkeyPatch, **backends: object) -> None:
    monkeypatch.setattr(bench, "load_backend", lambda name: backends[name])
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: Ceilings(1e10, 1e11))


def test_a_backend_that_does_not_fit_is_one_line_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some(monkeypatch, hungry=Hungry(), torch=TorchBackend())
    assert run_bench(Options(("hungry", "torch"), "micro", repeat=1, layers=2, report=str(tmp_path))) == 0
    found = outcomes(tmp_path)
    assert found["hungry"]["refused"] == (
        "out of memory: timing 2 layers at --batch 1 needs 72.00 GiB more, the card has 139.80 GiB (61.20 GiB free); "
        "use a smaller --layers or --batch"
    )
    assert found["hungry"]["cells"] > 0 and found["hungry"]["verify"] is None
    assert found["torch"]["layers"] == 2 and found["torch"]["verify"]["median"] > 0
    assert "use a smaller --layers or --batch" in " ".join(capsys.readouterr().out.split())


def test_an_error_that_is_no_shortage_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an invalid access")

    monkeypatch.setattr(bench, "_audit", broken)
    with pytest.raises(RuntimeError, match="an invalid access"):
        bench._one("torch", TorchBackend(), Options(shape="micro"), Ceilings(1.0, 1.0))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(FULL), "needs 72.00 GiB more, the card has 139.80 GiB (61.20 GiB free)"),
        (torch.OutOfMemoryError("no numbers"), "needs more memory, this machine does not give it"),
        (MemoryError("Unable to allocate 3.5 TiB for an array"), "needs 3.5 TiB more, this machine does not give it"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            "needs 8 bytes more, this machine does not give it",
        ),
        (RuntimeError("an invalid access"), ""),
    ],
)
def test_a_shortage_says_what_was_asked_for_and_what_there_is(error: Exception, said: str) -> None:
    assert shortage(error) == said
    try:
        raise ContractError("a backend's method failed") from error
    except ContractError as wrapped:
        assert shortage(wrapped) == said


def test_any_command_that_runs_out_of_memory_exits_with_2_and_names_what_to_make_smaller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(bench, "run_bench", out_of_memory)
    assert main(["bench"]) == 2
    error = capsys.readouterr().err
    assert "bench needs 72.00 GiB more, the card has 139.80 GiB (61.20 GiB free); use a smaller --layers or" in error
    assert "Traceback" not in error


def test_timing_keeps_no_second_copy_of_a_workspace() -> None:
    spec = replace(units(SHAPES["micro"], "heldout", 1, sets=1, instances=1)[0], control=False)
    timed = Timed(Banked(), Case(spec, TorchBackend.contract), "cpu")
    assert timed.clocks(2, 1)[1].median > 0 and timed.named_bytes()["1"] == 32


@pytest.mark.parametrize(("asked", "layers"), [(None, 1), (3, 3)])
def test_a_slow_eager_backend_is_timed_on_less_and_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, layers: int
) -> None:
    monkeypatch.setattr(bench, "SLOW_S", 1e-9)
    monkeypatch.setattr(bench, "_layers", lambda options: 3)
    found = bench._one("slow", TorchBackend(), Options(shape="micro", layers=asked), Ceilings(1e10, 1e11))
    assert (found.layers, found.repeat) == (layers, 2)
    assert found.note.startswith(f"{layers} of 3 layers timed, 2 times: verify and publish take ")
    assert f"| eager, {layers} |" in markdown([found], {}) and f"* slow: {layers} of 3 layers" in markdown([found], {})
    state, path = layers * 3 * 12 * 8, 3
    assert found.state_bytes == 4 * state and found.work is not None and found.work[1].flops == 5 * path * state


def test_a_quick_backend_is_timed_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SLOW_S", 1e9)
    monkeypatch.setattr(bench, "_layers", lambda options: 3)
    found = bench._one("quick", TorchBackend(), Options(shape="micro", repeat=1), Ceilings(1e10, 1e11))
    assert (found.layers, found.repeat, found.note) == (3, 1, "")


def test_times_of_fewer_layers_are_not_compared_with_times_of_all() -> None:
    few, all_ = timed_outcome("few", 1.0, layers=2), timed_outcome("all", 2.0, layers=48)
    assert verdict([few, all_]) == "fastest bitwise on hydra27: all, 2 ms"
    assert ">few (2 layers)</text>" in picture([few, all_]) and ">all</text>" in picture([few, all_])


def test_an_interrupted_run_keeps_what_it_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Interrupted(TorchBackend):
        def gdn_verify(self, *_: object) -> None:
            raise KeyboardInterrupt

    some(monkeypatch, first=TorchBackend(), second=Interrupted(), third=TorchBackend())
    options = Options(("first", "second", "third"), "micro", repeat=1, report=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run_bench(options)
    assert set(outcomes(tmp_path)) == {"first"} and outcomes(tmp_path)["first"]["verify"]["median"] > 0
    text = (tmp_path / "bench.md").read_text()
    assert text.startswith("# Not finished: second, third not run; so far, fastest bitwise on binary:2: first")
    some(monkeypatch, first=TorchBackend(), second=TorchBackend(), third=TorchBackend())
    assert run_bench(options) == 0
    assert (tmp_path / "bench.md").read_text().startswith("# fastest bitwise") and len(outcomes(tmp_path)) == 3
