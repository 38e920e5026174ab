"""Programs that play scripts on an engine: the three schedules of the contract, and a batch in which all is mixed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audit.continuation_engine import Engine, Outcome
from audit.continuation_native import Trace
from audit.continuation_plan import Script
from faults.continuation import EngineFault
from lumotree.cycle_types import Stack

BATCH = 4


def play_cold(
    stack: Stack, script: Script, native: Trace, *, fault: EngineFault | None = None, record: Path | None = None,
    backend_name: str = "",
) -> Outcome:  # fmt: skip
    """A fresh engine that imports the state behind the prompt, and the script's cycles."""
    engine = Engine(stack, [script], fault=fault, record=record, backend_name=backend_name)
    engine.import_state(script, native[script.name][0])
    engine.play(script)
    return engine.outcome


def play_repeat_and_resumed(stack: Stack, repeat: Script, resumed: Script) -> Outcome:
    """The first request feeds the prompt and primes the prefix cache; the second is resumed from it."""
    engine = Engine(stack, [repeat, resumed])
    engine.feed_prompt(repeat, remember=True)
    engine.play(repeat)
    engine.decoder.release(repeat.number)
    engine.feed_prompt(resumed)
    if not engine.decoder.running[resumed.number].lease.shared:
        engine.outcome.readback.append(f"{resumed.name}: no page of the stored prefix was shared")
    engine.play(resumed)
    return engine.outcome


def play_pair(stack: Stack, scripts: Sequence[Script], native: Trace, fault: EngineFault | None = None) -> Outcome:
    """Several requests with imported states, in one batch, row order turned by one place each cycle."""
    engine = Engine(stack, scripts, slots=len(scripts), fault=fault)
    for script in scripts:
        engine.import_state(script, native[script.name][0])
    for cycle in range(max(len(s.cycles) for s in scripts)):
        numbers = [s.number for s in scripts if cycle < len(s.cycles)]
        turn = cycle % len(numbers)
        engine.advance(numbers[turn:] + numbers[:turn])
    return engine.outcome


def play_batch(stack: Stack, scripts: Sequence[Script]) -> Outcome:
    """Up to BATCH requests at a time: admitted one after another while others decode, prompts fed in chunks, row order
    turned each cycle, finished ones released and their slots used again by those that wait."""
    engine = Engine(stack, scripts, slots=BATCH)
    waiting, running, cycle = list(scripts), list[Script](), 0
    while waiting or running:
        if waiting and len(running) < BATCH:
            running.append(waiting.pop(0))
            engine.decoder.admit(engine.request(running[-1]))
        turn = cycle % len(running)
        engine.advance([s.number for s in running[turn:] + running[:turn]])
        for script in [s for s in running if engine.done(s)]:
            engine.decoder.release(script.number)
            running.remove(script)
        cycle += 1
    return engine.outcome
