"""`lumotree-audit decode`: arguments, and what they start."""

from __future__ import annotations

import argparse
from typing import Any

from audit.arguments import natural, positive

#: What `--full` changes: all prompts, whole, at full length; surfaces compared at the end of each request.
FULL = {"prompts": 43, "prompt_tokens": None, "tokens": 1024, "every": False}


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`; `run` is called with the parsed arguments and the command."""
    sub = commands.add_parser("decode", help="decode with trees and hold every token and every surface against plain "
                              "decoding")  # fmt: skip
    sub.add_argument("--backend", default="torch", help="one backend, or gdn=NAME,conv=NAME,attention=NAME")
    sub.add_argument("--checkpoint", default=None, metavar="DIR", help="model folder (config.json, safetensors); "
                     "default: the small model that is shipped")  # fmt: skip
    sub.add_argument("--device", default="cpu", help="torch device, for example cuda")
    sub.add_argument("--full", action="store_true", help="both sets of 43 prompts, whole, 1,024 tokens")
    sub.add_argument("--prompts", type=positive, default=None, metavar="N", help="prompts of each set (default 2)")
    sub.add_argument("--prompt-tokens", type=positive, default=None, metavar="N", help="most tokens of a prompt "
                     "(default 48)")  # fmt: skip
    sub.add_argument("--prompt-file", default=None, metavar="FILE", help="JSON list of token lists instead")
    sub.add_argument("--eos", type=natural, default=None, metavar="TOKEN", help="end-of-sequence token of a "
                     "--checkpoint or --prompt-file")  # fmt: skip
    sub.add_argument("--tokens", type=positive, default=None, metavar="N", help="tokens to emit (default 64)")
    sub.add_argument("--modes", default=None, metavar="LIST", help="of plain,mtp5,hydra27,suffix,budget")
    sub.add_argument("--laws", default=None, metavar="LIST", help="of greedy,sampled")
    sub.add_argument("--batch", type=positive, default=None, metavar="N", help="requests at a time (default 4; with "
                     "--full 16 on a CPU, all on a GPU)")  # fmt: skip
    sub.add_argument("--runs", type=positive, default=1, metavar="N", help="repetitions; run r samples with seed + r")
    sub.add_argument("--seed", type=natural, default=1, help="seed of every draw (default 1)")
    sub.add_argument("--workers", type=natural, default=None, help="worker processes, 0 = this one")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md and "
                     "accepted-length.svg there")  # fmt: skip
    sub.set_defaults(run=run)


def options_of(args: argparse.Namespace, command: str) -> Any:
    """The options that parsed arguments mean."""
    from audit.decode_types import Options

    chosen: dict[str, Any] = dict(FULL) if args.full else {}
    if args.full:
        chosen["batch"] = 16 if args.device == "cpu" else 86
    for name in ("prompts", "prompt_tokens", "tokens", "batch"):
        if getattr(args, name) is not None:
            chosen[name] = getattr(args, name)
    for name in ("modes", "laws"):
        if getattr(args, name) is not None:
            chosen[name] = tuple(part.strip() for part in getattr(args, name).split(",") if part.strip())
    for name in ("backend", "checkpoint", "device", "prompt_file", "eos", "runs", "seed", "workers"):
        chosen[name] = getattr(args, name)
    return Options(**chosen, command=command)


def run(args: argparse.Namespace, command: str) -> int:
    """Run the command and return its exit code. Raises InputError."""
    from audit.decode import run_decode
    from audit.render import start_report, write_report
    from audit.render.decode import histogram, write_picture
    from audit.render.terminal import print_report

    if args.report:
        start_report(args.report)
    report = run_decode(options_of(args, command)).report
    if args.report:
        write_report(report, args.report)
        write_picture(args.report, histogram(report))
    print_report(report)
    return report.exit_code
