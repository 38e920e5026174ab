"""`python -m lumotree.training train --out FOLDER`, `... prompts --out FILE` and `... drafts --out FILE`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from lumotree.cycle_types import Stack
from lumotree.errors import InputError
from lumotree.model_config import ModelConfig
from lumotree.mtp import default_backend
from lumotree.shipped import shipped_model
from lumotree.training.accepted import accepted_lengths
from lumotree.training.baselines import baselines
from lumotree.training.corpus import of_split, stdlib_sources, token_stream
from lumotree.training.evaluate import evaluate
from lumotree.training.export import REPORT, save, training_report
from lumotree.training.loop import compute_weights, train
from lumotree.training.make_prompts import make_prompts
from lumotree.training.settings import SHIPPED, Settings


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0, or 2 for input that is refused."""
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(words)
    try:
        if args.command == "prompts":
            text = json.dumps(make_prompts(stdlib_sources(args.stdlib)), indent=1)
            args.out.write_text(text + "\n", encoding="utf-8")
        elif args.command == "drafts":
            text = json.dumps(_drafts(args.prompts, args.tokens, args.device), indent=1)
            args.out.write_text(text + "\n", encoding="utf-8")
        else:
            run_training(SHIPPED, _settings(args), args.out, args.stdlib, args.device, shlex.join(
                ["python", "-m", "lumotree.training", *words]))  # fmt: skip
    except InputError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


def run_training(
    config: ModelConfig, settings: Settings, out: Path, stdlib: Path | None, device: str, command: str
) -> None:
    """Train, evaluate on the held-out files as exported, and write weights, config.json and training.json to `out`.

    Weights are written whenever the validation improves, so that a run cut short leaves its best ones.
    """
    sources = stdlib_sources(stdlib)
    text, validation, held_out = (
        token_stream(of_split(sources, split))
        for split in ("train", "validation", "held-out")  # type: ignore[arg-type]
    )
    print(f"{len(sources)} files; tokens: train {len(text)}, validation {len(validation)}, held out {len(held_out)}")
    trained = train(config, settings, text, validation, device, _say, lambda best, _: save(out, config, best))
    save(out, config, trained.best)
    scores = evaluate(
        config, compute_weights(trained.best), held_out, settings.length, settings.batch, settings.chained, device
    )
    report = training_report(settings, sources, trained, scores, baselines(text, held_out), out, device, command)
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: report[k] for k in ("held_out_bits_per_byte", "draft_agreement", "steps", "seconds")}))


def _drafts(prompts: int, tokens: int, device: str) -> dict[str, Any]:
    model = shipped_model(device)
    backend = default_backend(model.device)
    found = accepted_lengths(Stack(model, backend, model.draft_head(backend)), prompts, tokens, say=_say)
    return {
        "what": "tokens a cycle of the shipped model on stored prompts, decoded together",
        "prompts_of_each_set": prompts,
        "tokens": tokens,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "backend": backend.name,
        "drafters": [one.as_dict() for one in found],
    }


def _say(line: str) -> None:
    print(line, flush=True)


def _settings(args: argparse.Namespace) -> Settings:
    given = {f.name: getattr(args, f.name) for f in fields(Settings) if getattr(args, f.name) is not None}
    return replace(Settings(), **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lumotree.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("train", "train the shipped model"),
        ("prompts", "cut the stored prompts"),
        ("drafts", "measure how far each drafter gets on the shipped model"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--out", type=Path, required=True, help="folder of the weights, or file of the result")
        if name != "drafts":
            sub.add_argument("--stdlib", type=Path, help="folder of a standard library (default: the running Python's)")
        if name != "prompts":
            sub.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if name == "drafts":
            sub.add_argument("--prompts", type=int, default=3, help="of each of the two sets (default 3)")
            sub.add_argument("--tokens", type=int, default=96, help="that each request emits (default 96)")
        if name == "train":
            for f in fields(Settings):
                sub.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), help=f"default {f.default}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
