"""What `lumotree-audit decode` is asked for, and what one way to decode left to be judged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lumotree.surfaces import Surfaces

#: (surface, part, layer) of one tensor.
Key = tuple[str, str, int]
Digests = Mapping[Key, bytes]

LAWS = ("greedy", "sampled")
MODES = ("plain", "mtp5", "hydra27", "suffix", "budget")


@dataclass(frozen=True)
class Options:
    """Options of a run.

    backend: one name, or `gdn=NAME,conv=NAME,attention=NAME`. checkpoint: folder of a model, None = the shipped one.
    prompts: how many of each of the two sets; prompt_tokens: most of each prompt, None = all; prompt_file: JSON list of
    token lists to use instead. tokens: to emit. batch: requests at a time. runs: repetitions; run r samples with
    seed + r. every: compare all surfaces after every cycle, not only at the end. workers: processes, 0 = this one.
    controls: whether the faults are run.
    """

    backend: str = "torch"
    checkpoint: str | None = None
    device: str = "cpu"
    seed: int = 1
    prompts: int = 2
    prompt_tokens: int | None = 48
    prompt_file: str | None = None
    eos: int | None = None
    tokens: int = 64
    modes: tuple[str, ...] = MODES
    laws: tuple[str, ...] = LAWS
    batch: int = 4
    runs: int = 1
    every: bool = True
    workers: int | None = None
    controls: bool = True
    command: str = "lumotree-audit decode"


@dataclass(frozen=True)
class Mark:
    """Where one request stood after one of its cycles. cycle: cycles of this request before it, prompt chunks
    included. committed: m. digests: of every surface tensor."""

    number: int
    cycle: int
    committed: int
    digests: Digests


@dataclass(frozen=True)
class ModeRun:
    """One way to decode a set of requests.

    outputs: request -> emitted tokens. ends: request -> for each emitted token the cycle (as in Mark) that emitted it.
    paths: request -> accepted length of each decoding cycle, root included. forwards: target forwards, prompt chunks
    included. seconds: wall clock of all cycles. decode_seconds, decode_tokens: of cycles in which no prompt was fed.
    verify: (live requests, seconds of the target forward) of each such cycle. stopped: why it ended early, or "".
    """

    mode: str
    law: str
    run: int
    outputs: Mapping[int, tuple[int, ...]]
    ends: Mapping[int, tuple[int, ...]]
    paths: Mapping[int, tuple[int, ...]]
    marks: tuple[Mark, ...]
    forwards: int
    seconds: float
    decode_seconds: float
    decode_tokens: int
    verify: tuple[tuple[int, float], ...] = ()
    stopped: str = ""

    @property
    def name(self) -> str:
        """What a reader calls it."""
        return f"{self.mode} {self.law}"

    def only(self, share: Share) -> ModeRun:
        """What it left of the requests of a share; forwards and seconds stay those of the whole."""
        outputs, ends, paths = ({n: of[n] for n in of if share.has(n)} for of in (self.outputs, self.ends, self.paths))
        marks = tuple(mark for mark in self.marks if share.has(mark.number))
        return replace(self, outputs=outputs, ends=ends, paths=paths, marks=marks)


@dataclass(frozen=True)
class Truth:
    """Plain decoding: request -> output, and request -> m -> digests for the m that are asked about."""

    outputs: Mapping[int, tuple[int, ...]]
    digests: Mapping[int, Mapping[int, Digests]]
    forwards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Share:
    """Every `of`-th request, from number `first` on: what one worker decodes of a long run."""

    first: int = 0
    of: int = 1

    def has(self, number: int) -> bool:
        """Whether a request is in it."""
        return number % self.of == self.first


WHOLE = Share()


def shares(options: Options, requests: int, workers: int) -> list[Share]:
    """As many as workers, but each of more requests than a batch holds: so every share has a full batch, and a request
    that is admitted when another has ended, as the whole run would have."""
    parts = max(1, min(workers, requests // (options.batch + 1)))
    return [Share(first, parts) for first in range(parts)]


def merged_runs(runs: Sequence[ModeRun]) -> ModeRun:
    """The shares of one run as one: forwards and seconds are summed, as though one worker had done them in turn."""
    if len(runs) == 1:
        return runs[0]
    outputs, ends, paths = (
        {n: of[n] for n in sorted(of)}
        for of in (
            {n: v for run in runs for n, v in getattr(run, name).items()} for name in ("outputs", "ends", "paths")
        )
    )
    return replace(
        runs[0],
        outputs=outputs,
        ends=ends,
        paths=paths,
        marks=tuple(mark for run in runs for mark in run.marks),
        forwards=sum(run.forwards for run in runs),
        seconds=sum(run.seconds for run in runs),
        decode_seconds=sum(run.decode_seconds for run in runs),
        decode_tokens=sum(run.decode_tokens for run in runs),
        verify=tuple(pair for run in runs for pair in run.verify),
        stopped=next((run.stopped for run in runs if run.stopped), ""),
    )


def merged_truths(truths: Sequence[Truth]) -> Truth:
    """The shares of plain decoding as one; forwards and seconds are summed."""
    return Truth(
        {n: output for truth in truths for n, output in truth.outputs.items()},
        {n: digests for truth in truths for n, digests in truth.digests.items()},
        sum(truth.forwards for truth in truths),
        sum(truth.seconds for truth in truths),
    )


def digests_of(surfaces: Surfaces, *, signed_zeros: bool) -> dict[Key, bytes]:
    """A digest of the bits of every tensor; with unsigned zeros -0 counts as +0."""
    found = {}
    for surface, part, layer, tensor in surfaces.parts():
        value = tensor if signed_zeros else tensor + 0.0
        raw = value.contiguous().cpu().view(torch.uint8).numpy()
        digest = hashlib.sha256(raw.data)  # CPUs have instructions for it
        digest.update(str(tuple(tensor.shape)).encode())
        found[surface, part, layer] = digest.digest()[:12]
    return found
