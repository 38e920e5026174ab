"""Between the audit and somebody's sampler: what comes back is checked, what went in must not change.

An outcome of the wrong type or shape is a sampler that does not fit the protocol: `BackendError`, naming method, field
and shape. A token or row that cannot be (also NaN) is a *wrong answer*: it is passed on as -1, which every judge fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.sampler_loader import LoadedSampler
from lumotree.coins import coins_for
from lumotree.errors import ANYTHING, BackendError, InputError
from lumotree.select_draft import draw_drafts
from lumotree.select_prepare import PreparedStep, prepare
from lumotree.select_types import Coins, Step, Walks


class Guarded:
    """A sampler whose outcomes are checked. changed: names of inputs that it wrote to, in order of discovery.

    It is handed copies, so that what it writes reaches nobody else.
    """

    def __init__(self, loaded: LoadedSampler) -> None:
        self.loaded = loaded
        self.changed: list[str] = []
        self._step: Step | None = None
        self._copy: Step | None = None

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """As `CoinSampler.select`. Raises BackendError for an outcome that is no Walks, or an exception inside."""
        given, own = tokens.clone(), Coins(coins.accept.clone(), coins.residual.clone())
        walks = self._call("select", self._private(step), given, own)
        self._compare("tokens", given, tokens)
        self._compare("accept coins", own.accept, coins.accept)
        self._compare("residual coins", own.residual, coins.residual)
        self._compare_step(step)
        checked = self._checked("select", walks, step, len(coins.accept))
        rows = list(step.tree.active_rows[1:])
        self._compare("drafted tokens, as returned", checked.tokens.expand_as(tokens)[:, rows], tokens[:, rows])
        return checked

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        """As `ClosedSampler.walk`. Raises as `select` does."""
        drawn = self._call("walk", self._private(step), walks, seed)
        self._compare_step(step)
        return self._checked("walk", drawn, step, walks)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.loaded.sampler, method)(*arguments)
        except InputError as refusal:
            raise BackendError(f"sampler {self.loaded.spec!r}: {method} refused a valid step: {refusal}") from refusal
        except ANYTHING as error:  # whatever a stranger's kernel raises
            raise BackendError(
                f"sampler {self.loaded.spec!r}: {method} raised {type(error).__name__}: {error}"
            ) from error

    def _private(self, step: Step) -> Step:
        """The sampler's copy of a step, the same object as long as the step is the same and nobody wrote to it."""
        if self._copy is None or self._step is not step:
            laws = None if step.laws is None else step.laws.clone()
            self._step, self._copy = step, replace(step, target=step.target.clone(), laws=laws)
        return self._copy

    def _compare_step(self, step: Step) -> None:
        copy = self._private(step)
        same = self._compare("target", copy.target, step.target)
        if step.laws is not None and copy.laws is not None:
            same = self._compare("laws", copy.laws, step.laws) and same
        if not same:
            self._copy = None

    def _compare(self, name: str, own: Tensor, original: Tensor) -> bool:
        same = torch.equal(own, original)
        if not same and name not in self.changed:
            self.changed.append(name)
        return same

    def _checked(self, method: str, walks: Any, step: Step, count: int) -> Walks:
        where = f"sampler {self.loaded.spec!r}: {method} returned"
        if not isinstance(walks, Walks):
            raise BackendError(f"{where} {type(walks).__name__}; expected lumotree.select_types.Walks")
        n = step.tree.n
        shapes = {"last": [[count]], "bonus": [[count]], "refused": [[count]], "tokens": [[count, n], [1, n]]}
        for name, allowed in shapes.items():
            value = getattr(walks, name)
            if not isinstance(value, Tensor):
                raise BackendError(f"{where} {name} of type {type(value).__name__}; expected a torch tensor")
            if list(value.shape) not in allowed:
                wanted = " or ".join(str(shape) for shape in allowed)
                raise BackendError(f"{where} {name} of shape {list(value.shape)}; expected {wanted}")
        if walks.refused.dtype != torch.bool:
            raise BackendError(f"{where} refused of {walks.refused.dtype}; expected torch.bool")
        numbers = {name: self._numbers(where, name, getattr(walks, name)) for name in ("last", "bonus", "tokens")}
        return replace(walks, **numbers)

    def _numbers(self, where: str, name: str, value: Tensor) -> Tensor:
        """Return int64; NaN becomes -1, which is no row and no token."""
        if value.dtype.is_floating_point and bool(value.isnan().any()):
            return torch.where(value.isnan(), -1.0, value).to(torch.int64)
        if value.dtype not in (torch.int64, torch.int32):
            raise BackendError(f"{where} {name} of {value.dtype}; expected torch.int64")
        return value.to(torch.int64)


class CoinWalker:
    """A `ClosedSampler` made of a `CoinSampler`: drafts are drawn from the declared laws, coins are counter-based.

    Keeps the last step prepared, for its drafts.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._prepared: PreparedStep | None = None

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        """Draw `walks` selections; each walk is a request of its own."""
        tokens, coins = self.inputs(step, walks, seed)
        return self.sampler.select(step, tokens, coins)  # type: ignore[no-any-return]

    def inputs(self, step: Step, walks: int, seed: int) -> tuple[Tensor, Coins]:
        """Return drafted tokens and coins, as `walk` uses them."""
        prepared, requests = self.prepared(step), range(walks)
        tokens = draw_drafts(prepared, seed, requests, 0)
        return tokens, coins_for(seed, requests, 0, step.tree.n, step.tree.active_rows)

    def prepared(self, step: Step) -> PreparedStep:
        """Return the step made ready; kept until another step comes."""
        if self._prepared is None or self._prepared.step is not step:
            self._prepared = prepare(step)
        return self._prepared


class PreparedRule:
    """A built-in rule as `CoinSampler` that prepares a step once."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self._prepared: PreparedStep | None = None

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """As the rule's."""
        if self._prepared is None or self._prepared.step is not step:
            self._prepared = prepare(step)
        return self.rule.select(self._prepared, tokens, coins)  # type: ignore[no-any-return]
