"""Freezing, files, applicability and judgement of envelopes; every refusal by its message."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit import envelope as e
from audit.environment import code_sha256, environment, git_commit, object_sha256, processor_model
from lumotree.contract import DIMS_27B, DIMS_TINY, Contract
from lumotree.errors import EnvelopeError

N = M = 96
HERE: dict[str, Any] = {"processor": "cpu A", "torch": "2.13.0", "gpu": None}


def make(values: dict[str, Any] | None = None, **changes: Any) -> e.Envelope:
    rng = np.random.default_rng(1)
    arguments: dict[str, Any] = {
        "backend": "torch",
        "contract": Contract(),
        "dims": DIMS_27B,
        "shape": "27B",
        "arm": "verify",
        "trees": ("hydra27",),
        "planned": M,
        "case_sha256": "case",
        "code_sha256": "code",
        "backend_sha256": "backend",
        "seed": 3,
        "environment": HERE,
    }
    drawn = {"out_max": rng.lognormal(size=N), "state_rms": rng.lognormal(size=N)}
    return e.freeze(drawn if values is None else values, **(arguments | changes))


def applies(envelope: e.Envelope, **changes: Any) -> list[str]:
    arguments: dict[str, Any] = {
        "contract": Contract(),
        "dims": DIMS_27B,
        "shape": "27B",
        "backend": "torch",
        "arm": "verify",
        "code_sha256": "code",
        "trees": ["hydra27"],
        "case_sha256": "case",
        "backend_sha256": "backend",
        "environment": HERE,
        "where": "env.json",
    }
    return e.check_applies(envelope, **(arguments | changes))


def rewrite(path: Path, change: Any, rehash: bool = True) -> None:
    """Change the file's data; with `rehash`, forge the hash as well."""
    data = json.loads(path.read_text())
    del data["sha256"]
    change(data)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**data, "sha256": digest if rehash else "0" * 64}))


def test_bound_is_the_order_statistic_and_the_counts_follow() -> None:
    values = {"a": np.arange(96.0), "b": np.arange(96.0)[::-1]}
    env = make(values, order=3)
    alpha = e.ALPHA_FAMILY / 2
    for stat in env.statistics.values():
        assert (stat.bound, stat.order, stat.n) == (93.0, 3, 96)
        assert stat.allowed == e.allowed_exceedances(96, 96, alpha, 3)
    assert env.statistics["a"].values_sha256 != env.statistics["b"].values_sha256
    assert "at most 1e-06" in env.guarantee
    assert "probability 0.99" in env.guarantee


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "at least one statistic"),
        ({"a": []}, "finite calibration values for a, got no value"),
        ({"a": [1.0, np.nan]}, "got nan in unit 1 of 2"),
        ({"a": [np.inf]}, "got inf in unit 0 of 1"),
        ({"a": [-1.0]}, "distances >= 0 for a, got -1.0"),
        ({"a": [[1.0]]}, r"one value per unit \[m\] for a, got shape \[1, 1\]"),
    ],
)
def test_freeze_refuses_what_is_no_calibration(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvelopeError, match=message):
        make(values)


def test_freeze_refuses_an_unknown_arm() -> None:
    with pytest.raises(EnvelopeError, match="arm native or verify"):
        make(arm="tree")


def test_a_correct_backend_passes() -> None:
    rng = np.random.default_rng(2)
    results = e.judge(make(), {"out_max": rng.lognormal(size=M), "state_rms": rng.lognormal(size=M)})
    assert [r.status for r in results] == ["pass", "pass"]


def test_a_shifted_backend_fails_and_names_its_units() -> None:
    env = make()
    bound = env.statistics["out_max"].bound
    values = np.full(M, bound)
    values[:40] = bound * np.linspace(1.1, 2.0, 40)
    result = next(r for r in e.judge(env, {"out_max": values}) if r.statistic == "out_max")
    assert (result.status, result.exceedances, result.worst_ratio) == ("fail", 40, pytest.approx(2.0))
    assert result.units == tuple(range(39, -1, -1))
    assert f"40 of 96 units above the bound, {result.allowed} allowed" in result.reason


def test_the_count_decides_at_exactly_the_allowed_number() -> None:
    env = make()
    stat = env.statistics["out_max"]
    for count, status in ((stat.allowed, "pass"), (stat.allowed + 1, "fail")):
        values = np.zeros(M)
        values[:count] = stat.bound * 2
        assert e.judge(env, {"out_max": values})[0].status == status


def test_equality_is_no_exceedance() -> None:
    env = make()
    assert e.judge(env, {"out_max": np.full(M, env.statistics["out_max"].bound)})[0].exceedances == 0


def test_one_nan_fails_outright() -> None:
    values = np.zeros(M)
    values[5] = np.nan
    result = e.judge(make(), {"out_max": values})[0]
    assert (result.status, result.units, result.worst_ratio) == ("fail", (5,), float("inf"))
    assert "1 of 96 held-out values are NaN" in result.reason


def test_too_few_units_have_no_power() -> None:
    result = e.judge(make(), {"out_max": np.full(2, 1e9)})[0]
    assert (result.status, result.exceedances, result.allowed) == ("inconclusive", 2, 2)
    assert "no power: n=96 and m=2" in result.reason


def test_a_missing_statistic_is_inconclusive_and_an_unknown_one_refused() -> None:
    missing = e.judge(make(), {"out_max": np.zeros(M)})[1]
    assert (missing.status, missing.reason, missing.cells) == ("inconclusive", "no held-out value", 0)
    with pytest.raises(EnvelopeError, match="expected statistics out_max, state_rms, found other"):
        e.judge(make(), {"other": np.zeros(M)})


def test_zero_bound_from_a_bitwise_arm() -> None:
    env = make({"a": np.zeros(N)})
    assert e.judge(env, {"a": np.zeros(M)})[0].worst_ratio == 0.0
    assert e.judge(env, {"a": np.full(M, 1e-30)})[0].status == "fail"


def test_false_alarms_stay_below_alpha() -> None:
    rng, alarms, runs = np.random.default_rng(5), 0, 400
    for _ in range(runs):
        env = make({"a": rng.gamma(2, size=30)}, planned=30, alpha_family=0.02)
        alarms += e.judge(env, {"a": rng.gamma(2, size=30)})[0].status == "fail"
    assert alarms / runs <= 0.02 + 4 * np.sqrt(0.02 * 0.98 / runs)


def test_round_trip(tmp_path: Path) -> None:
    env = make()
    path = tmp_path / "new" / "env.json"
    e.save(env, path)
    assert e.load(path) == env
    assert json.loads(path.read_text())["sha256"] == env.sha256
    assert os.listdir(path.parent) == ["env.json"]


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    e.save(make(seed=1), path)
    with pytest.raises(EnvelopeError, match="found one; to replace it use --force"):
        e.save(make(seed=2), path)
    assert e.load(path).seed == 1
    e.save(make(seed=2), path, force=True)
    assert e.load(path).seed == 2


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvelopeError, match="expected a writable folder"):
        e.save(make(), tmp_path / "file" / "env.json")
    with pytest.raises(EnvelopeError, match="expected a file name, found a folder"):
        e.save(make(), tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "env.json"
    e.save(make(seed=1), path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvelopeError, match="No space left"):
        e.save(make(seed=2), path, force=True)
    assert os.listdir(tmp_path) == ["env.json"]
    assert e.load(path).seed == 1


def test_data_that_json_cannot_hold_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(EnvelopeError, match="plain finite data"):
        e.save(make(environment={"x": float("nan")}), tmp_path / "env.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a file, found none"),
        (b"", "truncated or damaged"),
        (b'{"schema_version": 1, "backend": "to', "expected JSON, found a truncated or damaged file"),
        (b"\xff\xfe\x00", "expected a readable text file"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "expected schema_version 1, found None"),
        (b'{"schema_version": 2}', "expected schema_version 1, found 2"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "env.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EnvelopeError, match=message) as caught:
        e.load(path)
    assert str(path) in str(caught.value)
    assert "lumotree-audit calibrate --force" in str(caught.value)


def test_an_edited_bound_is_found(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    e.save(make(), path)
    rewrite(path, lambda data: data["statistics"]["out_max"].update(bound=1e9), rehash=False)
    with pytest.raises(EnvelopeError, match=r"expected content with sha256 0+, found .*the file was edited"):
        e.load(path)
    without = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    path.write_text(json.dumps(without))
    with pytest.raises(EnvelopeError, match="content with sha256 None"):
        e.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["statistics"]["out_max"].update(allowed=90), "out_max allows 90 exceedances"),
        (lambda data: data.pop("arm"), "missing or unknown: arm"),
        (lambda data: data.update(extra=1), "missing or unknown: extra"),
        (lambda data: data.update(statistics=[1]), "well-formed fields"),
        (lambda data: data["statistics"]["out_max"].pop("n"), "well-formed fields"),
        (lambda data: data.update(alpha_family="much"), "well-formed fields"),
        (lambda data: data["statistics"]["out_max"].update(bound=-1.0), "finite bound >= 0"),
    ],
)
def test_a_forged_hash_does_not_help(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "env.json"
    e.save(make(), path)
    rewrite(path, change)
    with pytest.raises(EnvelopeError, match=message) as caught:
        e.load(path)
    assert str(path) in str(caught.value)


def test_an_envelope_for_this_very_run_applies_without_warning() -> None:
    assert applies(make()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "expected backend 'triton', found 'torch'"),
        ({"arm": "native"}, "expected arm 'native', found 'verify'"),
        ({"shape": "tiny"}, "expected shape 'tiny', found '27B'"),
        ({"contract": Contract(norm="sqrt")}, "expected contract norm 'sqrt', found 'rsqrt'"),
        ({"dims": DIMS_TINY}, "expected dims conv_channels 36, found 10240"),
        ({"code_sha256": "new"}, r"expected code_sha256 \(the judging code\) 'new', found 'code'"),
        ({"trees": ["chain"]}, r"expected trees \['chain'\]"),
        ({"case_sha256": "new"}, "expected case_sha256"),
    ],
)
def test_an_envelope_for_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvelopeError, match=message) as caught:
        applies(make(), **change)
    assert "envelope env.json" in str(caught.value)
    assert "calibrate --force" in str(caught.value)


def test_another_machine_or_backend_source_only_warns() -> None:
    warnings = applies(make(), environment={**HERE, "processor": "cpu B", "torch": "3"}, backend_sha256="new")
    assert len(warnings) == 3
    assert "calibrated with processor 'cpu A', this is 'cpu B'" in warnings[1]
    assert "source of backend torch changed" in warnings[0]


def test_envelopes_cannot_be_made_inconsistent() -> None:
    env = make()
    with pytest.raises(EnvelopeError, match="exceedances"):
        replace(env, planned=10)


def test_environment_is_plain_data() -> None:
    facts = environment()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert {"python", "torch", "triton", "numpy", "processor", "gpu", "threads", "triton_interpret"} <= set(facts)
    assert processor_model(Path("/no/such/file"))
    assert git_commit() is None or len(git_commit() or "") >= 40


def test_code_hash_sees_content_and_names_but_not_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hashed_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    module = package / "judge.py"
    seen = []
    for content in (b"a = 1\nb = 2\n", b"a = 1\r\nb = 2\r\n", b"a = 1\nb = 3\n"):
        module.write_bytes(content)
        seen.append(code_sha256(["hashed_package/*.py", "no_such_package/*.py"]))
    assert seen[0] == seen[1] != seen[2]
    module.rename(package / "other.py")
    assert code_sha256(["hashed_package/*.py"]) != seen[2]
    with pytest.raises(EnvelopeError, match="no source file found"):
        code_sha256(["hashed_package/*.rs"])


def test_code_hash_covers_the_judging_code() -> None:
    assert code_sha256() == code_sha256()
    assert code_sha256() != code_sha256(["audit/distance.py"])


def test_object_hash_is_of_the_defining_file() -> None:
    assert object_sha256(Contract()) == object_sha256(Contract)
    assert object_sha256(Contract) != object_sha256(e.Envelope)
    assert object_sha256(7) is None
