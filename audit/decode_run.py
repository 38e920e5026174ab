"""Runs one way to decode, and plain decoding, and keeps what is compared afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from audit.decode_types import Digests, Mark, ModeRun, Truth, digests_of
from lumotree.cycle import Decoder
from lumotree.cycle_types import Cycle, Stack
from lumotree.errors import CapacityError, DecodeError
from lumotree.plain import PlainDecoder
from lumotree.requests import Request
from lumotree.slots import Capacity

MakeDecoder = Callable[[Stack, Capacity], Decoder]


class _Log:
    """Collects the records of a run."""

    def __init__(self, decoder: Decoder, every: bool) -> None:
        self.decoder, self.every = decoder, every
        self.signed = decoder.stack.backend.contract.zeros == "signed"
        self.marks: list[Mark] = []
        self.cycles: dict[int, int] = {}
        self.ends: dict[int, list[int]] = {}
        self.outputs: dict[int, tuple[int, ...]] = {}
        self.paths: dict[int, tuple[int, ...]] = {}
        self.forwards, self.seconds, self.decode_seconds, self.decode_tokens = 0, 0.0, 0.0, 0
        self.verify: list[tuple[int, float]] = []

    def add(self, cycle: Cycle) -> list[Mark]:
        """Account for one cycle; returns its marks."""
        before = len(self.marks)
        self.forwards += 1
        spent = sum(vars(cycle.seconds).values())
        self.seconds += spent
        if not any(record.fed for record in cycle.records):
            self.decode_seconds += spent
            self.decode_tokens += sum(len(record.emitted) for record in cycle.records)
            self.verify.append((len(cycle.records), cycle.seconds.verify))
        for record in cycle.records:
            number = record.number
            index = self.cycles.get(number, 0)
            self.cycles[number] = index + 1
            self.ends.setdefault(number, []).extend([index] * len(record.emitted))
            if self.every or record.finished is not None:
                digests = digests_of(self.decoder.surfaces(number), signed_zeros=self.signed)
                self.marks.append(Mark(number, index, record.committed, digests))
        return self.marks[before:]

    def keep(self, number: int) -> None:
        """Remember the output of a request as it stands."""
        state = self.decoder.running[number]
        self.outputs[number], self.paths[number] = tuple(state.output), tuple(state.paths)


def run_mode(
    stack: Stack,
    requests: Sequence[Request],
    capacity: Capacity,
    names: tuple[str, str, int],
    *,
    every: bool,
    make: MakeDecoder = Decoder,
    until: Callable[[Mark, tuple[int, ...]], bool] | None = None,
) -> ModeRun:
    """Decode the requests, as many at a time as there is room for, the next admitted when one ends.

    names: mode, law, run. until(mark, output so far): whether to stop here. Logits that are no numbers end the run too;
    `stopped` says so.
    """
    decoder = make(stack, capacity)
    log, waiting, stopped = _Log(decoder, every), list(requests), ""
    while waiting or decoder.running:
        _admit(decoder, waiting)
        try:
            cycle = decoder.cycle()
        except DecodeError as cause:
            stopped = str(cause)
            break
        fresh = log.add(cycle)
        if until is not None and any(until(mark, tuple(decoder.running[mark.number].output)) for mark in fresh):
            stopped = "asked to"
            break
        for record in cycle.records:
            if record.finished is not None:
                log.keep(record.number)
                decoder.release(record.number)
    for number in decoder.running:
        log.keep(number)
    ends = {number: tuple(log.ends.get(number, ())) for number in log.outputs}
    return ModeRun(
        *names, log.outputs, ends, log.paths, tuple(log.marks), log.forwards, log.seconds, log.decode_seconds,
        log.decode_tokens, tuple(log.verify), stopped,
    )  # fmt: skip


def _admit(decoder: Decoder, waiting: list[Request]) -> None:
    while waiting:
        try:
            decoder.admit(waiting[0])
        except CapacityError:
            if not decoder.running:
                raise
            return
        del waiting[0]


def run_plain(
    stack: Stack,
    requests: Sequence[Request],
    outputs: Sequence[Sequence[int] | None] | None = None,
    asked: Sequence[set[int]] | None = None,
) -> list[tuple[tuple[int, ...], Mapping[int, Digests]]]:
    """Plain decoding of requests (which may repeat), or of given outputs: (output, m -> digests) of each.

    asked: the m of each request to digest at; None = at every m. The end is always there.
    """
    plain = PlainDecoder(stack, requests, outputs or [None] * len(requests))
    signed = stack.backend.contract.zeros == "signed"
    kept: list[dict[int, Digests]] = [{} for _ in requests]

    def watch(place: int, fed: int) -> None:
        if asked is None or fed in asked[place]:
            kept[place][fed] = digests_of(plain.surfaces(place), signed_zeros=signed)

    results = plain.run(watch)
    for place, result in enumerate(results):
        if result.steps not in kept[place]:
            kept[place][result.steps] = digests_of(result.surfaces, signed_zeros=signed)
    return [(r.output, digests) for r, digests in zip(results, kept, strict=True)]


def truth_of(stack: Stack, requests: Sequence[Request], *, every: bool = True) -> Truth:
    """Plain decoding of one set of requests, by number. every: digests at every m, not at the end alone.

    Raises DecodeError for logits that are no numbers.
    """
    started = time.perf_counter()
    found = run_plain(stack, requests, asked=None if every else [set() for _ in requests])
    if stack.model.device.type == "cuda":
        torch.cuda.synchronize(stack.model.device)
    return Truth(
        {r.number: f[0] for r, f in zip(requests, found, strict=True)},
        {r.number: f[1] for r, f in zip(requests, found, strict=True)},
        max(len(r.prompt) + len(f[0]) - 1 for r, f in zip(requests, found, strict=True)),
        time.perf_counter() - started,
    )
