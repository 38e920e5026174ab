"""The drafters on the shipped model, in real decoding."""

from __future__ import annotations

import pytest
import torch

from lumotree.backends.torch_backend import TorchBackend
from lumotree.byte_tokens import encode
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.draft import drafter
from lumotree.prompts import prompt_set
from lumotree.requests import Request
from lumotree.sampling import SamplingParams
from lumotree.shipped import shipped_model
from lumotree.slots import Capacity
from lumotree.training.accepted import accepted_lengths

TOKENS = 20


@pytest.fixture(scope="module")
def stack() -> Stack:
    torch.set_num_threads(1)
    model, backend = shipped_model(), TorchBackend()
    return Stack(model, backend, model.draft_head(backend))


def decode(stack: Stack, name: str | None, temperature: float) -> tuple[list[int], list[int]]:
    """Emitted tokens and accepted lengths of one request."""
    prompt = tuple(encode(prompt_set("one")[0].text)[:48])
    decoder = Decoder(stack, Capacity(1, len(prompt) + TOKENS))
    chosen = None if name is None else drafter(name)
    running = decoder.admit(Request(0, prompt, TOKENS, SamplingParams(temperature=temperature), chosen, seed=3))
    while running.finished is None:
        decoder.cycle()
    return running.output, running.paths


@pytest.mark.parametrize(
    ("name", "least"), [("mtp5", 2.5), ("hydra27", 3.0), ("budget", 3.0), ("hydra27-sampled", 3.0)]
)
def test_trained_drafts_are_accepted_and_change_nothing(stack: Stack, name: str, least: float) -> None:
    plain, ones = decode(stack, None, 0.0)
    output, paths = decode(stack, name, 0.0)
    assert output == plain and set(ones) == {1}
    assert sum(paths) / len(paths) >= least


def test_accepted_lengths_add_up_to_what_was_emitted(stack: Stack) -> None:
    (one,) = accepted_lengths(stack, 1, 9, (0.0,), ("mtp5",), lambda line: None)
    found = one.as_dict()
    # Two requests; the first token of each comes from its prompt.
    assert sum(one.lengths) == 2 * 8 and len(one.requests) == 2
    assert sum(k * count for k, count in enumerate(found["histogram"])) == 16
    assert found["tokens_per_cycle"] == pytest.approx(16 / found["cycles"], abs=1e-3) and len(one.lengths) < 16


@pytest.mark.parametrize("name", ["hydra27", "mtp5-sampled", "hydra27-sampled"])
def test_sampled_decoding_accepts_drafts(stack: Stack, name: str) -> None:
    output, paths = decode(stack, name, 1.0)
    assert len(output) == TOKENS and sum(paths) / len(paths) > 1.5
    assert decode(stack, name, 1.0) == (output, paths)


@pytest.mark.parametrize("name", ["budget", "hydra27-sampled"])
def test_a_request_drafts_the_same_beside_others(stack: Stack, name: str) -> None:
    """Accepted lengths are those of the request alone, so its drafts are too, bit for bit."""
    texts = [tuple(encode(p.text)[:length]) for p, length in zip(prompt_set("two"), (20, 33, 47), strict=False)]

    def run(numbers: list[int]) -> dict[int, tuple[list[int], list[int]]]:
        decoder = Decoder(stack, Capacity(3, 80))
        for number in numbers:
            params = SamplingParams(temperature=1.0)
            decoder.admit(Request(number, texts[number], 10, params, drafter(name), seed=5))
        while any(state.finished is None for state in decoder.running.values()):
            decoder.cycle()
        return {number: (state.output, state.paths) for number, state in decoder.running.items()}

    together = run([2, 0, 1])
    assert together == {number: run([number])[number] for number in (2, 0, 1)}
