"""Two disjoint sets of 43 prompts, cut out of standard-library sources that the shipped model was not trained on.

They are stored, because sources differ between Python versions. `lumotree.training.make_prompts` made them. The texts
are CPython's, under its licence (PSF-2.0).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from lumotree.errors import InputError

SETS = ("one", "two")
PER_SET = 43
SHORTEST, LONGEST = 128, 384


@dataclass(frozen=True)
class Prompt:
    """One prompt. path: source it was cut from; offset: of its first byte there; text: whole lines, 128..384 bytes."""

    path: str
    offset: int
    text: str


def prompt_set(name: str) -> tuple[Prompt, ...]:
    """The 43 prompts of a set, "one" or "two". Raises InputError for another name or a damaged installation."""
    if name not in SETS:
        raise InputError(f"prompts: unknown set {name!r}; allowed: {', '.join(SETS)}")
    stored = json.loads(resources.files("lumotree").joinpath("data/prompts.json").read_text(encoding="utf-8"))
    return read_set(stored, name)


def read_set(stored: dict[str, Any], name: str) -> tuple[Prompt, ...]:
    """The prompts of a set out of the stored JSON. Raises InputError if they are not those that were stored."""
    try:
        prompts = tuple(Prompt(str(p["path"]), int(p["offset"]), str(p["text"])) for p in stored["sets"][name])
        expected = str(stored["sha256"][name])
    except (KeyError, TypeError, ValueError) as cause:
        raise InputError(f"prompts: set {name!r} is damaged ({cause!r}); reinstall the package") from cause
    if prompts_hash(prompts) != expected:
        raise InputError(f"prompts: set {name!r} has sha256 {prompts_hash(prompts)}, expected {expected}; reinstall")
    return prompts


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """sha256 over paths, offsets and texts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.path}\0{prompt.offset}\0{prompt.text}\0".encode())
    return digest.hexdigest()
