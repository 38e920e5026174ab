"""How fast and how far each way to decode went: tokens per cycle, forwards, seconds; pooled, per request, over runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from audit.decode_setup import ROWS
from audit.decode_types import ModeRun
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.requests import Request
from lumotree.slots import Capacity


@dataclass(frozen=True)
class ModeStats:
    """One mode under one law, over its runs.

    per_cycle: tokens per decoding cycle of a request, pooled over requests and runs. per_request: the same of each
    request that had one, pooled over runs. per_run: the same of each run, pooled over requests. forwards: target
    forwards of each run, prompts included. seconds: of each run. tokens_per_s: of each run, over cycles in which no
    prompt was fed. lengths: accepted length (root included) -> cycles.
    """

    mode: str
    law: str
    per_cycle: float
    per_request: tuple[float, ...]
    per_run: tuple[float, ...]
    forwards: tuple[int, ...]
    seconds: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    lengths: Mapping[str, int]


def stats_of(runs: Sequence[ModeRun]) -> ModeStats:
    """Statistics over the runs of one mode and law."""
    # A request whose first token ends it has no decoding cycle.
    numbers = sorted({n for run in runs for n, path in run.paths.items() if path})
    every = [length for run in runs for path in run.paths.values() for length in path]
    return ModeStats(
        runs[0].mode,
        runs[0].law,
        _mean(every),
        tuple(_mean([length for run in runs for length in run.paths.get(n, ())]) for n in numbers),
        tuple(_mean([length for path in run.paths.values() for length in path]) for run in runs),
        tuple(run.forwards for run in runs),
        tuple(round(run.seconds, 3) for run in runs),
        tuple(round(run.decode_tokens / run.decode_seconds, 2) if run.decode_seconds else 0.0 for run in runs),
        {str(length): count for length, count in sorted(Counter(every).items())},
    )


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def facts_of(stats: Sequence[ModeStats]) -> list[dict[str, object]]:
    """Plain data for a report."""
    return [{**asdict(s), **{k: list(v) for k, v in asdict(s).items() if isinstance(v, tuple)}} for s in stats]


@dataclass(frozen=True)
class CycleCost:
    """Median seconds of the target forward and of a whole cycle, one request, for two drafters; ratios wide / chain."""

    wide: str
    chain: str
    forward_s: tuple[float, float]
    cycle_s: tuple[float, float]

    @property
    def forward_ratio(self) -> float:
        """Forward time of the wide cycle over the chain's."""
        return self.forward_s[0] / self.forward_s[1]

    @property
    def cycle_ratio(self) -> float:
        """Whole cycle over whole cycle."""
        return self.cycle_s[0] / self.cycle_s[1]


#: Cycles that are timed, and the most tokens that they can emit: a cycle accepts no more rows than a tree is deep.
BENCH_CYCLES = 9
BENCH_TOKENS = 16 * (BENCH_CYCLES + 1)


def bench_cycles(stack: Stack, wide: Request, chain: Request) -> CycleCost:
    """Time cycles of two requests that differ in their drafters, in turn, on a decoder of one request each.

    Both go on for as long as it takes; a repetition is one cycle of each.
    """
    decoders = []
    for given in (wide, chain):
        request = replace(given, max_tokens=BENCH_TOKENS, eos=None)
        decoder = Decoder(stack, Capacity(1, request.longest, ROWS))
        decoder.admit(request)
        while decoder.running[request.number].prefilling:
            decoder.cycle()
        decoders.append(decoder)
    forward: list[list[float]] = [[], []]
    whole: list[list[float]] = [[], []]
    for _ in range(BENCH_CYCLES):
        for place, decoder in enumerate(decoders):
            seconds = decoder.cycle().seconds
            forward[place].append(seconds.verify)
            whole[place].append(sum(vars(seconds).values()))
    median = [tuple(statistics.median(times) for times in pair) for pair in (forward, whole)]
    return CycleCost(_name(wide), _name(chain), (median[0][0], median[0][1]), (median[1][0], median[1][1]))


def _name(request: Request) -> str:
    return "plain" if request.drafter is None else request.drafter.name
