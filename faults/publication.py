"""Faults of publication: a surface is not published, or lands in the wrong place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults.catalogue import Fault, Faulty, always
from lumotree.backends.protocol import SURFACES, Accepted, Batch

_STATEMENTS = {
    "gdn": ("state_not_published", "the recurrent state is not published", "defect-classes A3, A13; design-failures 4"),
    "conv": ("history_not_published", "the convolution history is not published", "defect-classes B2, B3"),
    "attention": ("kv_not_published", "the accepted rows' KV stays in the candidates' slots", "design-failures 3"),
}


def _not_published(surface: str) -> Fault:
    kind, statement, provenance = _STATEMENTS[surface]

    def wrap(inner: Any) -> Faulty:
        def method(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
            return None

        return Faulty(inner, **{SURFACES[surface][1]: method})

    return Fault(f"{kind}.{surface}", statement, surface, "publish", provenance, always, wrap)


def _kv_remap_off_by_one() -> Fault:
    def wrap(inner: Any) -> Faulty:
        def method(cache: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
            inner.kv_publish(cache, replace(batch, prefix_len=batch.prefix_len + 1), accepted, ws, layers)

        return Faulty(inner, kv_publish=method)

    return Fault(
        "kv_remap_off_by_one.attention",
        "accepted KV lands one position too far",
        "attention",
        "publish",
        "contract section 6 (continuation controls); defect-classes I2; design-failures 6",
        always,
        wrap,
    )


FAULTS = [*(_not_published(s) for s in SURFACES), _kv_remap_off_by_one()]
