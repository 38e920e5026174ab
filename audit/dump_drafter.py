"""The drafter's committed entries, recomputed from recorded hidden rows by the model's own draft head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from audit.dump_chain import Entry
from lumotree.backends.batch import build_batch
from lumotree.errors import RecordError
from lumotree.tree import Tree
from lumotree.tree_named import chain


def first_entry(prefix: int) -> int:
    """Position of the first entry that a cycle behind `prefix` committed tokens adds (see `lumotree.draft_types`)."""
    return max(prefix - 1, 0)


def entry_count(prefix: int, accepted: int) -> int:
    """How many entries a cycle adds: one a token, one less at the start of a request."""
    return max(prefix + accepted - 1, 0) - first_entry(prefix)


def drafter_entries(head: Any, entry: Entry, path: Sequence[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Keys and values bf16 `[entries, Hkv, dh]` that the cycle must have committed.

    Entry p is computed from the target's own hidden row at p and the token at p + 1. Raises RecordError when the head
    is not that of the recorded model.
    """
    t, rows = entry.record.tensors, entry.rows
    hidden = torch.cat([t["hidden.before"][entry.index][None], t["hidden.rows"][rows][list(path[:-1])]])
    tokens = t["tree.tokens"][rows][list(path)]
    if entry.prefix == 0:
        hidden, tokens = hidden[1:], tokens[1:]
    count, start = len(tokens), first_entry(entry.prefix)
    if not count:
        empty = t["drafter.k"][:0]
        return empty, empty
    cache = head.empty_cache(start + count)
    if cache.k.shape[2:] != t["drafter.k"].shape[1:]:
        raise RecordError(
            f"cycle {entry.record.sequence}: drafter rows are {list(t['drafter.k'].shape[1:])}, the model's draft head "
            f"has {list(cache.k.shape[2:])}; give the recorded model with --checkpoint"
        )
    table = torch.arange(start + count, dtype=torch.int32)[None]
    tree = Tree.make(chain(count).parents, slots=range(start, start + count), prefix_len=start)
    batch = build_batch([tree], state_slots=[0], page_table=table, page_size=1, device=device)
    head.forward(tokens.to(device), hidden.to(device), batch, cache)
    return cache.k[0, start:].cpu(), cache.v[0, start:].cpu()
