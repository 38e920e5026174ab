"""The toy model of the decoding tests, scripts of a few cycles on it, and backends that are wrong on purpose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "lumotree" / "decoding"))
from decoding_toy import prompts, stack

from audit.continuation_harvest import Course, harvest
from audit.continuation_judge import Cell, cells_of
from audit.continuation_native import ARMS, Trace, native_trace
from audit.continuation_plan import Script
from audit.continuation_run import against
from faults import Faulty
from lumotree.backends.batch import accepted_paths
from lumotree.backends.protocol import SURFACES
from lumotree.backends.torch_backend import TorchBackend
from lumotree.cycle_types import Stack

#: Ends of the cycles of each schedule; path lengths differ between cycles and between requests.
ENDS = ((14, 7, 4, 0), (12, 28, 1, 0))


def toy(backend: Any = None) -> Stack:
    """The toy on a backend, torch by default."""
    return stack(backend or TorchBackend())


def scripts(kinds: Sequence[str] = ("cold",), ends: Sequence[Sequence[int]] = ENDS, prompt: int = 9) -> list[Script]:
    """One schedule a kind and line of `ends`; prompts of `prompt` tokens, and 3 more each."""
    texts = prompts(len(ends), prompt)
    plan = [
        Course(f"{kind}/p{p}", 10 * k + p, kind, texts[p], ("hydra27",) * len(e), tuple(e))
        for k, kind in enumerate(kinds)
        for p, e in enumerate(ends)
    ]
    return harvest(toy(), plan, texts)


def reference(chosen: Sequence[Script]) -> Trace:
    """Arm A."""
    return native_trace(toy(), chosen, ARMS["A"])


def cells(chosen: Sequence[Script], trace: Trace, native: Trace) -> list[Cell]:
    """Cycles of the scripts, without other native arms."""
    return list(cells_of(chosen, against(native, trace, chosen), {}))


def wrong_publish(surface: str, cycle: int, layer: int) -> Faulty:
    """Publishes one layer of a surface along the root alone, in one cycle (counted from 0, prompts included)."""
    inner, calls = TorchBackend(), [0]
    method = SURFACES[surface][1]

    def publish(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        wrong = calls[0] == cycle
        calls[0] += 1
        getattr(inner, method)(pool, batch, accepted, ws, [n for n in layers if not (wrong and n == layer)])
        if wrong:
            root = accepted_paths([(0,) if n else () for n in accepted.length.tolist()])
            getattr(inner, method)(pool, batch, root, ws, [layer])

    return Faulty(inner, **{method: publish})


def wrong_verify(surface: str, change: Callable[..., None]) -> Faulty:
    """A backend whose outputs `change(out, layer, call)` alters; call: counts verifications of layer 0 from 0."""
    inner, calls = TorchBackend(), [-1]
    method = SURFACES[surface][0]

    def verify(ops: Any, pool: Any, batch: Any, ws: Any, out: Any, layer: int) -> None:
        calls[0] += layer == 0
        getattr(inner, method)(ops, pool, batch, ws, out, layer)
        change(out, layer, calls[0])

    return Faulty(inner, **{method: verify})


def damaged_history(cycle: int, layer: int) -> Faulty:
    """Publication also changes the first committed key of the first request's own pages, in one cycle."""
    inner, calls = TorchBackend(), [0]

    def publish(cache: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        inner.kv_publish(cache, batch, accepted, ws, layers)
        if calls[0] == cycle:
            cache.k[layer, int(batch.page_table[0, 0]) * batch.page_size] += 1
        calls[0] += 1

    return Faulty(inner, kv_publish=publish)
