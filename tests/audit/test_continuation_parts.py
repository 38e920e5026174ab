"""Backends put together by surface, the drafts of scripts, the float64 model, and what each rule lets through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit.composite import Composite
from audit.continuation_calibrate import measure_spread
from audit.continuation_distance import compare
from audit.continuation_drift import measure_drift
from audit.continuation_engine import Engine
from audit.continuation_program import play_cold
from audit.continuation_rules import envelope, within_bitwise, within_envelope
from audit.continuation_stack import StackSpec, candidate, prompts, served_by
from audit.distance import relative_l2
from audit.drift_oracle import float64_run
from faults import Faulty
from lumotree.backends.bank import BankBackend
from lumotree.backends.loader import load_backend
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.backends.variants import KVLayoutBackend, WYBackend
from lumotree.checkpoint import write_checkpoint
from lumotree.cycle_types import Stack
from lumotree.errors import BackendError, InputError
from lumotree.model import HybridModel
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.plain import PlainDecoder
from lumotree.random_weights import random_weights
from lumotree.requests import Request

from .continuation_toy import cells, reference, scripts, toy
from .continuation_toy import prompts as toy_prompts

CONFIG = ModelConfig(
    vocab=40, hidden=32, intermediate=32, layer_kinds=(LINEAR, FULL, LINEAR), hk=2, hv=4, dk=8, dv=4, q_heads=2,
    kv_heads=1, head_dim=8, rotary_dim=4, mtp_layers=1,
)  # fmt: skip


@pytest.mark.parametrize("backend", [KVLayoutBackend(), BankBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_correct_backends_of_other_bits_are_bitwise_against_their_own_native_chain(backend: Any) -> None:
    from audit.continuation_native import ARMS, native_trace

    chosen = scripts(ends=((14, 0),))
    native = native_trace(toy(backend), chosen, ARMS["A"])
    outcome = play_cold(toy(backend), chosen[0], native)
    assert all(c.bitwise for c in cells(chosen, outcome.trace, native)) and not outcome.touched


def test_a_kernel_that_is_off_by_last_bits_stays_within_the_envelope_and_is_not_bitwise() -> None:
    chosen = scripts(ends=((14, 12, 0),))
    native = reference(chosen)
    found = cells(chosen, play_cold(toy(scaled(2**-20)), chosen[0], native).trace, native)
    assert not any(c.bitwise for c in found) and all(c.ratio(s) <= 1 for c in found for s in c.candidate.apart)


def test_surfaces_served_by_several_backends_continue_bitwise() -> None:
    parts = Composite({"gdn": TorchBackend(), "conv": ReferenceBackend(), "attention": BankBackend()})
    from audit.continuation_native import ARMS, native_trace

    chosen = scripts(ends=((14, 7, 0),))
    native = native_trace(toy(parts), chosen, ARMS["A"])
    outcome = play_cold(toy(parts), chosen[0], native)
    assert all(c.bitwise for c in cells(chosen, outcome.trace, native))
    assert parts.name == "torch+reference+bank"


def test_a_part_without_the_surface_is_refused() -> None:
    class GdnOnly(Faulty):
        conv_verify = None

    with pytest.raises(BackendError, match="cannot serve conv: expected conv_verify, conv_publish"):
        Composite({"gdn": TorchBackend(), "conv": GdnOnly(TorchBackend()), "attention": TorchBackend()})


def test_what_a_composite_claims_is_what_its_parts_claim() -> None:
    parts = Composite({"gdn": WYBackend(), "conv": TorchBackend(), "attention": TorchBackend()})
    assert [parts.contract.claim(s) for s in ("gdn", "conv", "attention")] == ["algebra", "bitwise", "bitwise"]


def test_surfaces_that_a_backend_lacks_are_served_by_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Faulty(TorchBackend())
    base.attention_verify = base.kv_publish = None
    spec = StackSpec(backend="mine", surfaces=(("conv", "reference"),))
    assert served_by(spec, base) == {"gdn": "mine", "conv": "reference", "attention": "torch"}
    monkeypatch.setattr("audit.continuation_stack.load_backend", lambda n: base if n == "mine" else load_backend(n))
    assert candidate(spec).name == "torch+reference"
    with pytest.raises(InputError, match="expected one of gdn, conv, attention, got 'kv'"):
        served_by(replace(spec, surfaces=(("kv", "torch"),)), base)


def test_the_adapter_of_the_readme_continues_with_our_other_surfaces() -> None:
    from audit.continuation_native import ARMS, native_trace

    text = (Path(__file__).parents[2] / "README.md").read_text()
    module: dict[str, Any] = {}
    exec(next(b for b in text.split("```python\n")[1:] if "class MyKernel" in b).split("```")[0], module)
    parts = Composite({"gdn": module["MyKernel"](), "conv": TorchBackend(), "attention": TorchBackend()})
    chosen = scripts(ends=((7, 0),))
    native = native_trace(toy(parts), chosen, ARMS["A"])
    outcome = play_cold(toy(parts), chosen[0], native)
    assert all(c.bitwise for c in cells(chosen, outcome.trace, native))


def test_drafts_from_a_wrong_hidden_row_are_not_the_harvested_ones() -> None:
    from faults.continuation import ENGINE_FAULTS

    chosen = scripts(ends=((14, 7, 0),))
    native = reference(chosen)
    clean = play_cold(toy(), chosen[0], native)
    assert clean.drafted > 3 * 5 and not clean.drafts
    wrong = play_cold(toy(), chosen[0], native, fault=ENGINE_FAULTS["hidden row of the wrong end"])
    assert wrong.drafts and "cold/p0 cycle 1 row" in wrong.drafts[0]


def scaled(epsilon: float) -> Any:
    """Publishes layer 1 of the recurrent state too large by a factor of 1 + epsilon, each cycle."""
    inner = TorchBackend()

    def publish(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        inner.gdn_publish(pool, batch, accepted, ws, layers)
        pool[1, batch.state_slot.long()] *= 1 + epsilon

    return Faulty(inner, gdn_publish=publish)


@pytest.mark.parametrize(
    ("epsilon", "bitwise", "published"), [(0.0, True, True), (2**-22, False, True), (0.03, False, True),
                                          (0.05, False, False)],
)  # fmt: skip
def test_the_published_envelope_lets_faults_through_that_bits_do_not(
    epsilon: float, bitwise: bool, published: bool
) -> None:
    chosen = scripts(ends=((14, 0),))
    native = reference(chosen)
    engine = Engine(toy(scaled(epsilon)), chosen)
    engine.import_state(chosen[0], native["cold/p0"][0])
    engine.play(chosen[0], 1)
    got, want = engine.outcome.trace["cold/p0"][1], native["cold/p0"][1]
    apart = compare(got, want, chosen[0].bounds[0]).apart["gdn"]
    assert apart.distance == pytest.approx(epsilon, rel=0.3, abs=1e-9)
    assert (within_bitwise(apart), within_envelope(apart.distance, envelope("gdn", []))) == (bitwise, published)


def test_the_calibrated_floor_lies_between_bits_and_the_published_one() -> None:
    spread = measure_spread(toy(), toy_prompts(2, 9), 1)
    rule = spread.rule()
    assert rule.n == 2 and 1e-8 < rule.bounds["gdn"] < 0.02
    assert rule.allowed(6) == 6  # two prefixes are too few for any outcome to fail


def drift_stack(folder: Path) -> Stack:
    write_checkpoint(folder, CONFIG, random_weights(CONFIG, 5))
    model, backend = HybridModel(CONFIG, random_weights(CONFIG, 5)), TorchBackend()
    return Stack(model, backend, model.draft_head(backend), "random")


def test_the_float64_model_is_the_model_up_to_rounding(tmp_path: Path) -> None:
    stack = drift_stack(tmp_path)
    decoder = PlainDecoder(stack, [Request(0, tuple(range(1, 20)), 12)], [None])
    result = decoder.run()[0]
    tokens = (*range(1, 20), *result.output)[:-1]
    exact = float64_run(CONFIG, random_weights(CONFIG, 5), tokens, {len(tokens)}, stack.backend.contract)
    apart = relative_l2(result.surfaces.recurrent.double(), exact.states[len(tokens)], 1)
    assert float(apart.max()) < 0.03  # bf16 activations: 2^-8 a rounding
    other = float64_run(CONFIG, random_weights(CONFIG, 6), tokens, {len(tokens)}, stack.backend.contract)
    assert float(relative_l2(other.states[len(tokens)], exact.states[len(tokens)])) > 0.3


def test_drift_of_both_arms_is_the_same_and_small(tmp_path: Path) -> None:
    drift = measure_drift(drift_stack(tmp_path), str(tmp_path), tuple(range(1, 20)), 60)
    assert drift.same == 60 and not drift.differences and drift.cycles < 30
    assert max(max(a) for a in drift.native.apart) < 0.3 and len(drift.native.apart[0]) == 2
    shared = set(drift.native.marks) & set(drift.candidate.marks)
    assert len(shared) > 1
    for mark in shared:
        at = [arm.apart[arm.marks.index(mark)] for arm in (drift.native, drift.candidate)]
        assert at[0] == at[1]


def test_a_kernel_that_rounds_its_state_drifts(tmp_path: Path) -> None:
    stack, inner = drift_stack(tmp_path), TorchBackend()

    def publish(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        inner.gdn_publish(pool, batch, accepted, ws, layers)
        pool.copy_((pool * 8).round() / 8)

    wrong = replace(stack, backend=Faulty(inner, gdn_publish=publish))
    drift = measure_drift(wrong, str(tmp_path), tuple(range(1, 20)), 60)
    native, candidate_ = (max(max(a) for a in arm.apart) for arm in (drift.native, drift.candidate))
    assert drift.differences and candidate_ > 3 * native


def test_a_vocabulary_that_is_not_ours_gets_random_prompts(tmp_path: Path) -> None:
    stack = drift_stack(tmp_path)
    first, second = (prompts(stack, 3, which, 1) for which in ("heldout", "calibration"))
    assert len(first) == 3 and all(0 <= t < 40 for p in first for t in p)
    assert not set(first) & set(second)


def test_prompts_of_the_shipped_model_are_texts_and_the_sets_share_none() -> None:
    from lumotree.byte_tokens import VOCAB

    stack = toy()
    stack.model.vocab = VOCAB
    first, second = (prompts(stack, 6, which, 1) for which in ("heldout", "calibration"))
    assert not set(first) & set(second) and all(p[0] == 256 for p in first)
    with pytest.raises(InputError, match="at most 43 of set 'heldout', got 44"):
        prompts(stack, 44, "heldout", 1)
