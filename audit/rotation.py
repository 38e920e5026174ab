"""The same requests in another order: no output and no published state may notice."""

from __future__ import annotations

from dataclasses import replace

import torch

from audit.guard import poison_
from audit.judge import Judge
from audit.tally import Tallies, fold
from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import SHARED_OPERANDS


def rotate_requests(judge: Judge) -> None:
    """Verify and publish with the requests rotated by one place (a 3-cycle for three) and judge against the truth."""
    stage, case, part = judge.stage, judge.case, Tallies()
    count = len(case.trees)
    order = [*range(1, count), 0]
    rows = torch.cat([torch.arange(case.offsets[i], case.offsets[i + 1]) for i in order]).to(case.device)
    batch = build_batch(
        [case.trees[i] for i in order],
        state_slots=[case.state_slots[i] for i in order],
        page_table=case.page_table[order],
        page_size=case.spec.page_size,
        device=case.device,
    )
    stage.ws, own = stage.allocate(stage.limits), stage.ws
    again = Judge(stage, judge.truth, part)
    for layer in range(case.dims.layers):
        for surface in stage.surfaces:
            ops = stage.operands(surface, layer)
            moved = replace(ops, **{k: v if k in SHARED_OPERANDS else v[rows] for k, v in vars(ops).items()})
            out = poison_(torch.empty_like(stage.out[layer][surface]))
            stage.run_verify(surface, layer, moved, batch, out)
            _judge_outputs(again, out, rows, surface, layer)
    paths = [case.trees[i].path(case.trees[i].leaves[-1]) for i in order]
    accepted = accepted_paths(paths, case.device, stage.longest)
    for surface in stage.publishes:
        stage.run_publish(surface, batch, accepted, list(range(case.dims.layers)))
    again.published([paths[order.index(i)] for i in range(count)])
    stage.ws = own
    fold(part, judge.tallies, "rotation", judge.contract)


def _judge_outputs(judge: Judge, out: torch.Tensor, rows: torch.Tensor, surface: str, layer: int) -> None:
    back = torch.empty_like(out)
    back[rows] = out
    for request in range(len(judge.case.trees)):
        lo, hi = judge.case.offsets[request : request + 2]
        judge.outputs_of(surface, back[lo:hi], request, layer)
