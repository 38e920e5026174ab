"""What a fault is, and the registry of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lumotree.tree import Tree

Wrap = Callable[[Any], Any]
Reaches = Callable[[Sequence[Tree]], bool]


class Faulty:
    """A backend in front of which some methods have been replaced; all others are the inner backend's."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self.inner = inner
        for name, method in methods.items():
            setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class Fault:
    """A named way to make a correct backend wrong in exactly one way.

    id: "kind.surface". statement: one sentence. surface: gdn, conv or attention, the one whose checks must see it.
    stage: verify or publish. provenance: classes of public defects, papers or issues. expect: "detected", or "harmless"
    for a change that a correct backend must not notice. reaches: whether these trees make the fault change anything.
    wrap: correct backend -> wrong backend.
    """

    id: str
    statement: str
    surface: str
    stage: str
    provenance: str
    reaches: Reaches
    wrap: Wrap
    expect: str = "detected"

    @property
    def kind(self) -> str:
        """The part of the id in front of the surface."""
        return self.id.rpartition(".")[0]


def branches(trees: Sequence[Tree]) -> bool:
    """Whether some active row's parent is not the active row before it."""
    return any(int(t.parents[row]) != before for t in trees for before, row in itertools.pairwise(t.active_rows))


def has_siblings(trees: Sequence[Tree]) -> bool:
    """Whether two active rows share a parent."""
    return any(len(t.active_children(row)) > 1 for t in trees for row in t.active_rows)


def deeper_than_root(trees: Sequence[Tree]) -> bool:
    """Whether some request has an active row besides its root."""
    return any(len(t.active_rows) > 1 for t in trees)


def has_inactive(trees: Sequence[Tree]) -> bool:
    """Whether some row is padding."""
    return any(not bool(t.active.all()) for t in trees)


def always(trees: Sequence[Tree]) -> bool:
    """Reached by every case."""
    return True
