"""The suite around the cases: calibrate, check, the envelope rung, what refuses and what casts doubt."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit import suite
from audit.families import SHAPES, micro_cases
from audit.runner import default_workers, run_cases
from audit.suite import Options
from lumotree.errors import BackendError, EnvelopeError, InputError

INSTANCES = 14

KERNEL = '''
import torch
from lumotree.backends.reference import ReferenceBackend, RowMath
from lumotree.reference.gdn import gdn_step

def step(R, row, contract):
    """Everything agrees with everything, but the state loses its lowest {bits} bits at each row."""
    state, out = gdn_step(R, row, contract)
    state.view(torch.int32).bitwise_and_(-(1 << {bits}))
    return state, out

def kernel():
    return ReferenceBackend(math=RowMath(gdn_step=step))
'''


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the small cases only those that carry controls and the longest memory."""

    def chosen(split: str, seed: int) -> list[Any]:
        return [s for s in micro_cases(split, seed) if s.id.endswith(("/size/9", "/near_one", "/odd"))]

    monkeypatch.setattr("audit.families.micro_cases", chosen)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def options(backend: str = "torch", **changes: Any) -> Options:
    defaults = {"shape": "micro", "sets": 1, "instances": INSTANCES, "workers": 0, "envelope": "env.json"}
    return Options(backend=backend, **(defaults | changes))


def envelope_of(factory: pytest.TempPathFactory, **changes: Any) -> dict[str, Any]:
    path = factory.mktemp("calibrated") / "env.json"
    assert suite.calibrate(options(envelope=str(path), **changes)).report.verdict == "PASS"
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Too few units for power."""
    return envelope_of(tmp_path_factory, instances=2)


@pytest.fixture(scope="module")
def powerful(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return envelope_of(tmp_path_factory)


def by_status(report: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for check in report.checks:
        found.setdefault(check.status, set()).add(check.id)
    return found


def test_a_kernel_that_got_worse_within_every_bound_fails_the_envelope_and_nothing_else(
    few: None, folder: Path
) -> None:
    (folder / "worse.py").write_text(KERNEL.format(bits=0))
    made = suite.calibrate(options("worse:kernel"))
    assert made.report.verdict == "PASS" and (folder / "env.json").exists()
    same = suite.check(options("worse:kernel"))
    assert same.report.verdict == "PASS", same.report.reasons

    (folder / "worse.py").write_text(KERNEL.format(bits=3))
    del sys.modules["worse"]
    degraded = suite.check(options("worse:kernel")).report
    assert degraded.verdict == "FAIL"
    failed = by_status(degraded)["fail"]
    assert "envelope.gdn.state.mean" in failed and all(i.startswith("envelope.gdn.state.") for i in failed)
    line = next(c for c in degraded.checks if c.id == "envelope.gdn.state.mean")
    assert line.worst_ratio > 3 and f"{INSTANCES} of {INSTANCES} units above the bound" in line.note


def test_calibration_that_fails_writes_no_envelope(few: None, folder: Path) -> None:
    (folder / "wrong.py").write_text(KERNEL.format(bits=12))
    run = suite.calibrate(options("wrong:kernel", instances=2))
    assert run.report.verdict == "FAIL" and run.report.envelope is None
    assert any("not written" in w for w in run.report.warnings)
    assert [p.name for p in folder.iterdir() if p.suffix == ".json"] == []


def test_calibration_of_a_kernel_that_writes_nothing_is_a_fail_with_findings(few: None, folder: Path) -> None:
    (folder / "rebinds.py").write_text(
        "from dataclasses import replace\n"
        "from lumotree.backends.torch_backend import TorchBackend\n\n"
        "class Kernel(TorchBackend):\n"
        "    def conv_verify(self, ops, pool, batch, ws, out, layer):\n"
        "        super().conv_verify(ops, pool, batch, ws, out.clone(), layer)\n\n"
        "    def native_step(self, ops, pools, batch, out, layer):\n"
        "        super().native_step(ops, pools, batch, replace(out, conv=out.conv.clone()), layer)\n"
    )
    run = suite.calibrate(options("rebinds:Kernel", instances=2))
    assert run.report.verdict == "FAIL" and any(f.check.startswith("conv.") for f in run.report.findings)
    assert "lumotree-audit diagnose --backend rebinds:Kernel" in run.report.warnings[-1]


def test_an_envelope_without_power_is_inconclusive(few: None, folder: Path, calibrated: dict[str, Any]) -> None:
    (folder / "env.json").write_text(json.dumps(calibrated))
    report = suite.check(options(instances=2)).report
    assert report.verdict == "INCONCLUSIVE"
    assert {i.partition(".")[0] for i in by_status(report)["inconclusive"]} == {"envelope"}
    assert any("no power" in r for r in report.reasons)


def test_inputs_that_forget_make_the_run_inconclusive(
    folder: Path, monkeypatch: pytest.MonkeyPatch, few: None, powerful: dict[str, Any]
) -> None:
    def forgetful(*args: Any, **kwargs: Any) -> list[Any]:
        deep = [s for s in micro_cases("heldout", 1) if s.id.endswith("/odd")]
        return [replace(s, regime="near_zero", control=True, trees=("chain:8",), inactive_fraction=0.0) for s in deep]

    (folder / "env.json").write_text(json.dumps(powerful))
    monkeypatch.setattr(suite, "family", forgetful)
    report = suite.check(options()).report
    assert report.verdict == "INCONCLUSIVE"
    assert any("memory horizon too short" in r for r in report.reasons)
    assert not by_status(report).get("fail")


def test_zero_cases_are_inconclusive(
    folder: Path, monkeypatch: pytest.MonkeyPatch, few: None, powerful: dict[str, Any]
) -> None:
    (folder / "env.json").write_text(json.dumps(powerful))
    monkeypatch.setattr(suite, "family", lambda *args, **kwargs: [])
    report = suite.check(options()).report
    assert report.verdict == "INCONCLUSIVE" and report.exit_code == 3
    assert "zero cells judged" in report.reasons
    assert any("constant" in r for r in report.reasons)


PARTIAL = """
from lumotree.backends.torch_backend import TorchBackend

class Partial(TorchBackend):
    conv_verify = conv_publish = attention_verify = kv_publish = None
"""


def test_a_partial_backend_is_reported_as_partial_and_judged_on_what_it_has(few: None, folder: Path) -> None:
    (folder / "part.py").write_text(PARTIAL)
    suite.calibrate(options("part:Partial"))
    report = suite.check(options("part:Partial")).report
    assert report.verdict == "PASS", report.reasons
    assert report.coverage == {"gdn": "covered", "conv": "not covered", "attention": "not covered"}
    assert {c.surface for c in report.checks} == {"gdn"}
    assert {c.fault.rpartition(".")[2] for c in report.controls} == {"gdn"}


CONSTANT = """
from lumotree.backends.torch_backend import TorchBackend

class Zero(TorchBackend):
    def conv_verify(self, ops, pool, batch, ws, out, layer):
        super().conv_verify(ops, pool, batch, ws, out, layer)
        out[batch.active] = 0

class Chain(TorchBackend):
    def __init__(self):
        from lumotree.contract import Contract
        super().__init__(Contract(trees=False))
"""


def test_constant_outputs_are_among_the_reasons(few: None, folder: Path) -> None:
    (folder / "const.py").write_text(CONSTANT)
    only = ("micro/heldout/size/9", "micro/heldout/odd")
    report = suite.check(options("const:Zero", only=only)).report
    assert report.verdict == "FAIL"
    assert "outputs of conv are constant in every case" in report.reasons


def test_units_are_drawn_on_a_tree_that_the_contract_takes(few: None, folder: Path) -> None:
    (folder / "const.py").write_text(CONSTANT)
    run = suite.calibrate(options("const:Chain"))
    assert "micro mtp5" in run.report.suite


def test_a_contract_that_takes_no_tree_at_all_is_refused(folder: Path) -> None:
    (folder / "one.py").write_text(
        "from lumotree.backends.torch_backend import TorchBackend\nfrom lumotree.contract import Contract\n"
        "def One():\n    return TorchBackend(Contract(max_rows=1))\n"
    )
    with pytest.raises(InputError, match="expected max_rows >= 2"):
        suite.calibrate(options("one:One"))
    assert not (folder / "env.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, ""),
        ({"contract": {"beta": "bf16"}}, "contract beta"),
        ({"shape": "tiny"}, "shape"),
        ({"code_sha256": "0" * 64}, "code_sha256"),
        ({"backend": "reference"}, "backend"),
        ({"arm": "verify"}, "arm"),
        ({"trees": ["hydra27"]}, "trees"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_an_envelope_made_for_something_else_is_refused_with_the_field(
    change: dict[str, Any], message: str, few: None, folder: Path, calibrated: dict[str, Any]
) -> None:
    from audit.envelope_file import _payload_sha256

    data = {**calibrated, **{k: v for k, v in change.items() if k != "contract"}}
    data["contract"] = {**data["contract"], **change.get("contract", {})}
    del data["sha256"]
    (folder / "env.json").write_text(json.dumps({**data, "sha256": _payload_sha256(data)}))
    if not message:
        assert suite._load_envelope(options(), suite.load_backend("torch"), SHAPES["micro"])[0].path == "env.json"
        return
    remedy = "name this backend's own" if {"shape", "backend"} & change.keys() else "recalibrate"
    with pytest.raises(EnvelopeError, match=rf"env.json: expected {message}.*{remedy}"):
        suite.check(options())


def test_another_processor_warns(
    few: None, folder: Path, calibrated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "env.json").write_text(json.dumps(calibrated))
    here = suite.environment_on("cpu")
    monkeypatch.setattr(suite, "environment_on", lambda device: {**here, "processor": "another one"})
    _, _, warnings = suite._load_envelope(options(), suite.load_backend("torch"), SHAPES["micro"])
    assert any("processor" in w and "another one" in w for w in warnings)


def test_a_changed_backend_source_warns(
    few: None, folder: Path, calibrated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "env.json").write_text(json.dumps(calibrated))
    monkeypatch.setattr(suite, "object_sha256", lambda backend: "f" * 64)
    _, _, warnings = suite._load_envelope(options(), suite.load_backend("torch"), SHAPES["micro"])
    assert any("source of backend torch changed" in w for w in warnings)


def test_every_module_that_judges_is_in_the_code_hash() -> None:
    import audit
    from audit.environment import JUDGING_CODE

    root = Path(audit.__file__).parent
    names = {f"audit/{p.name}" for p in root.glob("*.py")}
    hashed = {n for n in names for pattern in JUDGING_CODE if Path(n).match(pattern)}
    assert {f"audit/{n}.py" for n in ("cases", "operands", "families", "stage", "judge", "truth", "native")} <= hashed


@pytest.mark.parametrize(
    ("device", "message"),
    [("warp", "expected a torch device"), ("meta", "expected cpu or cuda"), ("cuda", "found none")],
)
def test_a_device_that_is_not_there_is_refused(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    suite.check_device("cpu")
    with pytest.raises(InputError, match=message):
        suite.check_device(device)


def test_default_paths_and_arms() -> None:
    assert str(suite.default_envelope(options(envelope=None), SHAPES["micro"])) == "envelopes/torch-micro.json"
    there = suite.default_envelope(options("pkg.mod:Kernel", envelope=None, device="cuda"), SHAPES["tiny"])
    assert str(there) == "envelopes/pkg-mod-Kernel-tiny-gpu.json"
    assert suite.arm_of(suite.load_backend("torch")) == "native" and suite.arm_of(suite.load_backend("wy")) == "verify"
    assert suite.shape_of(Options(), suite.load_backend("torch")).name == "27B"


def test_the_reproduction_command_carries_all_that_chooses_the_case() -> None:
    command = suite._reproduce(options("my mod:K", seed=9, device="cuda", graph=True, sets=3, instances=60))
    assert command == (
        "lumotree-audit check --backend 'my mod:K' --seed 9 --shape micro --sets 3 --instances 60 --device cuda "
        "--graph --only {case}"
    )


def test_worker_processes_give_the_same_results_in_the_same_order() -> None:
    specs = [s for s in micro_cases("heldout", 1) if "/named/" in s.id]
    inline, pooled = (run_cases("torch", specs, workers=n) for n in (0, 2))
    assert [r.spec.id for r in pooled] == [s.id for s in specs]
    assert [r.tallies for r in inline] == [r.tallies for r in pooled]
    assert default_workers("cuda") == 0 and 1 <= default_workers("cpu") <= 4


def test_a_worker_that_dies_is_the_backends_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "dies.py").write_text(
        "import os\nfrom lumotree.backends.torch_backend import TorchBackend\n"
        "class Dies(TorchBackend):\n    def native_step(self, ops, pools, batch, out, layer):\n        os._exit(1)\n"
    )
    specs = [s for s in micro_cases("heldout", 1) if "/named/" in s.id][:2]
    with pytest.raises(BackendError, match=r"'dies:Dies': a worker process died.*--workers 0"):
        run_cases("dies:Dies", specs, workers=1)
