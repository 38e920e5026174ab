"""Calls into the backend under audit: whatever a stranger's method raises is a message about it, not a bug of ours."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from lumotree.contract import Dims
from lumotree.errors import ANYTHING, BackendError, InputError
from lumotree.state import State


def call(backend: Any, method: str, case: str, *args: Any) -> Any:
    """Call a method of the backend. Refusals (InputError) pass; anything else becomes a BackendError naming the method,
    the case and the line that raised, also an exit: a kernel that ends the run has passed nothing."""
    lent = _lent(args)
    try:
        result = getattr(backend, method)(*args)
    except InputError:
        raise
    except ANYTHING as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise BackendError(
            f"case {case}: {method} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error
    if (name := next((n for n, t, where in lent if t.data_ptr() != where), None)) is not None:
        raise BackendError(
            f"case {case}: {method} put other memory behind {name}, expected values written in place: "
            "an engine, and a captured graph, read at the old address"
        )
    return result


def _lent(args: Sequence[Any]) -> list[tuple[str, Tensor, int]]:
    """Tensors among the arguments and their fields, and where their memory is. A workspace is the backend's own."""
    named = [(f"argument {i}", a) for i, a in enumerate(args) if isinstance(a, Tensor)]
    for part in args:
        if is_dataclass(part) and not isinstance(part, type):
            named += [(name, value) for name, value in vars(part).items() if isinstance(value, Tensor)]
    return [(name, tensor, tensor.data_ptr()) for name, tensor in named]


def canonical(state: Any, dims: Dims, case: str) -> State:
    """What `export` returned. Raises BackendError when it does not have the canonical form."""
    want = {
        "recurrent": (torch.float32, (dims.hv, dims.dv, dims.dk)),
        "conv": (torch.bfloat16, (dims.conv_channels, dims.conv_width - 1)),
    }
    for name, (dtype, shape) in want.items():
        got = getattr(state, name, None)
        if not isinstance(got, Tensor) or got.dtype != dtype or got.shape != shape:
            found = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            raise BackendError(f"case {case}: export returned {name} {found}, expected {dtype} {list(shape)}")
    return State(state.recurrent, state.conv)
