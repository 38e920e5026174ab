"""Text, baselines, evaluation, a tiny training run, and what is shipped."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from audit.captured_steps import CAPTURES
from lumotree.byte_tokens import END, VOCAB, decode, encode
from lumotree.checkpoint import read_checkpoint
from lumotree.errors import InputError
from lumotree.model_config import FULL, LINEAR
from lumotree.prompts import LONGEST, PER_SET, SETS, SHORTEST, prompt_set, prompts_hash, read_set
from lumotree.shipped import shipped_folder
from lumotree.training import corpus, loop
from lumotree.training.__main__ import main, run_training
from lumotree.training.baselines import baselines, ngram_probabilities
from lumotree.training.corpus import Source, corpus_hash, of_split, split_of, stdlib_sources, token_stream
from lumotree.training.evaluate import evaluate
from lumotree.training.export import save
from lumotree.training.loop import compute_weights, joint_loss, train
from lumotree.training.make_prompts import make_prompts
from lumotree.training.network import initial_weights, trunk
from lumotree.training.settings import SHIPPED, Settings

ROOT = Path(__file__).parents[3]
REPORT = json.loads((ROOT / "reports/small-model/training.json").read_text())
MICRO = replace(
    SHIPPED, hidden=16, intermediate=24, layer_kinds=(LINEAR, FULL), hk=1, hv=2, dk=8, dv=12, q_heads=2, kv_heads=1,
    head_dim=8, rotary_dim=4,
)  # fmt: skip
FAST = Settings(
    steps=12, batch=4, length=64, every=6, warmup=2, rate=2e-2, chained=2, chained_windows=2, dropout=0.0, decay=0.0
)


def test_tokens_round_trip_and_refuse_what_is_no_token() -> None:
    assert encode("aé") == [END, 97, 0xC3, 0xA9]
    assert decode(encode("aé")) == "aé"
    assert decode([97, END, 98]) == "a"
    with pytest.raises(InputError, match=r"token 272 at place 1 .* allowed: 0\.\.271"):
        decode([97, VOCAB])


# Text


def test_sources_are_ordered_and_without_tests_copies_and_tables(tmp_path: Path) -> None:
    prose = "x = 1  # " + "words " * 60
    files = {
        "b.py": prose, "a.py": prose + "a", "copy.py": prose, "test/c.py": prose + "c", "pkg/tests/d.py": prose + "d",
        "tables.py": "# Auto-generated\n" + prose, "short.py": "x", "site-packages/e.py": prose + "e",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(prose.encode() + b"\xe9")
    assert [source.path for source in stdlib_sources(tmp_path)] == ["a.py", "b.py"]


def test_no_sources_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "--out", str(tmp_path / "p.json"), "--stdlib", str(tmp_path)]) == 2
    assert "no Python sources under" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_a_corpus_hash_sees_names_borders_and_bytes() -> None:
    base = [Source("a.py", b"12"), Source("b.py", b"3")]
    others = [
        [Source("a.py", b"1"), Source("b.py", b"23")],
        [Source("c.py", b"12"), Source("b.py", b"3")],
        base[::-1],
        base[:1],
    ]
    assert len({corpus_hash(sources) for sources in [base, *others]}) == 5


def test_split_is_by_path_alone_and_has_the_stated_shares() -> None:
    splits = [split_of(f"folder/file{i}.py") for i in range(4000)]
    assert abs(splits.count("held-out") / 4000 - 0.10) < 0.02
    assert abs(splits.count("validation") / 4000 - 0.05) < 0.015
    assert split_of("urllib/request.py") == "held-out"
    sources = [Source(f"f{i}.py", b"") for i in range(50)]
    parts = [of_split(sources, split) for split in ("train", "validation", "held-out")]
    assert sorted((s for part in parts for s in part), key=lambda s: int(s.path[1:-3])) == sources


def test_stream_has_an_end_before_and_behind_each_document() -> None:
    assert token_stream([Source("a", b"hi"), Source("b", b"\xff")]).tolist() == [END, 104, 105, END, 255, END]


# Prompts


def test_prompt_sets_are_disjoint_hashed_and_held_out() -> None:
    sets = {name: prompt_set(name) for name in SETS}
    assert [len(prompts) for prompts in sets.values()] == [PER_SET, PER_SET]
    files = [{p.path for p in prompts} for prompts in sets.values()]
    assert not files[0] & files[1]
    everything = [p for prompts in sets.values() for p in prompts]
    assert len({p.text for p in everything}) == 2 * PER_SET
    assert {split_of(p.path) for p in everything} == {"held-out"}
    assert all(SHORTEST <= len(p.text.encode()) <= LONGEST for p in everything)
    for prompts in sets.values():
        spans = sorted((p.path, p.offset, p.offset + len(p.text.encode())) for p in prompts)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_stored_prompts_were_cut_from_the_text_that_was_trained_on() -> None:
    stored = json.loads((ROOT / "lumotree/data/prompts.json").read_text())
    assert stored["corpus_sha256"] == REPORT["text"]["sha256"]


def test_a_changed_prompt_and_an_unknown_set_are_refused() -> None:
    stored = json.loads((ROOT / "lumotree/data/prompts.json").read_text())
    stored["sets"]["two"][5]["text"] += " "
    with pytest.raises(InputError, match=r"set 'two' has sha256 .*reinstall"):
        read_set(stored, "two")
    del stored["sets"]["one"][0]["path"]
    with pytest.raises(InputError, match="set 'one' is damaged"):
        read_set(stored, "one")
    with pytest.raises(InputError, match="unknown set 'three'; allowed: one, two"):
        prompt_set("three")


def test_prompts_are_cut_anew_from_this_machines_sources() -> None:
    """Not the stored ones on another Python version, but by the same rules."""
    sources = stdlib_sources()
    made = make_prompts(sources)
    assert make_prompts(sources) == made
    by_path = {source.path: source.data for source in sources}
    trained = b"\0".join(s.data for s in sources if split_of(s.path) != "held-out")
    for name in SETS:
        prompts = read_set(made, name)
        assert prompts_hash(prompts) == made["sha256"][name]
        for p in prompts:
            text = p.text.encode()
            assert by_path[p.path][p.offset : p.offset + len(text)] == text
            assert text not in trained


def test_too_few_held_out_files_are_refused() -> None:
    with pytest.raises(InputError, match="set 'one' needs 43 prompts"):
        make_prompts([Source("train.py", b"x" * 999)])


# Baselines and evaluation


def test_ngram_is_a_law_and_equals_hand_counts() -> None:
    train_text, text = np.array([0, 1, 0, 1, 1], np.int16), np.array([0, 1], np.int16)
    uniform = 1 / 257
    unigram = [(2 + 2 * uniform) / 7, (3 + 2 * uniform) / 7]
    np.testing.assert_allclose(ngram_probabilities(train_text, text, 0), unigram)
    # Before the first token stands nothing, which the training text also has once: then came a 0.
    bigram = [(1 + 1 * unigram[0]) / 2, (2 + 1 * unigram[1]) / 3]
    np.testing.assert_allclose(ngram_probabilities(train_text, text, 1), bigram)
    rng = np.random.default_rng(0)
    sample = rng.integers(0, 257, 400).astype(np.int16)
    ends = [ngram_probabilities(sample, np.append(sample[:9], np.int16(t)), 3)[-1] for t in range(257)]
    assert math.isclose(sum(ends), 1)


def test_baselines_of_a_text_that_each_order_explains_better() -> None:
    text = np.tile(np.array([1, 2, 1, 3], np.int16), 500)
    found = baselines(text, text)
    assert found["uniform"] == pytest.approx(math.log2(257))
    assert found["unigram"] == pytest.approx(1.5, abs=0.01)
    assert found["order-3 n-gram"] < 0.02


def test_evaluation_predicts_every_token_but_the_first_once() -> None:
    weights = {n: w.double() for n, w in initial_weights(MICRO, 0).items()}
    stream = np.random.default_rng(0).integers(0, 256, 150).astype(np.int16)
    scores = evaluate(MICRO, weights, stream, 40, 2, 2)
    assert scores.tokens == 149
    tokens = torch.from_numpy(stream.astype(np.int64))[None]
    nats = [
        -trunk(MICRO, weights, tokens[:, start:end]).logits.log_softmax(-1)[0]
        .gather(1, tokens[0, start + 1 : end + 1, None]).sum()
        for start, end in ((0, 40), (40, 80), (80, 120), (120, 149))
    ]  # fmt: skip
    assert scores.bits == pytest.approx(float(sum(nats)) / 149 / math.log(2), abs=1e-6)
    assert len(scores.agreement) == 2 and all(0 <= share <= 1 for share in scores.agreement)


# Training


def test_training_learns_and_is_reproducible_on_a_cpu(tmp_path: Path) -> None:
    text = token_stream([Source("a", b"the quick brown fox jumps over the lazy dog. " * 40)])
    first, second = (train(MICRO, FAST, text, text[:400], "cpu", lambda line: None) for _ in range(2))
    assert first.curve[-1][1] < first.curve[0][1] < math.log(VOCAB)
    assert first.curve[-1][2] < first.curve[0][2]
    assert all(torch.equal(first.best[name], second.best[name]) for name in first.best)
    assert (first.steps, first.best_step) == (12, 12)


def test_steps_are_planned_from_seconds_without_moving_the_weights() -> None:
    text = token_stream([Source("a", b"the quick brown fox. " * 20)])
    settings = replace(FAST, steps=0, seconds=0.0, batch=1, length=16, chained=1, dropout=0.0)
    said: list[str] = []
    done = train(MICRO, settings, text, text[:64], "cpu", said.append)
    assert done.steps == 1 and "1 steps in 0 s" in said[0]
    weights = {n: w.requires_grad_() for n, w in initial_weights(MICRO, 1).items()}
    step = loop._Step(MICRO, settings, weights, torch.from_numpy(text.astype(np.int64)), "cpu")
    step.run(0.0)
    start = initial_weights(MICRO, 1)
    assert all(torch.equal(w.detach(), start[n]) for n, w in weights.items())
    step.run(1e-2)
    assert not torch.equal(weights["mtp.fc.weight"].detach(), start["mtp.fc.weight"])


def test_the_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    rates = [loop._rate(replace(FAST, warmup=10, rate=1.0), number, 100) for number in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_every_parameter_gets_a_gradient_from_the_joint_loss() -> None:
    weights = {n: w.requires_grad_() for n, w in initial_weights(MICRO, 1).items()}
    windows = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    target, draft = joint_loss(MICRO, FAST, compute_weights(weights), windows)
    (target + draft).backward()
    assert [n for n, w in weights.items() if w.grad is None or not w.grad.abs().max() > 0] == []


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(InputError, match="the text has 20 tokens; a window needs 66"):
        train(MICRO, FAST, np.zeros(20, np.int16), np.zeros(20, np.int16), "cpu")


def test_a_run_writes_what_a_checkpoint_reader_takes(tmp_path: Path) -> None:
    names = ["abc.py", "poplib.py", "bz2.py", "string.py", "types.py"]
    library = Path(corpus.sysconfig.get_paths()["stdlib"])
    folder = tmp_path / "library"
    folder.mkdir()
    for name in names:
        shutil.copy(library / name, folder / name)
    run_training(MICRO, replace(FAST, steps=2, every=1), tmp_path / "out", folder, "cpu", "the command")
    config, weights = read_checkpoint(tmp_path / "out")
    assert config == MICRO and {n: tuple(w.shape) for n, w in weights.items()} == {
        n: p.shape for n, p in MICRO.parameters().items()
    }
    report = json.loads((tmp_path / "out/training.json").read_text())
    stored = (tmp_path / "out/model.safetensors").read_bytes()
    assert report["weights"] == {"bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}
    assert report["command"] == "the command" and report["steps"] == 2 and len(report["curve"]) == 2


def test_weights_beyond_12_mb_are_refused(tmp_path: Path) -> None:
    large = replace(SHIPPED, intermediate=640)
    with pytest.raises(InputError, match=r"the weights take \d+ bytes; allowed: at most 12000000"):
        save(tmp_path / "w", large, initial_weights(large, 0))
    assert not (tmp_path / "w").exists()


# What is shipped


def test_shipped_weights_are_those_of_the_report() -> None:
    config, weights = read_checkpoint(shipped_folder())
    assert config == SHIPPED and len(weights) == len(SHIPPED.parameters())
    stored = (shipped_folder() / "model.safetensors").read_bytes()
    assert REPORT["weights"] == {"bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}
    assert len(stored) <= 12_000_000


def test_shipped_weights_beat_the_best_baseline_on_a_held_out_prompt() -> None:
    """The report's figure is of the whole split on the training machine; this is read off here."""
    config, weights = read_checkpoint(shipped_folder())
    text = [p.text.encode() for p in prompt_set("one")[:6]]
    stream = token_stream([Source("", part) for part in text])
    scores = evaluate(config, compute_weights(dict(weights)), stream, 512, 1, 2)
    assert (
        scores.bits < REPORT["held_out_bits_per_byte"]["order-3 n-gram"] < REPORT["held_out_bits_per_byte"]["unigram"]
    )
    assert min(scores.agreement) > 0.6
    noise = evaluate(config, compute_weights(initial_weights(config, 1)), stream[:512], 512, 1)
    assert noise.bits > REPORT["held_out_bits_per_byte"]["unigram"]


def test_a_wheel_holds_weights_prompts_and_captured_steps(tmp_path: Path) -> None:
    """Built from a copy: a build folder left beside the sources could hold files that no longer are."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("lumotree", "faults", "audit"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    wanted = {"lumotree/weights/model.safetensors", "lumotree/weights/config.json", "lumotree/data/prompts.json"}
    wanted |= {f"audit/captured/{c.name}{end}" for c in CAPTURES for end in (".npz", ".context.npz")}
    assert wanted <= set(names)
