"""Plain decoding: one token at a time through the backend's native step, which every other way is held against.

Nothing of the cycle is used here: no tree, no workspace, no publication, no chunk. Each request has a slot and pages of
its own for as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.backends.protocol import Batch, Plan
from lumotree.coins import coins_for
from lumotree.cycle_types import Stack
from lumotree.errors import DecodeError, InputError, RequestError
from lumotree.lazy_walk import Walk
from lumotree.requests import Request, check_tokens
from lumotree.sampling import first_argmax, target_rows
from lumotree.select_types import Step
from lumotree.surfaces import Surfaces, read_surfaces
from lumotree.tree import Tree

PAGE_SIZE = 16


@dataclass
class _Sequence:
    """One request on its way. fed: how many of `tokens` the model has seen. differs: output tokens that were given and
    are not the ones plain decoding would have chosen, as (index, chosen)."""

    request: Request
    tokens: list[int]
    given: bool
    fed: int = 0
    differs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """The last token of a request is never fed."""
        output = self.tokens[len(self.request.prompt) :]
        if self.given:
            return self.fed == len(self.tokens) - 1
        return bool(output) and (len(output) == self.request.max_tokens or output[-1] == self.request.eos)


@dataclass(frozen=True)
class PlainResult:
    """output: emitted tokens. steps: tokens fed. surfaces: those of everything fed. differs: for a given output, places
    where plain decoding would have chosen another token, as (index, its token); only looked for in greedy requests."""

    output: tuple[int, ...]
    steps: int
    surfaces: Surfaces
    differs: tuple[tuple[int, int], ...]


class PlainDecoder:
    """Decodes requests one token at a time, all together, each in the slot of its place in the list.

    outputs: for each request None, to decode, or its output, to follow without choosing anything. Raises RequestError
    for a token outside the vocabulary.
    """

    def __init__(self, stack: Stack, requests: Sequence[Request], outputs: Sequence[Sequence[int] | None]) -> None:
        for request, given in zip(requests, outputs, strict=True):
            check_tokens(f"request {request.number}", [*request.prompt, *(given or ())], stack.model.vocab)
            if given is not None and not given:
                raise RequestError(f"request {request.number}: expected an output of at least one token, got none")
        self.stack = stack
        self.sequences = [
            _Sequence(r, [*r.prompt, *(given or ())], given is not None)
            for r, given in zip(requests, outputs, strict=True)
        ]
        longest = max(max(s.request.longest, len(s.tokens)) for s in self.sequences)
        self._pages = -(-longest // PAGE_SIZE)
        flat = len(self.sequences) * self._pages * PAGE_SIZE
        self.pools = stack.model.empty_pools(stack.backend.contract, len(self.sequences), flat)
        self.pools.recurrent.zero_()
        self.pools.conv.zero_()
        self.cache = None if stack.head is None else stack.head.empty_cache(flat)
        self.hidden: Tensor | None = None
        self.forwards = 0

    def step(self) -> list[int]:
        """Feed one token of every unfinished request; returns their places, none when all are done.

        Raises DecodeError for logits that no token can be chosen from.
        """
        live = [i for i, s in enumerate(self.sequences) if not s.done]
        if not live:
            return []
        device = self.stack.model.device
        fed = np.array([self.sequences[i].fed for i in live])
        tokens = torch.tensor([self.sequences[i].tokens[self.sequences[i].fed] for i in live], device=device)
        self._step_head(live, fed, tokens)
        batch = self._batch(np.array(live), fed)
        forward = self.stack.model.step(tokens, batch, self.pools, self.stack.backend)
        self.forwards += 1
        if self.hidden is None:
            self.hidden = torch.zeros(
                (len(self.sequences), forward.hidden.shape[1]), dtype=forward.hidden.dtype, device=device
            )
        self.hidden[torch.tensor(live, device=device)] = forward.hidden
        logits = forward.logits.cpu()
        for place, row in zip(live, logits, strict=True):
            self._choose(self.sequences[place], row)
        return live

    def _step_head(self, live: Sequence[int], fed: NDArray[np.int64], tokens: Tensor) -> None:
        """The draft head's entry at position p - 1, now that the token at p is known."""
        ready = np.flatnonzero(fed > 0)
        if self.stack.head is None or self.cache is None or self.hidden is None or not len(ready):
            return
        places = np.array(live)[ready]
        pick = torch.from_numpy(ready).to(tokens.device)
        hidden = self.hidden[torch.from_numpy(places).to(tokens.device)]
        self.stack.head.forward(tokens[pick], hidden, self._batch(places, fed[ready] - 1), self.cache)

    def _choose(self, sequence: _Sequence, logits: Tensor) -> None:
        sequence.fed += 1
        index = sequence.fed - len(sequence.request.prompt)
        if index < 0:
            return
        if not sequence.given:
            sequence.tokens.append(next_token(sequence.request, sequence.tokens, logits, index))
        elif sequence.request.greedy:
            chosen = next_token(sequence.request, sequence.tokens[: sequence.fed], logits, index)
            if chosen != sequence.tokens[sequence.fed]:
                sequence.differs.append((index, chosen))

    def _batch(self, slots: NDArray[np.int64], prefix: NDArray[np.int64]) -> Batch:
        table = slots[:, None] * self._pages + np.arange(self._pages)
        page = table[np.arange(len(slots)), prefix // PAGE_SIZE]
        return one_row_batch(slots, prefix, table, PAGE_SIZE, page * PAGE_SIZE + prefix % PAGE_SIZE,
                             self.stack.model.device)  # fmt: skip

    def run(self, watch: Callable[[int, int], None] | None = None) -> list[PlainResult]:
        """Step until all requests are done. watch(place, fed) is called after each step of each of them."""
        while live := self.step():
            if watch is not None:
                for place in live:
                    watch(place, self.sequences[place].fed)
        return [
            PlainResult(tuple(s.tokens[len(s.request.prompt) :]), s.fed, self.surfaces(i), tuple(s.differs))
            for i, s in enumerate(self.sequences)
        ]

    def surfaces(self, place: int) -> Surfaces:
        """Copies of every surface of one request as it stands."""
        start = place * self._pages * PAGE_SIZE
        flat = np.arange(start, start + self.sequences[place].fed)
        hidden = None if self.hidden is None or self.cache is None or not len(flat) else self.hidden[place]
        return read_surfaces(self.stack.backend, self.pools, None, place, flat, self.cache, hidden)


def next_token(request: Request, tokens: Sequence[int], logits: Tensor, cycle: int) -> int:
    """The token after `tokens`, chosen as a decoder with zero drafts chooses it. logits: fp32 `[V]` on the CPU.

    cycle: output tokens before it, which is the address of its coin. Raises DecodeError for NaN logits.
    """
    s, prompt = request.sampling, len(request.prompt)
    if request.greedy and not s.penalised:
        if not bool(torch.isfinite(logits.amax())):
            raise DecodeError(f"request {request.number}, token {cycle}: the largest logit is not a finite number")
        return first_argmax(logits)
    if len(tokens) == prompt:  # presence and frequency look at the output, and the last prompt token is not part of it
        s = replace(s, presence=0.0, frequency=0.0)
    root = Tree.make([-1], tokens=[tokens[-1]])
    walk = Walk(root, logits[None], None, s)
    try:
        if walk.suits(request.selection):
            return walk.select(request.selection, request.seed, request.number, cycle)[1]
        parts = (tokens[:prompt], tokens[prompt:-1])
        seen = [torch.bincount(torch.tensor(t, dtype=torch.int64), minlength=len(logits)) for t in parts]
        target = target_rows(logits[None], root, s, prompt_counts=seen[0], output_counts=seen[1])
    except InputError as cause:
        raise DecodeError(f"request {request.number}, token {cycle}: {cause}") from cause
    coins = coins_for(request.seed, [request.number], cycle, 1)
    return int(request.selection.select(Step(root, target), torch.tensor([[tokens[-1]]]), coins).bonus[0])


def one_row_batch(
    slots: NDArray[np.int64], prefix: NDArray[np.int64], table: NDArray[np.int64], page_size: int,
    row_slots: NDArray[np.int64], device: torch.device,
) -> Batch:  # fmt: skip
    """The batch of B requests of one row each, as `build_batch` makes it from trees of one row, without the trees.

    slots, prefix, row_slots `[B]`; table `[B, pages]`.
    """
    count = len(slots)

    def ints(values: NDArray[np.int64] | list[int]) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int32)).to(device)

    each, minus = ints(np.arange(count)), ints(np.full(count, -1))
    plan = Plan(each, ints(np.arange(count + 1)), minus, each, ints([0, count]), minus)
    return Batch(
        cu_rows=ints(np.arange(count + 1)),
        parent=minus,
        active=torch.ones(count, dtype=torch.bool, device=device),
        position=ints(prefix),
        row_request=each,
        state_slot=ints(slots),
        prefix_len=ints(prefix),
        page_table=ints(table),
        page_size=page_size,
        row_slot=ints(row_slots),
        plan=plan,
    )
