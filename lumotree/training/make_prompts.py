"""Cut the stored prompts out of held-out files. A file serves one set only; prompts of a file do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lumotree.errors import InputError
from lumotree.prompts import LONGEST, PER_SET, SETS, SHORTEST, Prompt, prompts_hash
from lumotree.training.corpus import Source, corpus_hash, of_split, path_number, split_of

_ROUNDS = 16


def make_prompts(sources: Sequence[Source]) -> dict[str, Any]:
    """The content of `data/prompts.json`: sets, their hashes, hash of the sources. Raises InputError for too few
    held-out files."""
    known = b"\0".join(source.data for source in sources if split_of(source.path) != "held-out")
    chosen = {name: _one_set(of_split(sources, "held-out"), number, known) for number, name in enumerate(SETS)}
    return {
        "licence": "the texts are CPython's, PSF-2.0",
        "corpus_sha256": corpus_hash(sources),
        "sha256": {name: prompts_hash(prompts) for name, prompts in chosen.items()},
        "sets": {name: [vars(prompt) for prompt in prompts] for name, prompts in chosen.items()},
    }


def _one_set(held_out: Sequence[Source], number: int, known: bytes) -> list[Prompt]:
    """43 prompts, one of each file in turn, from the files whose path hash names this set."""
    files = [source for source in held_out if path_number(source.path, "prompt set") % len(SETS) == number]
    prompts: list[Prompt] = []
    for turn in range(_ROUNDS):
        for source in sorted(files, key=lambda s: path_number(s.path, "prompt order")):
            prompt = _cut(source, turn)
            if len(prompts) < PER_SET and prompt is not None and _is_new(prompt, prompts, known):
                prompts.append(prompt)
    if len(prompts) < PER_SET:
        raise InputError(f"prompts: set {SETS[number]!r} needs {PER_SET} prompts, its {len(files)} held-out files "
                         f"gave {len(prompts)}; give a larger standard library")  # fmt: skip
    return prompts


def _cut(source: Source, turn: int) -> Prompt | None:
    """Whole lines from a drawn line on, of a drawn length, or None if no lines fit."""
    rng = np.random.default_rng([path_number(source.path, "prompt cut"), turn])
    lines = source.data.splitlines(keepends=True)
    first, wanted = int(rng.integers(len(lines))), int(rng.integers(SHORTEST, LONGEST + 1))
    text = b""
    for line in lines[first:]:
        if len(text) + len(line) > LONGEST or len(text) >= wanted:
            break
        text += line
    if len(text) < SHORTEST or not text.strip():
        return None
    return Prompt(source.path, len(b"".join(lines[:first])), text.decode())


def _is_new(prompt: Prompt, taken: Sequence[Prompt], known: bytes) -> bool:
    size = len(prompt.text.encode())
    apart = (
        p.path != prompt.path or p.offset >= prompt.offset + size or p.offset + len(p.text.encode()) <= prompt.offset
        for p in taken
    )
    return all(apart) and prompt.text.encode() not in known
