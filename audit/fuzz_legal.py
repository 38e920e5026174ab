"""What a program may ask for: the rest is refused before a backend is called, so that no backend is blamed for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from lumotree.contract import Contract
from lumotree.errors import InputError
from lumotree.tree import Tree


class ProgramError(InputError):
    """A program asks for a step that its world has no room for, out of turn, or for what the contract leaves out."""


@contextmanager
def possible(step: str) -> Iterator[None]:
    """Whatever is refused in here was asked for in vain: ProgramError."""
    try:
        yield
    except InputError as refusal:
        raise ProgramError(f"{step}: {refusal}") from refusal


def asked_tree(parents: Sequence[int], inactive: Sequence[int] = ()) -> Tree:
    """The tree of these parents. Raises ProgramError if there is none."""
    with possible("verify"):
        if {*map(type, (*parents, *inactive))} == {int}:
            return _tree(tuple(parents), tuple(inactive))
        return Tree.make(parents, active=[row not in inactive for row in range(len(parents))])


@lru_cache(maxsize=1024)
def _tree(parents: tuple[int, ...], inactive: tuple[int, ...]) -> Tree:
    """Programs ask for the same shapes again and again; trees cannot be changed."""
    return Tree.make(parents, active=[row not in inactive for row in range(len(parents))])


def asked_path(tree: Tree, end: int | None, contract: Contract) -> tuple[int, ...]:
    """The path that ends in a row, empty for None. Raises ProgramError if a backend may refuse it."""
    if end is None:
        if not contract.empty_path:
            raise ProgramError("accept: expected a path, got none; the contract does not declare empty_path")
        return ()
    with possible("accept"):
        path = tree.path(end)
    if not tree.active[end]:
        raise ProgramError(f"accept: expected an active row, got row {end}")
    return path
