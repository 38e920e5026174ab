"""`lumotree-audit decode`: a right backend passes, a wrong one fails with its place, a blind run is inconclusive."""

import json
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

import audit.decode_controls as controls
import faults.decoding as decoding
from audit import decode_cli
from audit.cli import main, parser
from audit.decode import run_decode
from audit.decode_controls import first_on
from audit.decode_judge import Departure, Verdict, judge_surfaces, judge_tokens, same_runs
from audit.decode_setup import open_backend, open_stack
from audit.decode_stats import stats_of
from audit.decode_types import Mark, ModeRun, Options, Truth, shares
from audit.render.decode import histogram, tables
from audit.render.markdown import render_markdown
from audit.report import from_json, to_json
from lumotree.checkpoint import write_checkpoint
from lumotree.cycle import Decoder
from lumotree.errors import BackendError, InputError
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.random_weights import random_weights
from lumotree.requests import Request
from lumotree.tree_named import chain

CONFIG = ModelConfig(
    vocab=272, hidden=32, intermediate=16, layer_kinds=(LINEAR, FULL), hk=1, hv=2, dk=16, dv=16, q_heads=2, kv_heads=1,
    head_dim=16, rotary_dim=8, mtp_layers=1, positions=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIG, random_weights(CONFIG, 3))
    return str(folder)


@pytest.fixture
def small(checkpoint):
    """Options of a run of seconds."""
    return Options(checkpoint=checkpoint, prompts=1, prompt_tokens=8, tokens=12, workers=0,
                   modes=("plain", "hydra27", "suffix"))  # fmt: skip


@pytest.fixture
def backend_file(tmp_path, monkeypatch):
    """Write a module with a backend and return its name."""

    def write(body):
        (tmp_path / "wrong_backend.py").write_text(textwrap.dedent(body))
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        sys.modules.pop("wrong_backend", None)
        return "wrong_backend:make"

    return write


FAULTY = """
    from faults import CATALOGUE
    from lumotree.backends.torch_backend import TorchBackend

    def make():
        return CATALOGUE[{fault!r}].wrap(TorchBackend())
"""


# Whole runs


def test_our_backend_passes_with_every_control_seen(small, tmp_path):
    words = ["decode", "--checkpoint", small.checkpoint, "--prompts", "1", "--prompt-tokens", "8", "--tokens", "12",
             "--modes", "plain,mtp5,hydra27", "--workers", "0",
             "--report", str(tmp_path / "out")]  # fmt: skip
    assert main(words) == 0
    report = from_json(json.loads((tmp_path / "out" / "report.json").read_text()))
    assert report.verdict == "PASS"
    wanted = {f"{law}_{what}" for law in ("greedy", "sampled") for what in ("tokens", "R", "C", "K", "D")}
    assert {c.id for c in report.checks} == wanted | {"another_batch", "oracle"}
    assert all(c.cells > 20 for c in report.checks)
    assert [c.fault for c in report.controls] == list(decoding.DECODING)
    facts = report.facts["decode"]
    assert [(m["mode"], m["law"]) for m in facts["modes"]] == [
        (m, law) for law in ("greedy", "sampled") for m in ("plain", "mtp5", "hydra27")
    ]
    assert facts["cycle_cost"]["forward_ratio"] > 0
    ElementTree.parse(tmp_path / "out" / "accepted-length.svg")


@pytest.mark.parametrize(
    ("fault", "surface", "layer"),
    [
        ("state_not_published.gdn", "R", 0),
        ("history_not_published.conv", "C", 0),
        ("kv_remap_off_by_one.attention", "K", 0),
    ],
)
def test_a_wrong_backend_fails_with_request_cycle_surface_and_layer(small, backend_file, fault, surface, layer):
    name = backend_file(FAULTY.format(fault=fault))
    report = run_decode(replace(small, backend=name, modes=("hydra27",), laws=("greedy",), controls=False)).report
    assert (report.verdict, report.exit_code) == ("FAIL", 1)
    first = report.findings[0]
    assert first.check == f"greedy_{surface}"
    assert (first.request, first.layer) == (0, layer)
    assert first.case.startswith("hydra27 greedy, cycle 0")
    assert first.reproduce.endswith("--modes hydra27 --laws greedy")
    assert any(f"surface {surface}" in reason and "cycle 0" in reason for reason in report.reasons)


def test_a_fault_of_trees_alone_shows_in_the_first_cycle_that_branches(small, backend_file):
    name = backend_file(FAULTY.format(fault="sibling_published.conv"))
    report = run_decode(replace(small, backend=name, modes=("hydra27",), laws=("sampled",), controls=False)).report
    assert report.exit_code == 1
    first = report.findings[0]
    assert first.check == "sampled_C"
    assert "cycle 0" not in first.case


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_a_run_that_compares_ends_alone_still_names_the_first_cycle(small, backend_file, law):
    name = backend_file(FAULTY.format(fault="state_not_published.gdn"))
    report = run_decode(
        replace(small, backend=name, modes=("hydra27",), laws=(law,), controls=False, every=False)
    ).report
    assert report.exit_code == 1
    first = report.findings[0]
    assert (first.check, first.request, first.layer) == (f"{law}_R", 0, 0)
    assert first.case.startswith(f"hydra27 {law}, cycle 0")


def test_the_command_exits_1_and_names_the_place(small, backend_file, capsys):
    name = backend_file(FAULTY.format(fault="history_not_published.conv"))
    words = ["decode", "--checkpoint", small.checkpoint, "--backend", name, "--prompts", "1", "--prompt-tokens", "8",
             "--tokens", "4", "--modes", "plain", "--laws", "greedy", "--workers", "0"]  # fmt: skip
    assert main(words) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "greedy_C: " in text and "first in plain greedy, cycle 0, conv, request 0, layer 0" in text


@pytest.mark.parametrize("method", ["attention_verify", "native_step"])
def test_logits_that_are_no_numbers_fail_the_run(small, backend_file, method):
    name = backend_file(f"""
        from lumotree.backends.torch_backend import TorchBackend

        class Nan(TorchBackend):
            def {method}(self, *args):
                super().{method}(*args)
                out = args[-2]
                (out if hasattr(out, "fill_") else out.attention if out.attention is not None else out.gdn
                 if out.gdn is not None else out.conv).fill_(float("nan"))

        make = Nan
    """)
    report = run_decode(replace(small, backend=name, modes=("mtp5", "hydra27"), laws=("greedy",))).report
    assert report.exit_code == 1
    assert any("not a finite number" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("where", "piece"),
    [
        ("len(batch.state_slot) == 1", "plain greedy in another batch"),
        ("batch.parent.numel() > 2 and bool((batch.parent[1:] == 0).any())", "decoding of known answers"),
    ],
)
def test_a_piece_that_ends_early_fails_though_all_before_it_was_right(small, backend_file, where, piece):
    name = backend_file(f"""
        from lumotree.backends.torch_backend import TorchBackend

        class NanLater(TorchBackend):
            def attention_verify(self, ops, pool, batch, ws, out, layer):
                super().attention_verify(ops, pool, batch, ws, out, layer)
                if int(batch.prefix_len.max()) >= 14 and {where}:
                    out.fill_(float("nan"))

        make = NanLater
    """)
    report = run_decode(replace(small, backend=name, modes=("plain",), laws=("greedy",))).report
    assert (report.verdict, report.exit_code) == ("FAIL", 1)
    assert [c.id for c in report.checks if c.status == "fail"] == ["logits"]
    assert any(piece in reason and "not a finite number" in reason for reason in report.reasons)


def test_a_control_that_goes_unseen_makes_the_run_inconclusive(small, monkeypatch):
    seen, blind = decoding.FAULTS[0], replace(decoding.FAULTS[0], id="nothing.gdn", make=Decoder)
    for name in list(decoding.DECODING):
        monkeypatch.delitem(decoding.DECODING, name)
    for fault in (seen, blind):
        monkeypatch.setitem(decoding.DECODING, fault.id, fault)
    report = run_decode(replace(small, modes=("hydra27",), laws=("greedy",))).report
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", 3)
    assert report.reasons == ("control nothing.gdn was not detected",)
    assert [(c.fault, c.detected) for c in report.controls] == [(seen.id, True), (blind.id, False)]


def test_faults_that_take_two_requests_are_seen_with_one_prompt(small):
    stack = open_stack(small)
    request = Request(0, tuple(range(60, 70)), 12)
    ids = ("slot_of_finished_request.gdn", "coins_by_place.batch")
    assert [s.control.detected for s in controls.run_controls(stack, [request], ids).seen] == [True, True]


def test_without_controls_nothing_passes(small):
    report = run_decode(replace(small, modes=("plain",), laws=("greedy",), controls=False)).report
    assert report.verdict == "INCONCLUSIVE"
    assert "no positive control ran" in report.reasons


def test_a_run_whose_paths_all_end_at_the_root_is_inconclusive(small, monkeypatch):
    monkeypatch.setattr("audit.decode_controls.hydra27", lambda: chain(1))
    for name in list(decoding.DECODING):
        monkeypatch.delitem(decoding.DECODING, name)
    report = run_decode(replace(small, modes=("suffix",), laws=("greedy",))).report
    assert report.verdict == "INCONCLUSIVE"
    assert any("only 1 different rows were accepted ends" in reason for reason in report.reasons)


def test_worker_processes_find_what_one_process_finds(small):
    few = replace(small, modes=("hydra27",), laws=("greedy",), controls=False, tokens=5)
    here, there = (run_decode(replace(few, workers=n)) for n in (0, 1))
    assert [r.outputs for r in here.runs] == [r.outputs for r in there.runs]
    assert [r.marks for r in here.runs] == [r.marks for r in there.runs]
    assert [(c.id, c.cells, c.status) for c in here.report.checks] == [
        (c.id, c.cells, c.status) for c in there.report.checks
    ]


def test_workers_share_the_requests_of_a_long_run(small):
    few = replace(small, modes=("plain", "mtp5"), controls=False, tokens=5, batch=1)
    here, there = (run_decode(replace(few, workers=n)) for n in (0, 2))
    assert len(here.runs[0].outputs) > 1
    assert [dict(r.outputs) for r in here.runs] == [dict(r.outputs) for r in there.runs]
    assert [dict(r.paths) for r in here.runs] == [dict(r.paths) for r in there.runs]
    assert [r.forwards for r in here.runs] == [r.forwards for r in there.runs]
    assert [(c.id, c.cells, c.bitwise_cells, c.status) for c in here.report.checks] == [
        (c.id, c.cells, c.bitwise_cells, c.status) for c in there.report.checks
    ]


@pytest.mark.parametrize("workers", [0, 1, 2, 14])
@pytest.mark.parametrize(("requests", "batch"), [(1, 4), (4, 4), (5, 4), (6, 4), (10, 4), (17, 16), (86, 16), (86, 8)])
def test_every_share_has_a_full_batch_and_a_request_that_comes_later(workers, requests, batch):
    split = shares(Options(batch=batch), requests, workers)
    sizes = [sum(share.has(number) for number in range(requests)) for share in split]
    assert sum(sizes) == requests and len(split) <= max(workers, 1)
    assert len(split) == 1 or min(sizes) > batch


def test_numbers_that_fail_in_a_later_prompt_chunk_fail_the_run(small, backend_file):
    name = backend_file("""
        from lumotree.backends.torch_backend import TorchBackend

        class NanLate(TorchBackend):
            def attention_verify(self, ops, cache, batch, ws, out, layer):
                super().attention_verify(ops, cache, batch, ws, out, layer)
                if int(batch.prefix_len.max()) >= 32:
                    out.fill_(float("nan"))

        make = NanLate
    """)
    late = replace(small, backend=name, prompt_tokens=40, tokens=4, modes=("plain", "mtp5"), controls=False)
    report = run_decode(late).report
    assert report.exit_code == 1 and any("not a finite number" in reason for reason in report.reasons)


def test_a_failure_that_does_not_come_again_keeps_its_place(small, backend_file):
    name = backend_file("""
        from lumotree.backends.torch_backend import TorchBackend

        class Once(TorchBackend):
            calls = 0

            def gdn_publish(self, pool, batch, accepted, ws, layers):
                super().gdn_publish(pool, batch, accepted, ws, layers)
                Once.calls += 1
                if Once.calls == 5:
                    pool[layers[0], batch.state_slot.long(), 0, 0, 0] += 1.0

        make = Once
    """)
    once = replace(small, backend=name, every=False, modes=("mtp5",), laws=("greedy",), controls=False)
    report = run_decode(once).report
    assert report.exit_code == 1
    failed = {check.id for check in report.checks if check.status == "fail"}
    assert "greedy_R" in failed and failed <= {finding.check for finding in report.findings}


def test_a_departure_in_any_share_of_a_long_run_is_found(small, backend_file):
    name = backend_file("""
        from lumotree.backends.torch_backend import TorchBackend

        class Late(TorchBackend):
            def gdn_publish(self, pool, *args):
                super().gdn_publish(pool, *args)
                pool.mul_(1.5)

        make = Late
    """)
    few = replace(small, backend=name, modes=("mtp5",), controls=False, tokens=5, batch=1, workers=2)
    run = run_decode(few)
    assert run.report.exit_code == 1
    assert {f.request for f in run.report.findings if f.check == "greedy_R"} == set(run.runs[0].outputs)


def test_surfaces_may_be_served_by_different_backends(small):
    mixed = "gdn=reference,conv=torch,attention=reference"
    run = run_decode(replace(small, backend=mixed, modes=("hydra27",), laws=("greedy",), controls=False, tokens=6))
    assert all(c.status == "pass" for c in run.report.checks)
    assert run.report.backend == "reference+torch+reference"


def test_the_benchmark_is_left_out_where_the_model_is_too_short(small, monkeypatch):
    monkeypatch.setattr("audit.decode.BENCH_TOKENS", 250)
    options = replace(small, modes=("mtp5", "hydra27"), laws=("greedy",), controls=False, tokens=2)
    assert "cycle_cost" not in run_decode(options).report.facts["decode"]


def test_only_the_end_is_compared_when_asked(small):
    whole = run_decode(replace(small, every=False, modes=("hydra27",), controls=False))
    assert [len(r.marks) for r in whole.runs] == [2, 2]
    assert all(c.status == "pass" for c in whole.report.checks)


# Bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--modes", "best"], "--modes: expected some of plain, mtp5, hydra27, suffix, budget, got 'best'"),
        (["--laws", ","], "--laws: expected some of greedy, sampled, got 'none'"),
        (["--backend", "gdn=torch"], "no backend named for conv, attention"),
        (["--backend", "gdn=torch,gdn=torch"], "expected NAME or gdn=NAME,conv=NAME,attention=NAME"),
        (["--backend", "nobody"], "nobody"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
        (["--prompt-file", "/nowhere.json"], "expected a JSON list of token lists"),
        (["--tokens", "300"], "need 311 positions; the model has 256"),
    ],
)
def test_bad_input_is_refused_with_exit_2(checkpoint, capsys, words, message):
    start = ["decode", "--checkpoint", checkpoint, "--prompt-tokens", "12", "--workers", "0"]
    assert main([*start, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("[[]]", "empty prompt"),
        ("[[1, 272]]", "token 272 at position 1 is outside the vocabulary; allowed: 0..271"),
        ("[]", "non-empty JSON list"),
        ('[["a"]]', "lists of token numbers"),
        ("{", "expected a JSON list"),
    ],
)
def test_bad_prompts_are_refused_with_exit_2(checkpoint, tmp_path, capsys, prompts, message):
    (tmp_path / "prompts.json").write_text(prompts)
    words = ["decode", "--checkpoint", checkpoint, "--prompt-file", str(tmp_path / "prompts.json"), "--workers", "0"]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_cannot_be_judged_by_bits_is_refused(backend_file):
    name = backend_file("""
        from lumotree.backends.torch_backend import TorchBackend
        from lumotree.contract import Contract

        class Loose(TorchBackend):
            contract = Contract(algebra=("gdn",))

        make = Loose
    """)
    with pytest.raises(BackendError, match="claims only 'algebra' for gdn; decode compares bits"):
        open_backend(name)


def test_a_backend_that_lacks_a_surface_is_named_as_the_user_named_it(tmp_path, monkeypatch):
    (tmp_path / "conv_alone.py").write_text(
        "from faults import Faulty\nfrom lumotree.backends.torch_backend import TorchBackend\n"
        "class Kernel(Faulty):\n    def __init__(self):\n"
        "        super().__init__(TorchBackend(), gdn_verify=None, gdn_publish=None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendError, match="decode: backend 'conv_alone:Kernel' has no gdn"):
        open_backend("conv_alone:Kernel")


def test_a_backend_without_a_surface_is_refused(backend_file):
    name = backend_file("""
        from lumotree.backends.torch_backend import TorchBackend

        class Part(TorchBackend):
            attention_verify = kv_publish = None

        make = Part
    """)
    with pytest.raises(BackendError, match="has no attention; combine backends"):
        open_backend(name)


def test_a_device_that_is_not_there_is_refused(small, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="--device cuda: this machine has no GPU"):
        run_decode(replace(small, device="cuda"))


def test_the_full_run_is_both_sets_whole():
    def options(*words):
        return decode_cli.options_of(parser().parse_args(["decode", *words]), "x")

    full = options("--full")
    assert (full.prompts, full.prompt_tokens, full.tokens, full.every) == (43, None, 1024, False)
    assert options("--full", "--tokens", "9").tokens == 9
    assert options() == Options(command="x")


# The comparison


def marks(*digests, number=0):
    return tuple(Mark(number, i, 5 + i, {("R", "recurrent", 0): d}) for i, d in enumerate(digests))


RUN = ModeRun("m", "greedy", 0, {0: (4, 5, 6)}, {0: (0, 1, 1)}, {0: (1, 1)}, marks(b"a", b"b"), 3, 1.0, 1.0, 2)
TRUTH = Truth({0: (4, 5, 6)}, {0: {5: {("R", "recurrent", 0): b"a"}, 6: {("R", "recurrent", 0): b"b"}}})


def judged(run, truth=TRUTH):
    verdict = Verdict.empty()
    judge_tokens(verdict, run, truth)
    judge_surfaces(verdict, run, truth)
    return verdict


def test_equal_runs_have_no_departure():
    verdict = judged(RUN)
    assert verdict.departures == []
    assert (verdict.cells["tokens"], verdict.cells["R"], verdict.equal) == (3, 2, verdict.cells)


@pytest.mark.parametrize("output", [(4, 5, 7), (4, 5), (4, 5, 6, 6)])
def test_a_token_too_few_too_many_or_another_is_a_departure(output):
    (departure,) = judged(replace(RUN, outputs={0: output}, ends={0: (0, 1, 1, 1)[: len(output)]})).departures
    assert (departure.what, departure.cycle) == ("tokens", 1)


def test_a_stopped_run_is_judged_by_what_it_emitted():
    assert judged(replace(RUN, outputs={0: (4, 5)}, stopped="asked to")).departures == []


@pytest.mark.parametrize("changed", [marks(b"a", b"x"), (*marks(b"a"), replace(marks(b"b")[0], cycle=1, committed=9))])
def test_other_bits_and_another_length_are_departures(changed):
    verdict = judged(replace(RUN, marks=changed))
    assert [(d.what, d.cycle, d.layer) for d in verdict.departures] == [("R", 1, 0)]
    assert verdict.first() == verdict.departures[0]


def test_a_surface_that_only_plain_decoding_has_is_a_departure():
    more = {**TRUTH.digests[0][6], ("D", "hidden", 0): b"h"}
    verdict = judged(RUN, replace(TRUTH, digests={0: {**TRUTH.digests[0], 6: more}}))
    assert [(d.what, d.part) for d in verdict.departures] == [("D", "hidden")]


def test_runs_that_differ_are_told_apart():
    same = same_runs(RUN, RUN)
    assert (same.departures, sum(same.cells.values())) == ([], 5)
    assert [d.what for d in same_runs(RUN, replace(RUN, marks=marks(b"a", b"x"))).departures] == ["R"]
    assert [d.what for d in same_runs(RUN, replace(RUN, outputs={0: (4, 5, 5)})).departures] == ["tokens"]
    later = same_runs(RUN, replace(RUN, marks=(replace(RUN.marks[0], committed=99),)))
    assert (later.departures, later.cells["R"]) == ([], 0)  # a length that only one of them had tells nothing


def test_a_fault_counts_only_where_it_strikes_first():
    def at(what, cycle):
        return Departure("r", what, 0, cycle, "a", "b")

    assert first_on([at("R", 2), at("C", 3)], "R") == at("R", 2)
    assert first_on([at("R", 2), at("C", 3)], "C") is None
    assert first_on([at("R", 2), at("tokens", 2)], "R") == at("R", 2)
    assert first_on([at("R", 2), at("tokens", 2)], "tokens") is None
    assert first_on([at("tokens", 2), at("R", 3)], "tokens") == at("tokens", 2)
    assert first_on([], "R") is None


def test_statistics_are_pooled_per_request_and_over_runs():
    one = replace(RUN, paths={0: (1, 3), 1: (2,)}, decode_tokens=6, decode_seconds=2.0)
    other = replace(one, run=1, paths={0: (3, 5), 1: (4,)}, forwards=5)
    stats = stats_of([one, other])
    assert stats.per_cycle == 3.0
    assert (stats.per_request, stats.per_run) == ((3.0, 3.0), (2.0, 4.0))
    assert (stats.forwards, stats.tokens_per_s) == ((3, 5), (3.0, 3.0))
    assert stats.lengths == {"1": 1, "2": 1, "3": 2, "4": 1, "5": 1}


def test_every_fault_is_named_and_has_a_surface():
    for name, fault in decoding.DECODING.items():
        assert fault.id == name
        assert fault.surface in ("R", "C", "K", "D", "tokens", "batch")
        assert fault.statement and fault.provenance
    assert controls.TOKENS > 8


# The report


def test_a_report_of_modes_renders_everywhere(small):
    report = run_decode(replace(small, modes=("hydra27",), laws=("greedy",), controls=False, runs=2)).report
    assert {c.id: c.status for c in report.checks}["repeat"] == "pass"
    assert len(report.facts["decode"]["modes"][0]["per_run"]) == 2
    assert from_json(json.loads(json.dumps(to_json(report)))) == report
    ((title, (header, rows)),) = tables(report)
    assert (title, header[0], rows[0][0]) == ("Modes", "mode", "hydra27 greedy")
    assert "| hydra27 greedy |" in render_markdown(report)
    picture = ElementTree.fromstring(histogram(report))
    texts = [t.text for t in picture.iter() if t.tag.endswith("text")]
    assert any(t.startswith("hydra27 greedy: mean") for t in texts)
