"""`lumotree-audit backends` and `samplers`: what is known by name, what it covers, and what it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lumotree.backends.loader import known_backends, load_backend
from lumotree.backends.protocol import covered_surfaces
from lumotree.backends.sampler_loader import known_samplers, load_sampler
from lumotree.errors import InputError
from lumotree.select import RULES

Line = tuple[str, str, str]


def backend_lines() -> list[Line]:
    """(name, surfaces with what they claim, first sentence) of every backend; the last says what one that cannot be
    loaded lacks."""
    return [_line(name, _backend) for name in known_backends()]


def sampler_lines() -> list[Line]:
    """(name, drafts and trees that it takes, first sentence) of every sampler."""
    return [_line(name, _sampler) for name in known_samplers()]


def print_lines(lines: Sequence[Line], covers: str, console: Console | None = None) -> None:
    """One table; the second column is headed `covers`."""
    out = console or Console()
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column(covers, overflow="fold")
    table.add_column("what it is", overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    out.print(table)


def _line(name: str, describe: Callable[[str], tuple[str, str]]) -> Line:
    try:
        return (name, *describe(name))
    except InputError as refusal:
        return (name, "-", _short(str(refusal)))


def _backend(name: str) -> tuple[str, str]:
    backend = load_backend(name)
    by_claim: dict[str, list[str]] = {}
    for surface, has in covered_surfaces(backend).items():
        if all(has):
            by_claim.setdefault(backend.contract.claim(surface), []).append(surface)
    claims = [f"{claim}: {', '.join(of) if len(of) < 3 else 'all'}" for claim, of in by_claim.items()]
    return "; ".join(claims), _first_sentence(backend)


def _sampler(name: str) -> tuple[str, str]:
    loaded = load_sampler(name)
    takes = f"{', '.join(loaded.claims.drafts)}; {'trees' if loaded.claims.trees else 'chains'}"
    return takes, f"lossless {RULES[name].lossless}" if name in RULES else _first_sentence(loaded.sampler)


def _first_sentence(thing: object) -> str:
    owner = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
    first = " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)])[.;] ", first, maxsplit=1)[0].rstrip(".")


def _short(refusal: str) -> str:
    """What is missing; of a peer's refusal, the command that installs it."""
    command = re.search(r"pip install .*", " ".join(refusal.split()))
    return f"not here: {command.group() if command else ' '.join(refusal.split())}"
