"""A step that somebody captured, from a file: `lumotree-audit sample --step FILE.npz`.

NumPy archive (`numpy.savez`) of

    parents  int [N]        parent row, -1 for row 0
    tokens   int [N]        drafted tokens; row 0's is not read
    target   float [N, V]   law of the token after each row, after all filters
    laws     float [N, V]   optional: law that each row's first child was drawn from; without it drafts are fixed
    active   bool [N]       optional: False = padding
    accept, residual  float [W, N]  optional: coins, checked and kept for a comparison on these very coins
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from audit.files import archive_fault
from lumotree.errors import InputError, TreeError
from lumotree.select_prepare import check_coins, check_tokens, prepare
from lumotree.select_types import Coins, Step
from lumotree.tree import Tree

NEEDED = ("parents", "tokens", "target")
OPTIONAL = ("laws", "active", "accept", "residual")


@dataclass(frozen=True)
class StepFile:
    """A step from a file and the coins that came with it, if any."""

    step: Step
    coins: Coins | None


def load_step(path: str | Path) -> StepFile:
    """Read a step and refuse what no sampler may be given.

    Raises InputError naming the file and: a missing or unknown array; a row and value of target or laws that is NaN,
    negative, all zero or does not sum to 1; a law with fewer tokens than the row has children; a drafted token outside
    the vocabulary or, with laws, equal to a sibling's; a coin outside [0, 1).
    """
    where = f"step {path}"
    arrays = _arrays(path, where)
    try:
        step = _step(arrays)
        # The draft that comes with redrawn laws is checked too: it is what was verified.
        check_tokens(prepare(step), torch.from_numpy(step.tree.tokens.copy())[None], 1, distinct=True)
        coins = _coins(arrays, step.tree.n)
    except TreeError as refusal:
        raise TreeError(f"{where}: {refusal}") from refusal
    except InputError as refusal:
        raise InputError(f"{where}: {refusal}") from refusal
    return StepFile(step, coins)


def _arrays(path: str | Path, where: str) -> dict[str, NDArray[np.generic]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as cause:
        raise InputError(f"{where}: expected a NumPy archive (numpy.savez), found: {archive_fault(cause)}") from cause
    missing = [name for name in NEEDED if name not in arrays]
    unknown = [name for name in arrays if name not in (*NEEDED, *OPTIONAL)]
    if missing or unknown:
        raise InputError(f"{where}: missing or unknown arrays: {', '.join(missing + unknown)}; needed: "
                         f"{', '.join(NEEDED)}; optional: {', '.join(OPTIONAL)}")  # fmt: skip
    return arrays


def _step(arrays: dict[str, NDArray[np.generic]]) -> Step:
    target = _matrix("target", arrays["target"])
    laws = _matrix("laws", arrays["laws"]) if "laws" in arrays else None
    tokens = np.atleast_1d(arrays["tokens"]).astype(np.int64).copy()
    if len(tokens):
        tokens[0] = max(int(tokens[0]), 0)  # row 0 is no draft, whatever stands there
    # The vocabulary is checked by `check_tokens`, whose message has row and value.
    tree = Tree.make(arrays["parents"], tokens=tokens, active=arrays.get("active"))
    return Step(tree, target, laws)


def _matrix(name: str, values: NDArray[np.generic]) -> torch.Tensor:
    if values.ndim != 2 or values.dtype.kind not in "fiu":
        raise InputError(f"{name}: expected numbers [N, V], got {values.dtype} {list(values.shape)}")
    return torch.from_numpy(values.astype(np.float64))


def _coins(arrays: dict[str, NDArray[np.generic]], n: int) -> Coins | None:
    if "accept" not in arrays and "residual" not in arrays:
        return None
    if "accept" not in arrays or "residual" not in arrays:
        raise InputError("coins: expected both arrays, accept and residual")
    coins = Coins(_matrix("accept coins", arrays["accept"]), _matrix("residual coins", arrays["residual"]))
    check_coins(coins, n)
    return coins
