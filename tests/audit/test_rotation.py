"""The same requests in another order: outputs and states follow the request, not its place."""

from __future__ import annotations

from typing import Any

import torch

from audit.cases import Case
from audit.judge import Judge
from audit.rotation import rotate_requests
from audit.stage import Stage
from audit.tally import Tallies
from audit.truth import find_truth
from faults import Faulty
from lumotree.backends.protocol import Accepted, Batch
from lumotree.backends.torch_backend import TorchBackend

INNER = TorchBackend()
FIELDS: dict[str, Any] = {"trees": ("comb:3", "star:4", "chain:3"), "prefixes": (17, 2, 33), "page_size": 16}


def rotated(backend: Any, engine: Any) -> tuple[Judge, Stage]:
    case = Case(engine.spec(**FIELDS), INNER.contract)
    stage = Stage(backend, case)
    judge = Judge(stage, find_truth(backend, case, stage.surfaces), Tallies())
    judge.native()
    stage.verify()
    stage.reset()
    rotate_requests(judge)
    return judge, stage


def test_a_right_backend_does_not_notice(engine: Any) -> None:
    workspaces = []

    def allocate(*args: Any) -> Any:
        workspaces.append(INNER.allocate(*args))
        return workspaces[-1]

    judge, stage = rotated(Faulty(INNER, allocate=allocate), engine)
    assert judge.tallies.failures() == []
    rows, paths = 13, 3  # outputs bitwise and derived; states bitwise and derived; all else unchanged
    assert judge.tallies["gdn.rotation"].cells == 2 * rows + 2 * paths + 1
    assert judge.tallies["conv.rotation"].cells == 2 * rows + paths + 1
    assert len(workspaces) == 2 and stage.ws is workspaces[0]


def test_the_batch_really_comes_in_another_order(engine: Any) -> None:
    seen: list[list[int]] = []

    def conv_verify(ops: Any, pool: Any, batch: Batch, *rest: Any) -> None:
        seen.append(batch.prefix_len.tolist())
        INNER.conv_verify(ops, pool, batch, *rest)

    rotated(Faulty(INNER, conv_verify=conv_verify), engine)
    assert seen == [[17, 2, 33], [2, 33, 17]]


def test_a_state_that_follows_the_place_of_a_request_is_seen(engine: Any) -> None:
    """Slots are remembered by place in the batch, from the first call on (a table built once)."""
    table: list[torch.Tensor] = []

    def gdn_publish(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
        INNER.gdn_publish(pool, _with(batch, table[0]), accepted, ws, layers)

    def gdn_verify(ops: Any, pool: Any, batch: Batch, *rest: Any) -> None:
        table.append(batch.state_slot.clone())
        INNER.gdn_verify(ops, pool, batch, *rest)

    judge, _ = rotated(Faulty(INNER, gdn_publish=gdn_publish, gdn_verify=gdn_verify), engine)
    assert {t.check for t in judge.tallies.failures()} == {"gdn.rotation"}
    assert {p.request for p in judge.tallies["gdn.rotation"].places} == {0, 1, 2}
    assert any("(gdn.state.bitwise)" in str(p.got) for p in judge.tallies["gdn.rotation"].places)


def _with(batch: Batch, slots: torch.Tensor) -> Batch:
    from dataclasses import replace

    return replace(batch, state_slot=slots)
