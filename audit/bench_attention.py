"""Tree attention behind a long prefix, timed and held against float64 in one run: `python -m audit.bench_attention`.

Our split-K kernel in one or more shapes, our kernel of one program a row and head, `scaled_dot_product_attention` with
a dense mask, FlexAttention with an ancestor mask. Medians of graph replays (of eager calls where a kernel cannot be
captured), the rate at which keys and values are read against the measured copy rate and the floor of reading them once.
Every row carries its error as a multiple of the derived bound of what it declares; what left the bound gets no speed.
PyTorch's kernels are given rotated queries and contiguous keys and values; ours also rotate, write the candidates and
follow pages.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from audit.arguments import natural, positive
from audit.bench_attention_rivals import GROUPS, Rival, parse_shape, rivals
from audit.bench_attention_work import Plan, Workload, errors
from audit.bench_time import Ceilings, Clock, clock, measure_ceilings, on_gpu
from audit.environment import environment
from audit.files import write_atomically
from audit.processes import one_thread
from audit.suite import check_device
from lumotree.contract import DIMS_27B, VARIANTS, Dims
from lumotree.errors import InputError
from lumotree.reference.oracle_tokens import OracleAttention
from lumotree.verifier.kernels.splitk_launch import SplitShape

#: For a run on a CPU that only shows that everything works.
DIMS_DRY = Dims(1, 1, 8, 8, 8, 2, 1, 16, 4, name="dry")
#: Seconds of replays that a median is taken from, and the least and most of them.
_SECONDS, _LEAST, _MOST = 0.25, 3, 30


@dataclass(frozen=True)
class Options:
    """What to run. seconds: no further kernel is started after so many; dry: smallest shapes, whatever the device."""

    device: str
    prefixes: tuple[int, ...]
    batches: tuple[int, ...]
    tries: tuple[SplitShape, ...]
    probs: tuple[str, ...]
    groups: tuple[str, ...]
    tree: str
    seconds: float
    seed: int
    dry: bool


@dataclass(frozen=True)
class Measured:
    """One kernel on one workload. refused: why there is no speed. milliseconds and floor of one layer; accuracy as
    `errors` says; chain: rows of the deepest path with the bits of the kernel's own decoding, and all of them.
    """

    kernel: str
    prefix: int
    batch: int
    refused: str = ""
    probs: str = ""
    mode: str = ""
    layers: int = 0
    clock: Clock | None = None
    floor_ms: float = 0.0
    bytes: int = 0
    flops: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)
    chain: tuple[int, int] | None = None


def run(options: Options, say: Callable[[str], object] = print) -> tuple[list[Measured], dict[str, Any]]:
    """All kernels on all workloads, and the facts of the run. Raises InputError for bad input."""
    check_device(options.device)
    start = time.monotonic()
    found: list[Measured] = []
    with nullcontext() if on_gpu(options.device) else one_thread():
        ceilings = measure_ceilings(options.device, 1 << 16 if options.dry else None)
        for batch in options.batches:
            for prefix in options.prefixes:
                dims = DIMS_DRY if options.dry else DIMS_27B
                work = Workload(Plan(dims, options.tree, prefix, batch, options.device, options.seed))
                for measured in _all(work, options, ceilings, start + options.seconds):
                    say(line(measured, ceilings))
                    found.append(measured)
    facts = {**environment(), **asdict(ceilings), "seconds": time.monotonic() - start, "options": asdict(options)}
    return found, facts


def _all(work: Workload, options: Options, ceilings: Ceilings, end: float) -> Iterator[Measured]:
    truths: dict[str, dict[int, OracleAttention]] = {}
    for label, make in rivals(work, options.groups, options.tries, options.probs):
        blank = Measured(label, work.plan.prefix, work.plan.batch)
        if time.monotonic() > end:
            yield replace(blank, refused="no time was left")
            continue
        try:
            yield _one(blank, make(), work, ceilings, truths)
        except Exception as error:  # whatever a kernel raises on this card is its row of the table
            yield replace(blank, refused=f"{type(error).__name__}: {error}".strip().splitlines()[0][:300])
        if on_gpu(options.device):
            torch.cuda.empty_cache()


def _one(
    blank: Measured, rival: Rival, work: Workload, ceilings: Ceilings, truths: dict[str, dict[int, OracleAttention]]
) -> Measured:
    rival.run(0)
    out = rival.out().clone()
    if rival.probs not in truths:
        truths[rival.probs] = {i: work.truth(i, rival.probs) for i in sorted({0, work.plan.batch - 1})}
    accuracy = errors(work, out, truths[rival.probs])
    measured = replace(
        blank, kernel=rival.name, probs=rival.probs, layers=work.layers, accuracy=accuracy, bytes=work.floor_bytes(),
        flops=work.flops(), floor_ms=1e3 * work.floor_bytes() / ceilings.bytes_s,
        chain=work.native_bits(rival.backend, out) if rival.backend else None,
    )  # fmt: skip
    if accuracy["outside"]:
        return replace(measured, refused=f"{accuracy['outside']:,} of {accuracy['cells']:,} cells outside the bound")
    mode, clock = _time(rival, work)
    return replace(measured, mode=mode, clock=clock)


def _time(rival: Rival, work: Workload) -> tuple[str, Clock]:
    """Mode and milliseconds of one layer, over calls that go through all layers."""
    device = work.plan.device

    def layers() -> None:
        for layer in range(work.layers):
            rival.run(layer)

    if work.plan.dims is DIMS_DRY:
        return "eager", clock(layers, device, 1, graph=False)
    once = clock(layers, device, 1, graph=False).median
    repeat = max(_LEAST, min(_MOST, int(1e3 * _SECONDS / once)))
    try:
        mode, spent = "graph", clock(layers, device, repeat, graph=True)
    except RuntimeError as error:  # a kernel that allocates or synchronises cannot be captured
        torch.cuda.synchronize()
        mode, spent = f"eager ({type(error).__name__} in a graph)", clock(layers, device, repeat, graph=False)
    return mode, Clock(*(getattr(spent, n) / work.layers for n in ("median", "low", "high")))


def line(m: Measured, ceilings: Ceilings) -> str:
    """One row for the terminal."""
    where = f"{m.prefix:>7,} x {m.batch}  {m.kernel[:48]:48}"
    return f"{where} {' | '.join(columns(m, ceilings)[3:])}{'  ' + m.refused if m.refused else ''}"


HEADER = (
    "prefix", "batch", "kernel", "ms (p10-p90)", "x floor", "GB/s", "of copy", "TFLOP/s", "weights", "outside",
    "worst/bound", "rms error", "bits = chain", "mode",
)  # fmt: skip


def columns(m: Measured, ceilings: Ceilings) -> list[str]:
    """Cells of the table."""
    speed = ["-"] * 5
    if m.clock:
        rate, c = m.bytes / m.clock.median * 1e3, m.clock
        speed = [
            f"{c.median:.4g} ({c.low:.4g}-{c.high:.4g})",
            f"{c.median / m.floor_ms:.3g}",
            f"{rate / 1e9:,.4g}",
            f"{100 * rate / ceilings.bytes_s:.3g}%",
            f"{m.flops / c.median / 1e9:.3g}",
        ]
    a = m.accuracy
    held = [f"{a['outside']:,} of {a['cells']:,}", f"{a['worst']:.3g}", f"{a['rms']:.3g}"] if a else ["-"] * 3
    chain = f"{m.chain[0]} of {m.chain[1]}" if m.chain else "-"
    return [f"{m.prefix:,}", str(m.batch), m.kernel, *speed, m.probs or "-", *held, chain, m.mode or "-"]


def markdown(found: Sequence[Measured], facts: dict[str, Any]) -> str:
    """The table, what got no speed and why, and the run."""
    ceilings = Ceilings(facts["bytes_s"], facts["flops_s"])
    lines = ["# Tree attention behind a long prefix, one layer", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(columns(m, ceilings)) + " |" for m in found]
    lines += ["", *(f"* no speed for {m.kernel}, {m.prefix:,} x {m.batch}: {m.refused}" for m in found if m.refused)]
    floors = sorted({(m.batch, m.prefix, m.floor_ms, m.bytes) for m in found if m.bytes})
    lines += ["", "## Floor: keys and values read once at the measured copy rate", ""]
    lines += [f"* {p:,} x {b}: {size / 2**20:,.1f} MiB, {ms:.4g} ms" for b, p, ms, size in floors]
    return "\n".join([*lines, "", "## Run", "", *(f"* {k}: {v}" for k, v in facts.items())]) + "\n"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        for part in text.split(","):
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, got {part!r}")
        return tuple(text.split(","))

    return read


def parser() -> argparse.ArgumentParser:
    """Arguments."""
    top = argparse.ArgumentParser(prog="python -m audit.bench_attention", description=(__doc__ or "").splitlines()[0])
    top.add_argument("--device", default="cpu", help="torch device (default cpu)")
    top.add_argument("--report", metavar="DIR", help="write attention.json and attention.md there")
    top.add_argument("--prefixes", type=_numbers, help="committed tokens (default 8192,32768,131072)")
    top.add_argument("--batches", type=_numbers, help="requests (default 1,4)")
    top.add_argument("--tree", help="named tree of every request (default hydra27)")
    top.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="NAME=N,..",
        help="a shape of our kernel, of split, keys, rows, warps, stages, programs; repeatable (default: the built-in)",
    )  # fmt: skip
    top.add_argument("--probs", type=_words(VARIANTS["probs"]), default=VARIANTS["probs"], help="default fp32,bf16")
    top.add_argument("--only", type=_words(GROUPS), default=GROUPS, help=f"kernels (default {','.join(GROUPS)})")
    top.add_argument("--seconds", type=positive, default=90, help="start nothing after so many seconds (default 90)")
    top.add_argument("--seed", type=natural, default=1, help="seed of every draw (default 1)")
    top.add_argument("--dry-run", action="store_true", help="smallest shapes, to see that everything works")
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns 0, or 2 for bad input."""
    args = parser().parse_args(words)
    dry = args.dry_run
    try:
        options = Options(
            args.device, args.prefixes or ((20, 70) if dry else (8192, 32768, 131072)),
            args.batches or ((2,) if dry else (1, 4)), tuple(map(parse_shape, args.tries or [""])), args.probs,
            args.only, args.tree or ("comb:2" if dry else "hydra27"), args.seconds, args.seed, dry,
        )  # fmt: skip
        found, facts = run(options)
    except InputError as error:
        print(f"bench_attention: {error}", file=sys.stderr)
        return 2
    if args.report:
        data = {"facts": facts, "measured": [asdict(m) for m in found]}
        folder = Path(args.report)
        write_atomically(
            {
                folder / "attention.json": (json.dumps(data, indent=1, default=str) + "\n").encode(),
                folder / "attention.md": markdown(found, facts).encode(),
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
