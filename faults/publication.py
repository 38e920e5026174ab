"""Faults of publication: a surface is not published, or lands in the wrong place."""

from __future__ import annotations

from dataclasses import replace

from faults.catalogue import Fault
from faults.wrap import on_publish

FAULTS = [
    Fault(
        "state_not_published.gdn", "the recurrent state is not published", "gdn", "publish",
        ("A3", "A7", "A10", "O4", "DF4", "DF33"), (), on_publish("gdn", times=0),
    ),
    Fault(
        "history_not_published.conv", "the convolution history is not published", "conv", "publish",
        ("B2", "B3"), (), on_publish("conv", times=0),
    ),
    Fault(
        "kv_not_published.attention", "the accepted rows' KV stays in the candidates' slots", "attention", "publish",
        ("H12", "DF3"), (), on_publish("attention", times=0),
    ),
    Fault(
        "kv_remap_off_by_one.attention", "accepted KV lands one position too far", "attention", "publish",
        ("I2", "J1", "DF6"), (),
        on_publish("attention", batch=lambda b: replace(b, prefix_len=b.prefix_len + 1)),
        section="contract section 6 (continuation controls)",
    ),
]  # fmt: skip
