"""Memory that was not enough, said as a refusal that names what was asked for and what there is."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

#: Options that decide how much memory a command takes, in the order in which they are worth trying.
SIZES = ("layers", "batch", "shape", "instances", "sets", "units", "requests", "tokens", "walks", "workers")

_ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+ ?\w+)")
_CARD = re.compile(r"total capacity of ([\d.]+ \w+)(?: of which ([\d.]+ \w+) is free)?")


def shortage(error: BaseException | None) -> str:
    """What was asked for and what there is, if an error or what caused it says that memory ran out; else ""."""
    if error is None:
        return ""
    text = str(error)
    if (
        not isinstance(error, torch.OutOfMemoryError | MemoryError)
        and "DefaultCPUAllocator: can't allocate" not in text
    ):
        return shortage(error.__cause__)
    asked, card = _ASKED.search(text), _CARD.search(text)
    needs = f"needs {asked[1]} more" if asked else "needs more memory"
    if card is None:
        return f"{needs}, this machine does not give it"
    return f"{needs}, the card has {card[1]}" + (f" ({card[2]} free)" if card[2] else "")


def remedy(options: Iterable[str]) -> str:
    """What to make smaller, of the options that a command has."""
    given = set(options)
    return "use a smaller " + " or ".join(f"--{name}" for name in SIZES if name in given)
