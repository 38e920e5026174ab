"""What stands between an engine and its backend: counts every call, poisons every output, checks every input row.

The counters are the audit's own, on the only way from the model to the backend, so a backend cannot pretend to have
been called; a backend that is called and does nothing leaves poison behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from audit.guard import poison_
from lumotree.backends.protocol import SURFACES, Accepted, Batch
from lumotree.recorder import CycleRecorder
from lumotree.state import Pools
from lumotree.tree import Tree


@dataclass
class Account:
    """What was seen. calls: (method, layer) -> how often. wrong: input rows that were not those of the script.
    rows: input rows that were checked."""

    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rows: int = 0


class WatchedBackend:
    """A backend whose verify and publish methods are counted; outputs are poisoned before they are written."""

    def __init__(self, inner: Any, account: Account) -> None:
        self._inner, self._account = inner, account
        for verify, publish in SURFACES.values():
            if callable(getattr(inner, verify, None)):
                setattr(self, verify, self._verify(verify))
            if callable(getattr(inner, publish, None)):
                setattr(self, publish, self._publish(publish))

    def _verify(self, method: str) -> Any:
        def call(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            self._account.calls[method, layer] += 1
            getattr(self._inner, method)(ops, pool, batch, ws, poison_(out), layer)

        return call

    def _publish(self, method: str) -> Any:
        def call(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Sequence[int]) -> None:
            for layer in layers:
                self._account.calls[method, layer] += 1
            getattr(self._inner, method)(pool, batch, accepted, ws, layers)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True)
class Expected:
    """The rows that a forward must be given: trees of its requests, in order, each behind its committed tokens."""

    trees: tuple[Tree, ...]
    committed: tuple[int, ...]


class WatchedModel:
    """A model whose verifications are checked row by row against what the script demands, and can be recorded.

    expected: set before each verification; None = not checked. record: begins the recording of a cycle, None = none is
    made. cycle, accepted: the recording and the accepted paths of the last cycle.
    """

    def __init__(self, inner: Any, account: Account) -> None:
        self._inner, self._account = inner, account
        self.expected: Expected | None = None
        self.record: Any = None
        self.cycle: CycleRecorder | None = None
        self.accepted: Accepted | None = None

    def verify(self, tokens: Tensor, batch: Batch, pools: Pools, ws: Any, backend: Any) -> Any:
        """As the model's, checked; recorded where `record` begins a recording."""
        if self.expected is not None:
            self._check(self.expected, tokens, batch)
        self.cycle = None
        if self.record is None:
            return self._inner.verify(tokens, batch, pools, ws, backend)
        self.cycle = self.record(batch, tokens, pools, ws, backend)
        forward = self._inner.verify(tokens, batch, pools, ws, self.cycle.watch(backend))
        drafts = self.cycle.drafter is not None
        self.cycle.verified(hidden=forward.hidden if drafts else None, logits=forward.logits)
        return forward

    def publish(self, batch: Batch, accepted: Accepted, pools: Pools, ws: Any, backend: Any) -> None:
        """As the model's; remembers what was accepted."""
        self.accepted = accepted
        self._inner.publish(batch, accepted, pools, ws, backend)

    def _check(self, expected: Expected, tokens: Tensor, batch: Batch) -> None:
        trees = expected.trees
        want = {
            "tokens": np.concatenate([t.tokens for t in trees]),
            "parent": np.concatenate([t.parents for t in trees]),
            "position": np.concatenate([m + t.depth for t, m in zip(trees, expected.committed, strict=True)]),
            "active": np.concatenate([t.active for t in trees]),
        }
        got = {"tokens": tokens, "parent": batch.parent, "position": batch.position, "active": batch.active}
        live = want["active"]
        self._account.rows += int(live.sum())
        for name, values in want.items():
            found = got[name].cpu().numpy()
            if found.shape != values.shape:
                self._account.wrong.append(f"{name}: {len(found)} rows, expected {len(values)}")
            elif len(odd := np.flatnonzero((found != values) & (live | (name == "active")))):
                row = int(odd[0])
                self._account.wrong.append(f"{name} of row {row} is {found[row]}, expected {values[row]}")
        if batch.prefix_len.tolist() != list(expected.committed):
            self._account.wrong.append(f"prefix_len {batch.prefix_len.tolist()}, expected {list(expected.committed)}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def expected_calls(gdn_layers: int, attention_layers: int, cycles: int) -> Counter[tuple[str, int]]:
    """What a model of these layers asks of its backend in so many verifications and publications."""
    layers = {"gdn": gdn_layers, "conv": gdn_layers, "attention": attention_layers}
    return Counter(
        {(m, layer): cycles for s, methods in SURFACES.items() for m in methods for layer in range(layers[s])}
    )
