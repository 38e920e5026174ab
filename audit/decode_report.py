"""From runs and their comparison to checks, findings, facts and a verdict."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from audit.decode_controls import Controls
from audit.decode_judge import NAMES, SURFACES, Departure, Verdict
from audit.decode_stats import CycleCost, ModeStats, facts_of
from audit.decode_types import ModeRun, Options, Truth
from audit.report import Check, Finding

#: Findings of one check that a report lists.
MOST = 10


@dataclass
class Found:
    """Everything a run came to. plain: greedy; cost: None where it was not measured; broken: pieces that ended with
    logits that are no numbers, and the reason."""

    plain: Truth | None = None
    runs: list[ModeRun] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    other_batch: list[Verdict] = field(default_factory=list)
    repeated: list[Verdict] = field(default_factory=list)
    controls: Controls | None = None
    stats: list[ModeStats] = field(default_factory=list)
    cost: CycleCost | None = None
    broken: list[tuple[str, str]] = field(default_factory=list)


def checks_of(found: Found) -> list[Check]:
    """Tokens and each surface under each law, another batch, repetition."""
    checks = []
    for law, verdict in found.verdicts.items():
        for what in ("tokens", *SURFACES):
            check = _check(law, what, verdict)
            if check is not None:
                checks.append(check)
    checks += _oracle(found.controls)
    checks += _pooled("another_batch", "same in another batch", found.other_batch)
    checks += _pooled("repeat", "greedy again, same bits", found.repeated)
    if found.broken:
        cells = max(1, len(found.runs))
        note = ": ".join(found.broken[0])
        checks.append(Check("logits", "logits are numbers", "tokens", "finite", "fail", cells, note=note))
    return checks


def _check(law: str, what: str, verdict: Verdict) -> Check | None:
    cells, equal = verdict.cells[what], verdict.equal[what]
    if not cells:
        return None
    first = next((d for d in sorted(verdict.departures, key=lambda d: d.cycle) if d.what == what), None)
    title = f"{law} tokens = plain" if what == "tokens" else f"{law}: {what} = plain"
    note = "" if first is None else f"first in {place(first)}"
    status = "pass" if equal == cells else "fail"
    return Check(f"{law}_{what}", title, NAMES[what], "bitwise", status, cells, equal, note=note)


def _oracle(controls: Controls | None) -> list[Check]:
    """The right decoder under the oracle's drafts."""
    if controls is None:
        return []
    return _pooled("oracle", f"oracle's drafts, {controls.ends} ends", [controls.oracle])


def _pooled(name: str, title: str, verdicts: Sequence[Verdict]) -> list[Check]:
    """One check over several comparisons, tokens and all surfaces in one; none without any."""
    cells, equal = (sum(sum(counts.values()) for counts in (getattr(v, part) for v in verdicts))
                    for part in ("cells", "equal"))  # fmt: skip
    first = next((v.first() for v in verdicts if v.departures), None)
    note = "" if first is None else f"first in {place(first)}"
    status = "pass" if equal == cells else "fail"
    return [Check(name, title, "all", "bitwise", status, cells, equal, note=note)] if cells else []


def place(departure: Departure) -> str:
    """Run, request, cycle, surface, layer."""
    where = f"{departure.run}, request {departure.request}, cycle {departure.cycle}"
    if departure.what == "tokens":
        return f"{where}: {departure.got}, plain decoding has {departure.allowed}"
    return f"{where}: surface {departure.what}, {departure.part} of layer {departure.layer}"


def findings_of(found: Found, options: Options) -> list[Finding]:
    """The earliest departures of every check, each with the command that shows its mode alone."""
    findings = []
    groups: list[tuple[str, Iterable[Departure]]] = [(f"{law}", v.departures) for law, v in found.verdicts.items()]
    groups += [("another_batch", [d for v in found.other_batch for d in v.departures])]
    groups += [("repeat", [d for v in found.repeated for d in v.departures])]
    if found.controls is not None:
        groups.append(("oracle", found.controls.oracle.departures))
    for name, departures in groups:
        for d in sorted(departures, key=lambda d: (d.cycle, (*SURFACES, "tokens").index(d.what)))[:MOST]:
            check = f"{name}_{d.what}" if name in ("greedy", "sampled") else name
            where = f"{d.run}, cycle {d.cycle}" + (f", {d.part}" if d.part else "")
            findings.append(
                Finding(check, where, _reproduce(options, d.run), request=d.request, layer=d.layer, got=d.got,
                        allowed=d.allowed)
            )  # fmt: skip
    return findings


def _reproduce(options: Options, run: str) -> str:
    mode, law = run.split()[:2]
    restriction = ["--laws", law] if mode == "oracle" else ["--modes", mode, "--laws", law]
    words = shlex.split(options.command)
    kept, skip = [], False
    for word in words:  # the same command, restricted to this mode and law
        if skip or word.partition("=")[0] in ("--modes", "--laws", "--report"):
            skip = not skip and "=" not in word
            continue
        kept.append(word)
    return shlex.join([*kept, *restriction])


def facts(found: Found, options: Options, identity: str, prompts: Sequence[int]) -> dict[str, object]:
    """What the report says besides its checks."""
    data: dict[str, object] = {
        "modes": facts_of(found.stats),
        "model_sha256": identity,
        "prompts": len(prompts),
        "prompt_tokens": sum(prompts),
        "max_tokens": options.tokens,
        "batch": options.batch,
        "plain_forwards": found.plain.forwards if found.plain is not None else None,
        "plain_seconds": round(found.plain.seconds, 3) if found.plain is not None else None,
    }
    if found.cost is not None:
        data["cycle_cost"] = {
            **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(found.cost).items()},
            "forward_ratio": round(found.cost.forward_ratio, 3),
            "cycle_ratio": round(found.cost.cycle_ratio, 3),
        }
    if found.controls is not None:
        seen = found.controls.seen
        data["controls"] = {s.fault: None if s.where is None else place(s.where) for s in seen}
        data["oracle_ends"] = found.controls.ends
    return {"decode": data}
