"""The fused convolution against what it stands for, in one run: bits, then medians, bytes and floors.

    python -m audit.bench_conv --device cuda

Verification: one launch and three copies a layer (`conv.verify` and the split into GDN's operands) against one launch.
Publication: three launches (`conv.publish`, `kv.publish`) against one. No speed is printed where bits differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit.arguments import positive
from audit.bench_scene import Scene
from audit.bench_time import Ceilings, Clock, Work, clock, measure_ceilings, on_gpu
from audit.environment import environment
from audit.families import SHAPES
from audit.files import write_atomically
from audit.render import check_writable
from audit.suite import check_device
from lumotree.contract import Dims
from lumotree.errors import InputError
from lumotree.verifier.kernels import INTERPRETED, conv, fused_conv, kv
from lumotree.verifier.kernels.workspace import AttentionWorkspace

#: Attention layers of a hybrid model: one for three GDN layers.
_GDN_LAYERS_AN_ATTENTION_LAYER = 3


@dataclass(frozen=True)
class Line:
    """One comparison. differing: elements whose bits differ, of `compared`; times: ms of all layers, None if not timed.

    work: the least that the fused form must move.
    """

    what: str
    batch: int
    compared: int
    differing: int
    work: Work
    unfused: Clock | None = None
    fused: Clock | None = None


class Verification:
    """All layers' convolutions of a scene, both ways, into buffers of their own."""

    def __init__(self, scene: Scene) -> None:
        d, rows, self.scene = scene.dims, scene.batch.rows, scene
        self.pool, self.ops, self.batch = scene.histories(), scene.conv, scene.batch
        self.sizes = [d.hk * d.dk, d.hk * d.dk, d.hv * d.dv]

        def bf16(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=scene.device)

        self.mixed = bf16(rows, d.conv_channels)
        self.recorded = [bf16(d.layers, rows, d.conv_channels) for _ in range(2)]
        self.parts = [[tuple(bf16(rows, size) for size in self.sizes) for _ in range(d.layers)] for _ in range(2)]

    def unfused(self) -> None:
        """The convolution, then the split."""
        for layer, parts in enumerate(self.parts[0]):
            conv.verify(self.ops[layer], self.pool, self.batch, self.recorded[0], self.mixed, layer)
            for part, taken in zip(parts, torch.split(self.mixed, self.sizes, 1), strict=True):
                part.copy_(taken)

    def fused(self) -> None:
        """One launch a layer."""
        for layer, (q, k, v) in enumerate(self.parts[1]):
            fused_conv.verify(self.ops[layer], self.pool, self.batch, self.recorded[1], (q, k, v), layer)

    def differing(self) -> tuple[int, int]:
        """Elements that differ, of how many: q, k, v and the record of active rows."""
        self.unfused()
        self.fused()
        active = self.batch.active
        pairs = [(self.recorded[0][:, active], self.recorded[1][:, active])]
        for mine, theirs in zip(*self.parts, strict=True):
            pairs += [(a[active], b[active]) for a, b in zip(mine, theirs, strict=True)]
        return _differing(pairs)

    def work(self) -> Work:
        """x read, q, k, v and the record written, taps and histories read; two operations a tap, four of the SiLU."""
        d, active = self.scene.dims, int(self.batch.active.sum())
        row = 3 * active + d.conv_width + self.scene.requests * (d.conv_width - 1)
        return Work(2 * d.layers * d.conv_channels * row, d.layers * active * d.conv_channels * (2 * d.conv_width + 4))


class Publication:
    """Histories and KV of a scene, both ways, in pools of their own."""

    def __init__(self, scene: Scene, rows: int) -> None:
        d, self.scene, self.rows = scene.dims, scene, rows
        self.kv_layers = max(1, d.layers // _GDN_LAYERS_AN_ATTENTION_LAYER)
        self.accepted, self.batch = scene.accepted(rows), scene.batch
        self.pools = [scene.histories() for _ in range(2)]
        self.caches = [scene.cache(self.kv_layers) for _ in range(2)]
        self.recorded = torch.stack([ops.x for ops in scene.conv])
        moved = (self.kv_layers, scene.requests, len(scene.longest), d.kv_heads, d.head_dim)
        empty = torch.zeros(1, dtype=torch.int32, device=scene.device)
        scratch = [torch.zeros(moved, dtype=torch.bfloat16, device=scene.device) for _ in range(2)]
        self.workspace = AttentionWorkspace(empty, empty, *scratch)

    def unfused(self) -> None:
        """Three launches."""
        conv.publish(self.pools[0], self.batch, self.accepted, self.recorded, range(self.scene.dims.layers))
        kv.publish(self.caches[0], self.batch, self.accepted, self.workspace, range(self.kv_layers))

    def fused(self) -> None:
        """One launch."""
        histories = fused_conv.Histories(self.pools[1], self.recorded, range(self.scene.dims.layers))
        moves = fused_conv.Moves(self.caches[1], range(self.kv_layers))
        fused_conv.publish(self.batch, self.accepted, histories, moves)

    def differing(self) -> tuple[int, int]:
        """Elements of the pools and caches that differ, of how many. To be called before anything was published."""
        self.unfused()
        self.fused()
        (a, b), (x, y) = self.pools, self.caches
        return _differing([(a, b), (x.k, y.k), (x.v, y.v)])

    def work(self) -> Work:
        """Histories written, and as much read; K and V of the accepted rows read and written."""
        d, requests = self.scene.dims, self.scene.requests
        history = 2 * d.layers * d.conv_channels * (d.conv_width - 1)
        moved = 2 * self.kv_layers * self.rows * d.kv_heads * d.head_dim
        return Work(2 * requests * 2 * (history // 2 + moved), 0)


def _differing(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    integers = [(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)) for a, b in pairs]
    return sum(int((a != b).sum()) for a, b in integers), sum(a.numel() for a, _ in integers)


def compare(dims: Dims, tree: str, requests: int, rows: int, device: str, repeat: int) -> list[Line]:
    """Verification and publication of one batch. Raises InputError when the tree has no path of `rows` rows."""
    scene = Scene(dims, tree, requests, torch.device(device))
    lines = []
    both: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("verify", lambda: Verification(scene)), ("publish", lambda: Publication(scene, rows)),
    )  # fmt: skip
    for what, make in both:
        work = make()
        differing, compared = work.differing()
        line = Line(what, requests, compared, differing, work.work())
        if not differing and not INTERPRETED:
            clocks = [clock(call, device, repeat, graph=True) for call in (work.unfused, work.fused)]
            line = replace(line, unfused=clocks[0], fused=clocks[1])
        lines.append(line)
    return lines


def table(lines: Sequence[Line], ceilings: Ceilings) -> str:
    """One line a comparison: bits, ms, speed-up, bytes and the distance to the floor."""
    head = f"{'':8}{'batch':>6}{'bits differ':>22}{'unfused ms':>12}{'fused ms':>10}{'x':>7}"
    out = [head + f"{'MB':>9}{'floor ms':>10}{'x':>7}"]
    for line in lines:
        floor = line.work.floor_ms(ceilings)
        cells = f"{line.what:8}{line.batch:6}{f'{line.differing:,} of {line.compared:,}':>22}"
        if line.unfused and line.fused:
            a, b = line.unfused.median, line.fused.median
            cells += f"{a:12.4f}{b:10.4f}{a / b:7.2f}{line.work.bytes / 1e6:9.2f}{floor:10.4f}{b / floor:7.2f}"
        else:
            cells += f"{'-':>12}{'-':>10}{'-':>7}{line.work.bytes / 1e6:9.2f}{floor:10.4f}{'-':>7}"
        out.append(cells)
    return "\n".join(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, write. Returns 0, 1 where bits differ, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m audit.bench_conv", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    parser.add_argument("--shape", default=None, help="27B, tiny or micro (default: 27B on a GPU, else micro)")
    parser.add_argument("--layers", type=positive, default=None, help="GDN layers (default: 48 on a GPU, else 2)")
    parser.add_argument("--tree", default="hydra27", help="tree of every request (default hydra27)")
    parser.add_argument("--batches", default=None, metavar="N,N", help="requests (default 1,4,16 on a GPU, else 1,2)")
    parser.add_argument("--accepted", type=positive, default=12, help="accepted rows (default 12)")
    parser.add_argument("--repeat", type=positive, default=40, help="timed repetitions (default 40)")
    parser.add_argument("--report", default=None, metavar="DIR", help="write bench-conv.json there")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except InputError as refusal:
        print(f"bench_conv: {refusal}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    check_device(args.device)
    gpu = on_gpu(args.device)
    shape = args.shape or ("27B" if gpu else "micro")
    if shape not in SHAPES:
        raise InputError(f"--shape: expected one of {', '.join(SHAPES)}, got {shape!r}")
    if args.report:
        check_writable(args.report)
    dims = SHAPES[shape].dims
    # The small shapes' convolution is not as wide as GDN's operands are.
    channels = 2 * dims.hk * dims.dk + dims.hv * dims.dv
    dims = replace(dims, layers=args.layers or (48 if gpu else 2), conv_channels=channels)
    ceilings = measure_ceilings(args.device)
    lines = []
    for requests in batches(args.batches or ("1,4,16" if gpu else "1,2")):
        lines += compare(dims, args.tree, requests, args.accepted, args.device, args.repeat)
    print(f"convolution {shape}, {args.tree}, {dims.layers} layers, copy {ceilings.bytes_s / 1e9:,.0f} GB/s")
    if INTERPRETED:
        print("interpreted here: bits are compared, a speed would be the interpreter's")
    print(table(lines, ceilings))
    if args.report:
        data = {"facts": {**environment(), **asdict(ceilings), **vars(args)}, "lines": [asdict(x) for x in lines]}
        write_atomically({Path(args.report) / "bench-conv.json": (json.dumps(data, indent=1) + "\n").encode()})
    return int(any(line.differing for line in lines))


def batches(text: str) -> list[int]:
    """Numbers of requests. Raises InputError for anything but positive integers between commas."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise InputError(f"--batches: expected positive integers between commas, such as 1,4,16, got {text!r}")
    return [int(word) for word in words]


if __name__ == "__main__":
    sys.exit(main())
