"""Whether a saved request fits a decoder: asked before anything is written."""

from __future__ import annotations

from torch import Tensor

from lumotree.cycle_types import SavedRequest, Stack
from lumotree.errors import RequestError
from lumotree.state import KVCache, Pools


def check_saved(saved: SavedRequest, stack: Stack, pools: Pools, draft: KVCache | None) -> None:
    """Raise RequestError for a state of other weights, shapes or length."""
    where = f"saved request {saved.request.number}"
    if saved.identity != stack.identity:
        raise RequestError(
            f"{where}: expected a state of the model {stack.identity!r}, got one of {saved.identity!r}; restore it "
            "with the weights it was saved with"
        )
    surfaces, m = saved.surfaces, saved.surfaces.committed
    pending = len(saved.tokens) - m
    prompt = len(saved.request.prompt)
    if saved.tokens[:prompt] != saved.request.prompt:
        raise RequestError(f"{where}: its tokens do not begin with its prompt")
    if pending != 1 and not (len(saved.tokens) == prompt and pending > 0):
        raise RequestError(
            f"{where}: expected a state of {len(saved.tokens) - 1} committed tokens, got one of committed={m}; the "
            "state is of another length"
        )
    layers, dims = pools.recurrent.shape[0], stack.model.dims
    _shape(where, "recurrent", surfaces.recurrent, (layers, dims.hv, dims.dv, dims.dk))
    _shape(where, "conv", surfaces.conv, (layers, *pools.conv.shape[2:]))
    cache = pools.cache.k
    for name, tensor in (("k", surfaces.k), ("v", surfaces.v)):
        _shape(where, name, tensor, (cache.shape[0], m, *cache.shape[2:]))
    if draft is None:
        return
    for name, entry in (("draft_k", surfaces.draft_k), ("draft_v", surfaces.draft_v)):
        _shape(where, name, entry, (max(m - 1, 0), *draft.k.shape[2:]))
    if m:
        _shape(where, "hidden", surfaces.hidden, (stack.model.hidden_size,))


def _shape(where: str, name: str, tensor: Tensor | None, wanted: tuple[int, ...]) -> None:
    got = None if tensor is None else tuple(tensor.shape)
    if got != wanted:
        raise RequestError(f"{where}: expected {name} of shape {list(wanted)}, got {got if got is None else list(got)}")
