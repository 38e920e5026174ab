"""The sampler suite from end to end at a small vocabulary: verdicts, controls, blind detectors, what a report holds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from audit import sampler, sampler_control, sampler_greedy, sampler_law
from audit.report import from_json, to_json
from audit.sampler import Options, check
from audit.sampler_cases import captured_cases, chain_of, file_cases, small_cases, small_step
from audit.sampler_control import LEAST_TV, checked_faults
from audit.sampler_file import load_step
from audit.sampler_guard import Guarded, PreparedRule
from audit.sampler_paired import paired, upper_rate
from lumotree.backends.sampler_loader import Claims, LoadedSampler, load_sampler
from lumotree.errors import BackendError, InputError
from lumotree.select import MULTI_ROUND, RULES
from lumotree.select_types import Coins, Step, Walks

SHORT = {"chain-2": (-1, 0), "fork-3": (-1, 0, 0)}
FAULTS = ("residual_half", "accept_reused", "q_with_replacement", "fixed_seed")
SMALL = Options(
    vocab=32, walks=8_000, chunk=4_000, min_visits=20, exact=0, workers=0, budget=512, faults=FAULTS,
    battery_walks=4_000, only=("peaked-fixed", "truncated-stochastic"),
)  # fmt: skip


def small(**changes: object) -> sampler.Run:
    return check(replace(SMALL, **changes))


class Coined:
    """A right sampler with another map from coins to tokens; subclasses break it."""

    rule = "multi-round"

    def coins(self, coins: Coins) -> Coins:
        return Coins(coins.accept, (1 - 2.0**-53) - coins.residual)

    def select(self, step: Step, tokens: torch.Tensor, coins: Coins) -> Walks:
        return self.after(step, MULTI_ROUND.select(step, tokens, self.coins(coins)))

    def after(self, step: Step, walks: Walks) -> Walks:
        return walks


class Shared(Coined):
    """The accept coin of row 1 draws the bonus."""

    def coins(self, coins: Coins) -> Coins:
        return Coins(coins.accept, coins.accept[:, [1]].expand_as(coins.residual).contiguous())


class OffVocabulary(Coined):
    def after(self, step: Step, walks: Walks) -> Walks:
        return replace(walks, bonus=torch.where(walks.last == 0, step.target.shape[1], walks.bonus))


class Nan(Coined):
    def after(self, step: Step, walks: Walks) -> Walks:
        return replace(walks, bonus=torch.where(walks.last == 0, float("nan"), walks.bonus.double()))


class Writes(Coined):
    def after(self, step: Step, walks: Walks) -> Walks:
        step.target[0] *= 0.5
        return walks


class Unsteady(Coined):
    """Each walk is accepted by the coins of the walk before it in the batch: right in law, walk by walk."""

    def coins(self, coins: Coins) -> Coins:
        return Coins(coins.accept.roll(1, 0), coins.residual)


class ClosedRight:
    """Multi-round rejection with a generator of its own."""

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        from audit.sampler_guard import CoinWalker

        return CoinWalker(MULTI_ROUND).walk(step, walks, seed + 99)


class ClosedFrozen(ClosedRight):
    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        return super().walk(step, walks, 7)


class ClosedUnflagged(ClosedRight):
    """Says that nothing was ever refused: the test given a refusal would have nothing to look at."""

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        drawn = super().walk(step, walks, seed)
        return replace(drawn, refused=torch.zeros_like(drawn.refused))


class ClosedMirrored(ClosedRight):
    """The second half of a call has the coins of the first, mirrored: each walk by itself is right."""

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        from audit.sampler_guard import CoinWalker

        tokens, coins = CoinWalker(MULTI_ROUND).inputs(step, walks, seed)
        half = walks // 2
        for each in (coins.accept, coins.residual):
            each[half : 2 * half] = (1 - 2.0**-53) - each[:half]
        return MULTI_ROUND.select(step, tokens, coins)


class WrongInSmallBatches(Coined):
    """Right in the batches of a statistical test, and not in those of a server."""

    def after(self, step: Step, walks: Walks) -> Walks:
        return replace(walks, bonus=walks.bonus * 0) if len(walks.last) <= 4 else walks


class GreedyInSmallBatches(WrongInSmallBatches):
    rule = "greedy"

    def select(self, step: Step, tokens: torch.Tensor, coins: Coins) -> Walks:
        return self.after(step, RULES["greedy"].select(step, tokens, coins))


class ClosedGreedyInBatches:
    """Right walk by walk; of several the last has no answer of its own."""

    rule, walks = "greedy", 48

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        from audit.sampler_guard import CoinWalker

        drawn = CoinWalker(RULES["greedy"]).walk(step, walks, seed)
        bonus = drawn.bonus.clone()
        bonus[-1] = bonus[-1] if walks == 1 else 0
        return replace(drawn, bonus=bonus)


class OtherDrafts(Coined):
    """Hands back other drafts than it was given."""

    def after(self, step: Step, walks: Walks) -> Walks:
        return replace(walks, tokens=walks.tokens.roll(1, 0)) if len(walks.tokens) > 1 else walks


class ZeroDrawsFirst(Coined):
    """A residual coin of exactly 0 draws token 0, whatever its probability: `>=` where `>` is right."""

    def select(self, step: Step, tokens: torch.Tensor, coins: Coins) -> Walks:
        walks = MULTI_ROUND.select(step, tokens, coins)
        zero = coins.residual.gather(1, walks.last[:, None])[:, 0] == 0
        return replace(walks, bonus=torch.where(zero, 0, walks.bonus))


class FewWalks(Coined):
    """Claims to be slow, and is wrong only at vocabularies larger than the small steps'."""

    walks = 2

    def after(self, step: Step, walks: Walks) -> Walks:
        return replace(walks, bonus=walks.bonus * 0) if step.target.shape[1] > 16 else walks


class WrongShape(Coined):
    def after(self, step: Step, walks: Walks) -> Walks:
        return replace(walks, bonus=walks.bonus[:, None])


class Crashes(Coined):
    def after(self, step: Step, walks: Walks) -> Walks:
        raise RuntimeError("illegal memory access")


class LastOfTies:
    rule = "greedy"

    def select(self, step: Step, tokens: torch.Tensor, coins: Coins) -> Walks:
        flipped = replace(step, target=step.target + 1e-12 * torch.arange(step.target.shape[1]))
        return RULES["greedy"].select(flipped, tokens, coins)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Let a class of this module stand for `module:object`."""

    def use(made: type) -> str:
        real = sampler.load_sampler

        def fake(spec: str) -> LoadedSampler:
            if spec != "here:it":
                return real(spec)
            it = made()
            claims = Claims(rule=getattr(it, "rule", "multi-round"), walks=getattr(it, "walks", None))
            return LoadedSampler(spec, it, claims, hasattr(it, "select"))

        for module in ("audit.sampler", "audit.sampler_step", "audit.sampler_law"):
            monkeypatch.setattr(f"{module}.load_sampler", fake)
        return "here:it"

    return use


@pytest.mark.parametrize("name", RULES)
def test_built_in_rules_pass(name: str) -> None:
    greedy: dict[str, object] = {"only": ("peaked-fixed",), "faults": ()} if name == "greedy" else {}
    report = small(sampler=name, **greedy).report
    assert (report.verdict, report.exit_code) == ("PASS", 0), report.reasons
    assert from_json(json.loads(json.dumps(to_json(report)))) == report
    if name != "greedy":
        due = [c for c in report.controls if c.expect == "detected"]
        assert len(due) == 7
        assert all(c.detected for c in due)
        step = report.facts["steps"]["peaked-fixed"]
        assert 0 < step["detectable_root"] < 1
        assert 0 < step["certificate_root_bands"] <= step["certificate_root"] <= 1


def test_a_run_without_only_proves_and_sums_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_law, "CONTROL_STEPS", (("fork-3", False),))
    monkeypatch.setattr("audit.sampler_cases.SMALL_TREES", SHORT)
    report = small(only=(), exact=60, walks=4_000, chunk=2_000, min_visits=5).report
    assert report.verdict == "PASS", report.reasons
    ids = [c.id for c in report.checks]
    assert sum(i.startswith("law.exact.") for i in ids) == 5
    assert sum(i.startswith("law.summed.") for i in ids) == 4
    assert sum(i.startswith("walks.") for i in ids) == 6
    assert report.facts["exact"]["domain"]["configurations"] == 60
    assert {c.by for c in report.controls if c.fault.startswith("exact law")} == {"law.exact", None}
    assert any(c.fault.startswith("summed law residual_half") for c in report.controls)


@pytest.mark.parametrize(
    ("made", "check_id"),
    [
        (Shared, "walks.truncated-stochastic"),
        (OffVocabulary, "walks.peaked-fixed"),
        (Nan, "walks.peaked-fixed"),
        (Writes, "inputs"),
        (Unsteady, "repeat"),
        (WrongInSmallBatches, "repeat"),
        (GreedyInSmallBatches, "repeat"),
        (ClosedGreedyInBatches, "greedy.peaked-fixed"),
        (ClosedFrozen, "walks.peaked-fixed"),
        (ClosedUnflagged, "walks.peaked-fixed"),
        (ClosedMirrored, "walks.peaked-fixed"),
        (OtherDrafts, "inputs"),
    ],
)
def test_faulty_samplers_fail(loaded, made: type, check_id: str) -> None:
    only = ("peaked-fixed",) if getattr(made, "rule", "") == "greedy" else SMALL.only
    report = small(sampler=loaded(made), faults=("residual_half",), only=only).report
    assert (report.verdict, report.exit_code) == ("FAIL", 1)
    assert check_id in {c.id for c in report.checks if c.status == "fail"}
    if check_id.startswith("walks."):
        finding = next(f for f in report.findings if f.check == check_id)
        assert "--sampler here:it --seed 1 --walks 8000" in finding.reproduce
        assert finding.reproduce.endswith(f"--only {finding.case}")


def test_a_greedy_sampler_that_takes_the_last_tie_fails(loaded) -> None:
    report = small(sampler=loaded(LastOfTies), only=("tied-fixed",), faults=()).report
    assert report.verdict == "FAIL"
    assert "right: row" in report.findings[0].got


def test_a_repeated_sibling_is_no_hole_in_what_a_step_could_see() -> None:
    report = small(only=("tied-fixed",), faults=("duplicate_twice",), walks=20_000, chunk=10_000).report
    assert report.verdict == "PASS", report.reasons
    assert [(c.fault, c.detected) for c in report.controls] == [("duplicate_twice.tied-fixed", True)]
    facts = report.facts["steps"]["tied-fixed"]
    assert facts["untested_rows"] == [6] and facts["rare_rows"] == []  # row 6 repeats row 4's token
    assert facts["detectable_any_row"] < 1


def test_greedy_controls_reach_ties_and_rows_and_a_blind_comparison_is_inconclusive(monkeypatch) -> None:
    options: dict[str, object] = {"sampler": "greedy", "only": ("tied-fixed", "peaked-fixed"), "faults": ()}
    report = small(**options).report
    assert report.verdict == "PASS", report.reasons
    seen = {c.fault for c in report.controls if c.detected}
    assert {"argmax_last.tied-fixed", "target_rolled.tied-fixed", "first_row_again.peaked-fixed"} <= seen
    shares = report.facts["faults"]["argmax_last"]
    assert 0.3 < shares["tied-fixed"]["tv"] < 1 and shares["peaked-fixed"]["tv"] == 0
    monkeypatch.setattr(sampler_greedy, "_compared", lambda *_: sampler_greedy.GreedyResult(1, 0, ""))
    blind = small(**options).report
    assert blind.verdict == "INCONCLUSIVE"
    assert "control argmax_last.tied-fixed was not detected" in blind.reasons


def test_the_plain_walk_of_a_greedy_audit_agrees_with_the_rule() -> None:
    for name in ("tied-fixed", "peaked-fixed"):
        step = captured_cases(Claims(), (name,), 32)[0].make()
        tokens = sampler_greedy.greedy_drafts(step, 400, 3)
        none = torch.zeros(400, step.tree.n, dtype=torch.float64)
        walks = RULES["greedy"].select(step, tokens, Coins(none, none))
        right = sampler_greedy.greedy_answers(step, sampler_greedy.best_tokens(step), tokens)
        assert np.array_equal(np.stack([walks.last, walks.bonus]), right)
        assert len(np.unique(right[0])) > 15  # most rows end some walk


@pytest.mark.parametrize("made", [Coined, ClosedRight])
def test_right_samplers_of_strangers_pass(loaded, made: type) -> None:
    report = small(sampler=loaded(made)).report
    assert report.verdict == "PASS", report.reasons
    pairs = [c for c in report.checks if c.id.startswith("paired.")]
    assert all(c.status == "info" and "TV <= " in c.note for c in pairs)
    assert len(pairs) == (2 if made is Coined else 0)


def test_a_summed_law_that_is_off_fails(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("audit.sampler_cases.SMALL_TREES", SHORT)
    spec = loaded(Shared)
    results = sampler.run_summed_task(sampler.SummedTask(spec, 1 << 9))
    assert {r.verdict for r in results} >= {"fail"}
    assert all(r.verdict == "pass" for r in sampler.run_summed_task(sampler.SummedTask(loaded(Coined), 1 << 10)))


def test_a_coin_of_zero_that_draws_an_impossible_token_fails_outright(loaded, monkeypatch) -> None:
    monkeypatch.setattr("audit.sampler_cases.SMALL_TREES", SHORT)
    results = sampler.run_summed_task(sampler.SummedTask(loaded(ZeroDrawsFirst), 1 << 9))
    wrong = [r for r in results if r.never]
    assert wrong and all(r.verdict == "fail" and "token 0 after row 1 has probability zero" in r.never for r in wrong)


def test_too_few_walks_to_certify_anything_are_no_pass(loaded) -> None:
    report = small(sampler=loaded(FewWalks)).report
    assert report.verdict == "INCONCLUSIVE"
    assert any("walks differ from the rule's on the same coins" in reason for reason in report.reasons)


def test_a_blind_detector_makes_the_run_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_control, "detect", lambda *_: None)
    report = small().report
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", 3)
    assert "control residual_half.peaked-fixed was not detected" in report.reasons


def test_a_trigger_happy_detector_makes_it_inconclusive_too(monkeypatch: pytest.MonkeyPatch) -> None:
    always = sampler_control.Seen("noise", 1, 2.0)
    monkeypatch.setattr(sampler_control, "detect", lambda *_: always)
    report = small(faults=("sample_and_match", "residual_half")).report
    assert any("is harmless but was flagged" in reason for reason in report.reasons)


def test_rows_without_visits_make_it_inconclusive() -> None:
    report = small(min_visits=7_000).report
    assert report.verdict == "INCONCLUSIVE"
    assert any("too few walks visited row" in reason for reason in report.reasons)


def test_each_detector_alone_sees_a_fault() -> None:
    """With the likelihood ratio taken away, pairs see it; with both gone, the battery does."""
    case = captured_cases(Claims(), ("peaked-fixed",), 32)[0]
    step = case.make()
    from audit.rule_law import multi_round_law

    clean = multi_round_law(step)
    plan = sampler_control.ControlPlan(case.name, step, None, clean, 1e-6, 1, True, battery_walks=8_000, min_visits=50)
    fault = checked_faults(("residual_half",))["residual_half"]
    law = sampler_control.fault_law(fault, step, None, clean)
    assert law.tv >= LEAST_TV
    faulty = fault.wrap(MULTI_ROUND)
    assert sampler_control.by_likelihood(plan, faulty, law).walks < 1_000
    assert sampler_control.by_pairs(plan, faulty).by == "paired"
    assert sampler_control.by_battery(plan, faulty, law, 50) is not None
    right = replace(plan, seed=5)
    assert sampler_control.by_pairs(right, MULTI_ROUND) is None
    assert sampler_control.by_battery(right, sampler_control_walker(), law, 50) is None


def sampler_control_walker():
    from audit.sampler_guard import CoinWalker

    return CoinWalker(MULTI_ROUND)


def test_pairs_keep_their_level_and_see_small_shifts() -> None:
    """150 runs of a right sampler with other coins; a bonus moved in 1% of the walks is seen in 16,000."""
    step = captured_cases(Claims(), ("peaked-fixed",), 32)[0].make()
    rule = PreparedRule(MULTI_ROUND)
    other = Guarded(LoadedSampler("x", Coined(), Claims(), True))
    assert sum(paired(other, rule, step, 400, 0.05, seed).rejects for seed in range(150)) <= 18

    class Moved(Coined):
        def coins(self, coins: Coins) -> Coins:
            return Coins(coins.accept, torch.where(coins.residual > 0.99, 0.0, coins.residual))

    found = paired(Moved(), rule, step, 16_000, 1e-6, 1)
    assert found.rejects
    assert found.differ <= found.upper * 16_000
    same = paired(MULTI_ROUND, rule, step, 16_000, 1e-6, 1)
    assert (same.differ, same.p_value) == (0, 1.0)
    assert same.upper == pytest.approx(-np.log(1e-6) / 16_000, rel=1e-3) == upper_rate(0, 16_000, 1e-6)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (WrongShape, r"select returned bonus of shape \[4000, 1\]; expected \[4000\]"),
        (Crashes, "select raised RuntimeError: illegal memory access"),
    ],
)
def test_samplers_that_do_not_fit_are_refused(loaded, made: type, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        small(sampler=loaded(made), faults=("residual_half",))


def test_unknown_names_are_refused() -> None:
    for changes, message in (
        ({"only": ("peaked",)}, "--only: unknown step 'peaked'"),
        ({"faults": ("nothing",)}, "unknown sampler fault 'nothing'"),
        ({"sampler": "eagle"}, "sampler 'eagle' is unknown; known: greedy"),
        ({"steps": ("a.npz",)}, "expected one of them"),
    ):
        with pytest.raises(InputError, match=message):
            small(**changes)


def test_chains_and_small_steps_fit_what_a_sampler_claims() -> None:
    chain = Claims(trees=False, drafts=("sampled",), vocab=24)
    cases = captured_cases(chain, (), 32)
    assert [(c.vocab, c.chain) for c in cases] == [(24, True)] * 2
    step = chain_of(cases[0].whole())
    assert step.tree.parents.tolist() == [-1, *range(step.tree.n - 1)]
    assert step.laws is not None
    assert {name for name, _ in small_cases(chain)} == {"chain-2", "chain-3"}
    report = check(replace(SMALL, only=("truncated-stochastic",))).report
    assert report.verdict == "PASS"
    assert all(small_step(tree, sampled).tree.n <= 4 for tree, sampled in small_cases(Claims()))


def test_a_captured_step_from_a_file(tmp_path) -> None:
    step = captured_cases(Claims(), ("mixed-stochastic",), 32)[0].make()
    path = tmp_path / "mine.npz"
    tree = step.tree
    np.savez(path, parents=tree.parents, tokens=tree.tokens, active=tree.active, target=step.target, laws=step.laws)
    again = load_step(path).step
    assert torch.equal(again.target, step.target)
    assert again.tree.active_rows == tree.active_rows
    report = small(steps=(str(path),), only=()).report
    assert report.verdict == "PASS", report.reasons
    assert list(report.facts["steps"]) == ["mine"]
    with pytest.raises(InputError, match="its drafts are sampled; the sampler takes fixed"):
        file_cases(Claims(drafts=("fixed",)), (str(path),))


def test_peers_say_what_to_install_when_they_are_missing() -> None:
    try:
        loaded = load_sampler("sglang-greedy")
    except BackendError as refusal:
        assert "pip install" in str(refusal) or "TRITON_INTERPRET" in str(refusal)
    else:
        assert loaded.claims.rule == "greedy"
