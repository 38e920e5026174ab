"""`lumotree-audit decode`: real speculative decoding, held against plain decoding token by token and bit by bit.

What is compared: greedy output of every mode with plain greedy decoding, token by token; what every mode leaves on
every surface (R, C, K, D) with what plain decoding of the same tokens leaves, bit by bit - after every cycle in the
default run, at the end of each request in the full one. Sampled output is not compared with plain sampling (another
number of coins is drawn), except where nothing is drafted; it is followed by plain decoding, and must be the same in
another batch. Faulty decoders, judged by the same comparison, show that it could have failed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch

from audit.decode_controls import Controls
from audit.decode_judge import Verdict, judge_surfaces, judge_tokens, same_runs
from audit.decode_report import Found, checks_of, facts, findings_of
from audit.decode_setup import (
    capacity_for,
    check_positions,
    folder_of,
    identity_of,
    open_stack,
    poisoned,
    prompts_of,
    requests_of,
)
from audit.decode_stats import BENCH_TOKENS, CycleCost, ModeStats, bench_cycles, stats_of
from audit.decode_tasks import Bench, Broken, ControlTask, LocateTask, ModeTask, PlainTask, ReplayTask, Task, bench
from audit.decode_types import LAWS, MODES, ModeRun, Options, Share, Truth, merged_runs, merged_truths, shares
from audit.environment import environment_on
from audit.processes import peak_mib
from audit.render.progress import Progress
from audit.report import Report, decide
from faults.decoding import DECODING
from lumotree.contract import SURFACE_NAMES
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.errors import InputError

#: The mode whose faults are run, and which is decoded again in another batch.
WIDE, CHAIN = "hydra27", "mtp5"


#: Different rows of the oracle's trees that must have been accepted ends.
LEAST_ENDS = 5


@dataclass(frozen=True)
class Run:
    """A finished run: the report and the runs it came from."""

    report: Report
    runs: tuple[ModeRun, ...]


def check_options(options: Options) -> None:
    """Raise InputError for a mode, law or number that cannot be."""
    for name, given, allowed in (("--modes", options.modes, MODES), ("--laws", options.laws, LAWS)):
        unknown = [g for g in given if g not in allowed]
        if unknown or not given:
            raise InputError(
                f"{name}: expected some of {', '.join(allowed)}, got {unknown[0] if unknown else 'none'!r}"
            )
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {options.device}: this machine has no GPU that torch can use")


def run_decode(options: Options) -> Run:
    """Run everything the options ask for. Raises InputError and its kin for bad input, before anything is decoded."""
    started = time.perf_counter()
    check_options(options)
    stack = replace(poisoned(open_stack(options)), identity=identity_of(folder_of(options)))
    prompts = prompts_of(options)
    for mode in options.modes:  # refuses prompts and options that no run could take
        _check_requests(options, stack, mode)
    found = Found()
    with bench(options, stack) as machine:
        split = shares(options, len(prompts), machine.width)
        first = _first_tasks(options, split)
        replays = _replay_count(options, split, machine.width)
        with Progress(len(first) + replays, "decode") as progress:
            results = []
            for task, result in machine.run(first):
                results.append((task, result))
                progress.advance(note=task.label)
            _sort(found, results)
            found.verdicts = {} if found.plain is None else {"greedy": _judge_greedy(found, found.plain)}
            if "sampled" in options.laws:
                found.verdicts["sampled"] = _judge_sampled(found, machine, split, replays, progress)
            if not options.every:
                _locate(found, machine)
        found.stats = _stats(found.runs, options)
        if {WIDE, CHAIN} <= set(options.modes) and not found.broken:
            found.cost = _cost(options, stack)
    return Run(_report(options, stack, found, [len(p) for p in prompts], started, machine.width), tuple(found.runs))


def _check_requests(options: Options, stack: Stack, mode: str) -> None:
    requests = requests_of(options, mode, "greedy", 0)
    check_positions(requests, stack.model.config.positions)  # type: ignore[attr-defined]
    decoder = Decoder(stack, capacity_for(requests, 1))
    for request in requests:
        decoder.check(request)


def _first_tasks(options: Options, split: Sequence[Share]) -> list[Task]:
    """Longest first."""
    wide = WIDE if WIDE in options.modes else options.modes[-1]
    tasks: list[Task] = []
    if "greedy" in options.laws:
        tasks += [PlainTask(share) for share in split]
    if options.controls:
        tasks.append(ControlTask(tuple(DECODING)))
    order = ("budget", "hydra27", "mtp5", "suffix", "plain")
    for run in range(options.runs):
        for law in options.laws:
            named = [mode for mode in order if mode in options.modes]
            tasks += [ModeTask(mode, law, run, share=share) for mode in named for share in split]
    tasks += [ModeTask(wide, law, 0, turned=True) for law in options.laws]
    return tasks


def _replay_count(options: Options, split: Sequence[Share], width: int) -> int:
    """Pieces in which plain decoding follows the sampled runs: as many as workers, or one a run and share."""
    if "sampled" not in options.laws:
        return 0
    runs = options.runs * len(options.modes)
    return min(width, runs) if len(split) == 1 else runs * len(split)


def _sort(found: Found, results: Sequence[tuple[Task, object]]) -> None:
    turned: list[ModeRun] = []
    truths: list[Truth] = []
    pieces: dict[tuple[str, str, int], list[ModeRun]] = {}
    for task, result in results:
        if isinstance(result, Broken):
            found.broken.append((task.label, result.reason))
        elif isinstance(task, PlainTask):
            assert isinstance(result, Truth)
            truths.append(result)
        elif isinstance(task, ControlTask):
            assert isinstance(result, Controls)
            found.controls = result
        elif isinstance(task, ModeTask):
            assert isinstance(result, ModeRun)
            if task.turned:
                turned.append(result)
            else:
                pieces.setdefault((task.mode, task.law, task.run), []).append(result)
    found.runs = [merged_runs(parts) for parts in pieces.values()]
    if truths and len(truths) == sum(isinstance(task, PlainTask) for task, _ in results):
        found.plain = merged_truths(truths)
    found.broken += [(run.name, run.stopped) for run in found.runs if run.stopped]
    # What such a run emitted before it ended may well be right: that it ended is the finding.
    found.broken += [(f"{run.name} in another batch", run.stopped) for run in turned if run.stopped]
    if found.controls is not None and found.controls.stopped:
        found.broken.append(("decoding of known answers", found.controls.stopped))
    for other in turned:
        one = next(r for r in found.runs if (r.mode, r.law, r.run) == (other.mode, other.law, 0))
        if not one.stopped:
            found.other_batch.append(same_runs(one, other))
    for run in found.runs:
        if run.run and run.law == "greedy":
            one = next(r for r in found.runs if (r.mode, r.law, r.run) == (run.mode, run.law, 0))
            found.repeated.append(same_runs(one, run))


def _judge_greedy(found: Found, truth: Truth) -> Verdict:
    verdict = Verdict.empty()
    for run in found.runs:
        if run.law == "greedy":
            judge_tokens(verdict, run, truth)
            judge_surfaces(verdict, run, truth)
    return verdict


def _judge_sampled(found: Found, machine: Bench, split: Sequence[Share], parts: int, progress: Progress) -> Verdict:
    verdict = Verdict.empty()
    sampled = [run for run in found.runs if run.law == "sampled"]
    if len(split) > 1:
        tasks = [ReplayTask((run.only(share),)) for run in sampled for share in split]
    else:
        tasks = [ReplayTask(tuple(sampled[i::parts])) for i in range(parts)]
    for task, truths in machine.run([t for t in tasks if t.runs]):
        assert isinstance(task, ReplayTask)
        progress.advance(note=task.label)
        if isinstance(truths, Broken):
            found.broken.append((task.label, truths.reason))
            continue
        for run, truth in zip(task.runs, truths, strict=True):
            if run.mode == "plain":
                judge_tokens(verdict, run, truth)
            judge_surfaces(verdict, run, truth)
    return verdict


def _locate(found: Found, machine: Bench) -> None:
    """Where only ends were compared and one differs: find the first cycle, by running that mode once more."""
    for law, verdict in found.verdicts.items():
        names = {d.run for d in verdict.departures if d.what != "tokens"}
        run = next((r for r in found.runs if r.law == law and r.name in names), None)
        if run is None:
            continue
        for _, result in machine.run([LocateTask(ModeTask(run.mode, law, run.run))]):
            if isinstance(result, Broken):
                continue
            again, truth = result
            near = Verdict.empty()
            judge_surfaces(near, again, truth)
            # What this other run does not show (a race, another batch) keeps its place, the end of its request.
            nearer = {(d.request, d.what) for d in near.departures}
            kept = [d for d in verdict.departures if d.run != run.name or (d.request, d.what) not in nearer]
            verdict.departures[:] = [*(d for d in near.departures if d.what != "tokens"), *kept]


def _stats(runs: Sequence[ModeRun], options: Options) -> list[ModeStats]:
    groups = [[r for r in runs if (r.mode, r.law) == (m, law)] for law in options.laws for m in options.modes]
    return [stats_of(group) for group in groups if group]


def _cost(options: Options, stack: Stack) -> CycleCost | None:
    """None for a model with too few positions."""
    wide, chain = (requests_of(options, mode, "greedy", 0)[0] for mode in (WIDE, CHAIN))
    positions = stack.model.config.positions  # type: ignore[attr-defined]
    return bench_cycles(stack, wide, chain) if len(wide.prompt) + BENCH_TOKENS <= positions else None


def _report(options: Options, stack: Stack, found: Found, prompts: Sequence[int], started: float, width: int) -> Report:
    checks, controls = (
        checks_of(found),
        [seen.control for seen in found.controls.seen] if found.controls is not None else [],
    )
    coverage = dict.fromkeys(SURFACE_NAMES, "covered")
    verdict, reasons = decide(checks, controls, coverage, doubts=_doubts(found))
    return Report(
        verdict=verdict,
        reasons=reasons,
        suite=f"decode {len(prompts)} prompts, {options.tokens} tokens",
        backend=stack.backend.name,
        contract=stack.backend.contract.as_dict(),
        environment=environment_on(options.device),
        envelope=None,
        coverage=coverage,
        checks=tuple(checks),
        controls=tuple(controls),
        findings=tuple(findings_of(found, options)),
        seed=options.seed,
        command=options.command,
        wall_s=round(time.perf_counter() - started, 2),
        peak_mib=peak_mib(width if width > 1 else 0),
        facts=facts(found, options, stack.identity, prompts),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _doubts(found: Found) -> list[str]:
    """Reasons for which equal bits would mean nothing."""
    doubts = []
    outputs = {o for run in found.runs for o in run.outputs.values()}
    if len({token for output in outputs for token in output}) < 2:
        doubts.append("every emitted token is the same")
    if found.controls is not None and found.controls.ends < LEAST_ENDS:
        doubts.append(f"only {found.controls.ends} different rows were accepted ends, needed: {LEAST_ENDS}")
    return doubts
