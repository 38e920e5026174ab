"""The engine along forced paths: equal to plain decoding in every bit, and wrong exactly where it is made wrong."""

from __future__ import annotations

import inspect
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audit.continuation_distance import SURFACES
from audit.continuation_engine import Engine, Outcome
from audit.continuation_judge import first_wrong
from audit.continuation_native import ARMS, Trace, native_trace
from audit.continuation_plan import Script
from audit.continuation_program import play_batch, play_cold, play_pair, play_repeat_and_resumed
from audit.continuation_run import Task, _work, against, sealed
from audit.continuation_watch import expected_calls
from audit.dump import DumpOptions, judge_dump
from faults import Faulty
from faults.continuation import ENGINE_FAULTS
from lumotree.backends.torch_backend import TorchBackend

from .continuation_toy import (
    cells,
    damaged_history,
    reference,
    scripts,
    toy,
    wrong_publish,
    wrong_verify,
)  # fmt: skip

#: The bystander's prompt is the first verification of an engine, so forced cycle c is number c + 1.
FIRST = 1


@pytest.fixture(scope="module")
def cold() -> list[Script]:
    return scripts()


@pytest.fixture(scope="module")
def native(cold: list[Script]) -> Trace:
    return reference(cold)


def played(cold: list[Script], native: Trace, backend: Any = None, **options: Any) -> Outcome:
    return play_cold(toy(backend), cold[0], native, **options)


def test_every_surface_of_every_cycle_is_that_of_plain_decoding(cold: list[Script], native: Trace) -> None:
    outcome = played(cold, native)
    found = cells(cold[:1], outcome.trace, native)
    assert len(found) == 4 and all(c.bitwise and c.greedy for c in found)
    assert {s for c in found for s, a in c.candidate.apart.items() if a.cells} == set(SURFACES)
    assert not outcome.touched and not outcome.account.wrong and not outcome.readback
    assert outcome.account.rows == 4 * 28
    assert outcome.account.calls == expected_calls(2, 1, 4)


def test_a_model_without_a_head_continues_on_every_other_surface(cold: list[Script], tmp_path: Path) -> None:
    headless = replace(toy(), head=None)
    native = native_trace(headless, cold[:1], ARMS["A"])
    outcome = play_cold(headless, cold[0], native, record=tmp_path, backend_name="torch")
    recorded = judge_dump(DumpOptions(str(tmp_path)))
    assert recorded.verdict == "PASS" and recorded.coverage["drafter"] == "not covered"
    found = cells(cold[:1], outcome.trace, native)
    assert all(c.bitwise for c in found) and not any(c.candidate.apart["drafter"].cells for c in found)
    assert outcome.drafted == 0


def test_native_arms_agree_whatever_the_layout(cold: list[Script], native: Trace) -> None:
    for arm in ("V", "P"):
        compared = against(native, native_trace(toy(), cold, ARMS[arm]), cold)
        assert all(a.bitwise == a.cells for c in compared.values() for x in c for a in x.apart.values())


def test_a_primed_cache_and_a_resumed_request_continue_alike() -> None:
    chosen = scripts(("repeat", "resumed"), ((14, 7, 4, 0),), prompt=40)  # long enough to share a page of 16
    trace = play_repeat_and_resumed(toy(), *chosen)
    assert not trace.readback and not trace.touched and not trace.account.wrong
    found = cells(chosen, trace.trace, reference(chosen))
    assert len(found) == 8 and all(c.bitwise for c in found)


def test_a_resumed_request_that_shares_nothing_is_told() -> None:
    chosen = scripts(("repeat", "resumed"), ((14, 0),), prompt=9)
    assert "no page of the stored prefix was shared" in play_repeat_and_resumed(toy(), *chosen).readback[0]


def test_a_batch_of_all_kinds_is_that_of_plain_decoding() -> None:
    ends = ((14, 0, 0), (0, 12, 0), (7, 28, 1), (0, 0, 5), (9, 0, 0))
    chosen = scripts(("mixed",), ends)
    outcome = play_batch(toy(), chosen)
    found = cells(chosen, outcome.trace, reference(chosen))
    assert len(found) == 15 and all(c.bitwise for c in found)
    assert not outcome.touched and not outcome.account.wrong
    assert outcome.forwards > 6  # five requests through four slots: one slot was used again


@pytest.mark.parametrize(
    ("backend", "surface", "layer", "cycle"),
    [
        (wrong_publish("gdn", FIRST + 1, 1), "gdn", 1, 1),
        (wrong_publish("conv", FIRST + 2, 0), "conv", 0, 2),
        (wrong_publish("attention", FIRST, 0), "kv_new", 0, 0),
        (damaged_history(FIRST + 2, 0), "kv_history", 0, 2),
    ],
    ids=["gdn", "conv", "kv_new", "kv_history"],
)
def test_a_wrong_publication_is_named_live_and_offline(
    backend: Any, surface: str, layer: int, cycle: int, cold: list[Script], native: Trace, tmp_path: Path
) -> None:
    outcome = played(cold, native, backend, record=tmp_path / "here", backend_name="torch")
    wrong = first_wrong(cells(cold[:1], outcome.trace, native), bitwise=True)
    first, apart = wrong[0]
    assert (apart.surface, apart.layer, first.cycle) == (surface, layer, cycle)
    elsewhere = Path(shutil.move(tmp_path / "here", tmp_path / "elsewhere"))
    report = judge_dump(DumpOptions(str(elsewhere), controls=False))
    finding = report.findings[0]
    word = {"kv_new": "kv_new", "kv_history": "kv_history"}.get(surface, f"{surface}.state")
    assert report.verdict == "FAIL" and word in finding.check
    assert (finding.layer, finding.case) == (layer, f"cycle {cycle}")


@pytest.mark.parametrize("surface", ["gdn", "conv", "attention"])
def test_a_wrong_output_is_named_offline_where_live_sees_what_follows(
    surface: str, cold: list[Script], native: Trace, tmp_path: Path
) -> None:
    def change(out: torch.Tensor, layer: int, call: int) -> None:
        if call == FIRST + 1 and layer == 0:
            out[0] = out[0] * 1.0625

    backend = wrong_verify(surface, change)
    outcome = played(cold, native, backend, record=tmp_path / "here", backend_name="torch")
    first, _ = first_wrong(cells(cold[:1], outcome.trace, native), bitwise=True)[0]
    report = judge_dump(DumpOptions(str(tmp_path / "here"), controls=False))
    finding = report.findings[0]
    assert first.cycle == 1 and report.verdict == "FAIL"
    assert (finding.check, finding.layer, finding.row, finding.case) == (f"dump.{surface}.out", 0, 0, "cycle 1")


def test_a_wrong_last_output_shows_in_the_next_token_alone(cold: list[Script], native: Trace) -> None:
    end = cold[0].cycles[1].end

    def change(out: torch.Tensor, layer: int, call: int) -> None:
        if call == FIRST + 1 and layer == 1:
            out[end] = out[end] * 1.5

    outcome = played(cold, native, wrong_verify("gdn", change))
    wrong = first_wrong(cells(cold[:1], outcome.trace, native), bitwise=True)
    assert {(a.surface, c.cycle) for c, a in wrong} == {("next", 1), ("hidden", 1)}


def test_a_wrong_count_of_committed_tokens_shows_in_positions_and_lengths(
    cold: list[Script], native: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Engine._decision

    def short(engine: Engine, turn: Any) -> Any:
        decision = right(engine, turn)
        return replace(decision, path=decision.path[:-1]) if turn.cycle == 2 else decision

    monkeypatch.setattr(Engine, "_decision", short)
    outcome = played(cold, native)
    first, apart = first_wrong(cells(cold[:1], outcome.trace, native), bitwise=True)[0]
    wrong = first.candidate.apart["lengths"]
    assert (first.cycle, wrong.distance, wrong.part, apart.bitwise) == (1, float("inf"), "committed tokens", 0)


def test_a_clean_schedule_has_the_same_verdict_offline(cold: list[Script], native: Trace, tmp_path: Path) -> None:
    outcome = played(cold, native, record=tmp_path / "here", backend_name="torch")
    assert all(c.bitwise for c in cells(cold[:1], outcome.trace, native))
    elsewhere = Path(shutil.move(tmp_path / "here", tmp_path / "elsewhere"))
    report = judge_dump(DumpOptions(str(elsewhere), head=toy().head))
    assert report.verdict == "PASS" and report.coverage["drafter"] == "covered"
    assert next(c for c in report.checks if c.id == "dump.drafter.new").bitwise_cells


@pytest.mark.parametrize(
    ("fault", "check"),
    [("hidden row of the wrong end", "dump.hidden"), ("drafter state not rolled back", "dump.drafter.new")],
)
def test_faults_of_the_drafter_are_named_live_and_offline(
    fault: str, check: str, cold: list[Script], native: Trace, tmp_path: Path
) -> None:
    outcome = played(cold, native, fault=ENGINE_FAULTS[fault], record=tmp_path, backend_name="torch")
    first, apart = first_wrong(cells(cold[:1], outcome.trace, native), bitwise=True)[0]
    assert (apart.surface, first.cycle) == (ENGINE_FAULTS[fault].surfaces[0], 0)
    report = judge_dump(DumpOptions(str(tmp_path), head=toy().head, controls=False))
    assert report.verdict == "FAIL"
    assert (report.findings[0].check, report.findings[0].case) == (check, "cycle 0")


@pytest.mark.parametrize("name", ENGINE_FAULTS)
def test_every_engine_fault_shows_in_a_surface_that_it_names(name: str, cold: list[Script], native: Trace) -> None:
    fault = ENGINE_FAULTS[name]
    if fault.requests > 1:
        outcome, chosen = play_pair(toy(), cold, native, fault), cold
    else:
        outcome, chosen = played(cold, native, fault=fault), cold[:1]
    seen = {a.surface for _, a in first_wrong(cells(chosen, outcome.trace, native), bitwise=True)}
    seen |= {"inputs"} if outcome.account.wrong else set()
    seen |= {"untouched"} if outcome.touched else set()
    assert set(fault.surfaces) <= seen


def test_the_pair_without_a_fault_is_clean(cold: list[Script], native: Trace) -> None:
    outcome = play_pair(toy(), cold, native)
    assert all(c.bitwise for c in cells(cold, outcome.trace, native)) and not outcome.touched


def test_a_backend_that_only_pretends_leaves_poison(cold: list[Script], native: Trace) -> None:
    lazy = Faulty(TorchBackend(), gdn_verify=lambda *_: None, gdn_publish=lambda *_: None)
    engine = Engine(toy(lazy), cold[:1])
    engine.import_state(cold[0], native[cold[0].name][0])
    engine.advance([cold[0].number])
    assert engine.outcome.trace[cold[0].name][1].logits.isnan().any()


def test_a_call_that_never_came_is_missing_from_the_account(cold: list[Script], native: Trace) -> None:
    class Bypass:
        """A model that computes its convolution without the backend."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def verify(self, tokens: Any, batch: Any, pools: Any, ws: Any, backend: Any) -> Any:
            own = getattr(backend, "_inner", backend)
            mixed = Faulty(backend, conv_verify=own.conv_verify)
            return self.inner.verify(tokens, batch, pools, ws, mixed)

    stack = toy()
    outcome = play_cold(replace(stack, model=Bypass(stack.model)), cold[0], native)
    assert all(c.bitwise for c in cells(cold[:1], outcome.trace, native))
    want = expected_calls(2, 1, 4)
    assert {key for key in want if want[key] != outcome.account.calls[key]} == {("conv_verify", 0), ("conv_verify", 1)}


def test_an_import_that_is_not_read_back_is_told(cold: list[Script], native: Trace) -> None:
    inner = TorchBackend()

    def export(pools: Any, ws: Any, slot: int, layer: int) -> Any:
        state = inner.export(pools, ws, slot, layer)
        return replace(state, conv=state.conv * 2) if layer == 1 else state

    outcome = played(cold, native, Faulty(inner, export=export))
    assert outcome.readback and "C conv, layer 1" in outcome.readback[0]


def test_a_write_into_somebody_elses_slot_is_told(cold: list[Script], native: Trace) -> None:
    inner = TorchBackend()

    def publish(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        inner.conv_publish(pool, batch, accepted, ws, layers)
        pool[0, 0] += 1  # the bystander's

    outcome = played(cold, native, Faulty(inner, conv_publish=publish))
    assert "conv in cycle 0" in outcome.touched
    assert any("bystander" in t for t in outcome.touched)


def test_a_task_for_a_worker_is_bytes_before_the_pool_has_it() -> None:
    """Handed over as it is, the pool's thread would pickle it while scripts and trees fill in what they keep."""
    task = Task("control", "arm", tuple(scripts()), trace="trace.safetensors")
    data = sealed(task)
    assert task.scripts[0].bounds and pickle.loads(data) == task
    assert inspect.signature(_work).parameters["task"].annotation == "bytes"
