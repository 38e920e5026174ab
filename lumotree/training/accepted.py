"""How far each drafter gets on the shipped model: mean tokens a cycle over stored prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lumotree.byte_tokens import END, encode
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.draft import drafter
from lumotree.prompts import SETS, prompt_set
from lumotree.requests import Request
from lumotree.sampling import SamplingParams
from lumotree.slots import Capacity

DRAFTERS = ("mtp5", "hydra27", "budget", "suffix", "mtp5-sampled", "hydra27-sampled")


@dataclass(frozen=True)
class Progress:
    """One drafter at one temperature. lengths: accepted rows of each decoding cycle, root included, which is also the
    number of tokens it emitted; requests: mean of each request."""

    drafter: str
    temperature: float
    lengths: tuple[int, ...]
    requests: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report; the histogram's place k counts cycles that emitted k tokens."""
        lengths = np.array(self.lengths)
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "tokens_per_cycle": round(float(lengths.mean()), 3),
            "requests": {
                "least": round(min(self.requests), 2),
                "median": round(float(np.median(self.requests)), 2),
                "most": round(max(self.requests), 2),
            },
            "cycles": len(lengths),
            "histogram": np.bincount(lengths).tolist(),
        }


def accepted_lengths(
    stack: Stack,
    prompts: int,
    tokens: int,
    temperatures: Sequence[float] = (0.0, 1.0),
    drafters: Sequence[str] = DRAFTERS,
    say: Callable[[str], None] = print,
) -> list[Progress]:
    """Decode the first `prompts` prompts of each set together, `tokens` tokens each, with every drafter."""
    texts = [tuple(encode(p.text)) for name in SETS for p in prompt_set(name)[:prompts]]
    found = []
    for temperature in temperatures:
        for name in drafters:
            found.append(_run(stack, texts, tokens, temperature, name))
            say(f"{name} at temperature {temperature}: {found[-1].as_dict()['tokens_per_cycle']} tokens a cycle")
    return found


def _run(stack: Stack, texts: Sequence[tuple[int, ...]], tokens: int, temperature: float, name: str) -> Progress:
    decoder = Decoder(stack, Capacity(len(texts), max(map(len, texts)) + tokens))
    params, chosen = SamplingParams(temperature=temperature), drafter(name)
    for number, text in enumerate(texts):
        decoder.admit(Request(number, text, tokens, params, chosen, eos=END, seed=1))
    while any(state.finished is None for state in decoder.running.values()):
        decoder.cycle()
    paths = [state.paths for state in decoder.running.values() if state.paths]
    lengths = tuple(length for path in paths for length in path)
    return Progress(name, temperature, lengths, tuple(sum(path) / len(path) for path in paths))
