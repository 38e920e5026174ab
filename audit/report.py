"""The result of an audit as plain data, and the one place where a verdict is decided.

JSON schema, version 1 (`report.json`; strict JSON, so a float that is not a number is written as the string "nan",
"inf" or "-inf"; an absent value is null):

    schema_version  int     1
    verdict         str     "PASS" | "FAIL" | "INCONCLUSIVE"
    reasons         [str]   why it is not PASS; empty for PASS
    suite, backend  str     what was run, on which backend
    contract        object  the declared variant, `lumotree.contract.Contract.as_dict`
    environment     object  `audit.environment.environment`
    envelope        {path, sha256, guarantee} | null
    coverage        object  surface -> "covered" | "verify only" | "not covered"
    checks          [{id, title, surface, rung, status, cells, bitwise_cells, worst_ratio, bound, note}]
        status          "pass" | "fail" | "inconclusive" | "info" (reported, not judged)
        cells           int, how many cells were compared; bitwise_cells: how many agree in every bit, or null
        worst_ratio     largest value / bound, or null; bound: a number, the name of a rule, or null
    controls        [{fault, expect, detected, by, ratio, cases}]
        expect          "detected" | "harmless"; by: id of the check that saw it; ratio: how clearly (1 = just)
    findings        [{check, case, request, layer, row, head, got, allowed, reproduce}]
        request .. head are indices or null; got, allowed: number, text or null; reproduce: one shell command
    horizon         object  memory horizon of the inputs, name -> number
    facts           object  what else a suite found, by name, not judged (absent in older reports, then {}). Sampler:
                            steps, conventions, exact, summed, faults (see `audit.sampler_report`); continuation:
                            cycles, ends, spreads, what each rule lets through, drift (`audit.continuation_report`);
                            decode: modes, costs of a cycle, where controls were seen (`audit.decode_report`)
    matrix          [{fault, surface, check, state, first_check, size, probability, interval}] (absent in older reports,
                    then []); see `audit.fault_report`
    diagnosis       object  what `audit.diagnose` found about a failure, {} if it was not asked (absent in older ones)
    warnings        [str]
    seed int, command str, wall_s float (seconds), peak_mib float | null (MiB), created str (ISO date)

Exit codes: `EXIT_CODES`. Raises ReportError for anything inconsistent; a PASS with zero judged cells cannot be made.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite, isnan
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lumotree.errors import ReportError

SCHEMA_VERSION = 1
EXIT_CODES: dict[str, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
STATUSES = ("pass", "fail", "inconclusive", "info")
EXPECTATIONS = ("detected", "harmless")
COVERAGE = ("covered", "verify only", "not covered")

#: Rungs on which a pass means that every cell agrees in every bit.
BITWISE_RUNGS = ("exact-grid", "bitwise")

_SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Check:
    """One judged question. cells: compared cells; bitwise_cells: those equal in every bit (None: not counted);
    worst_ratio: largest value / bound; bound: number, name of a rule, or None; note: one line, the reason if the
    status is inconclusive."""

    id: str
    title: str
    surface: str
    rung: str
    status: str
    cells: int
    bitwise_cells: int | None = None
    worst_ratio: float | None = None
    bound: str | float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _check_types(self)
        where = f"check {self.id!r}"
        _one_of(where, "status", self.status, STATUSES)
        _demand(bool(self.id), f"{where}: expected a non-empty id")
        _demand(self.cells >= 0, f"{where}: expected cells >= 0, got cells={self.cells}")
        bits = self.bitwise_cells
        _demand(bits is None or 0 <= bits <= self.cells, f"{where}: {bits} bitwise of {self.cells} cells")
        _demand(self.worst_ratio is None or not isnan(self.worst_ratio), f"{where}: worst_ratio is NaN, use infinity")
        if self.status in ("pass", "fail"):
            _demand(self.cells > 0, f"{where}: expected cells > 0 for status {self.status}, got zero cells")
        if self.status == "pass" and self.rung in BITWISE_RUNGS and bits is not None:
            _demand(bits == self.cells, f"{where}: {bits} of {self.cells} cells bitwise is no pass on rung {self.rung}")
        if self.status == "inconclusive":
            _demand(bool(self.note), f"{where}: an inconclusive check must give its reason in note")


@dataclass(frozen=True)
class Control:
    """One injected fault. expect: it must be "detected", or it is "harmless" and must not be flagged; by: id of the
    check that saw it; ratio: how far over its bound, infinity for a bitwise check; cases: how many it ran on."""

    fault: str
    expect: str
    detected: bool
    by: str | None = None
    ratio: float | None = None
    cases: int = 0

    def __post_init__(self) -> None:
        _check_types(self)
        where = f"control {self.fault!r}"
        _one_of(where, "expect", self.expect, EXPECTATIONS)
        _demand(bool(self.fault), f"{where}: expected a non-empty fault name")
        _demand(self.cases >= 0, f"{where}: expected cases >= 0, got cases={self.cases}")
        _demand(self.detected == (self.by is not None), f"{where}: detected={self.detected} but by={self.by!r}")
        _demand(not self.detected or self.cases > 0, f"{where}: detected on zero cases")

    @property
    def as_expected(self) -> bool:
        """Whether the audit did with this fault what it had to do; a control without a case shows nothing."""
        return self.cases > 0 and self.detected == (self.expect == "detected")


@dataclass(frozen=True)
class Finding:
    """One place where something is wrong. request, layer, row, head: indices, None where they do not apply;
    got, allowed: the value and its bound; reproduce: one shell command that shows it alone."""

    check: str
    case: str
    reproduce: str
    request: int | None = None
    layer: int | None = None
    row: int | None = None
    head: int | None = None
    got: str | float | None = None
    allowed: str | float | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _demand(bool(self.reproduce.strip()), f"finding in {self.check!r}: expected a command in reproduce, got none")


@dataclass(frozen=True)
class EnvelopeRef:
    """The envelope a report was judged by."""

    path: str
    sha256: str
    guarantee: str

    def __post_init__(self) -> None:
        _check_types(self)


@dataclass(frozen=True)
class Report:
    """One audit run; fields as in the module's schema. Raises ReportError if the verdict contradicts the checks."""

    verdict: str
    reasons: tuple[str, ...]
    suite: str
    backend: str
    contract: dict[str, Any]
    environment: dict[str, Any]
    envelope: EnvelopeRef | None
    coverage: dict[str, str]
    checks: tuple[Check, ...]
    controls: tuple[Control, ...]
    findings: tuple[Finding, ...]
    seed: int
    command: str
    wall_s: float
    peak_mib: float | None = None
    horizon: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    matrix: tuple[dict[str, Any], ...] = ()
    diagnosis: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    created: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name in ("reasons", "checks", "controls", "findings", "warnings", "matrix"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_types(self)
        _one_of("report", "verdict", self.verdict, tuple(EXIT_CODES))
        _demand(self.schema_version == SCHEMA_VERSION, f"report: expected schema_version 1, got {self.schema_version}")
        for surface, state in self.coverage.items():
            _one_of(f"report: coverage of {surface}", "state", state, COVERAGE)
        ids = [c.id for c in self.checks]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        _demand(not twice, f"report: expected check ids to be unique, got {', '.join(twice)} more than once")
        self._check_verdict()

    def _check_verdict(self) -> None:
        least, reasons = decide(self.checks, self.controls, self.coverage, controls_required=False)
        if self.verdict == "PASS":
            _demand(judged_cells(self.checks) > 0, "report: PASS with zero judged cells is refused")
            _demand(least == "PASS", f"report: verdict PASS contradicts its content: {'; '.join(reasons)}")
            _demand(not self.reasons, f"report: PASS takes no reasons, got {'; '.join(self.reasons)}")
        else:
            _demand(bool(self.reasons), f"report: verdict {self.verdict} must give its reasons")
            failed = least == "FAIL"
            _demand(failed == (self.verdict == "FAIL"), f"report: verdict {self.verdict}, but a check failed: {failed}")

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 3 INCONCLUSIVE."""
        return EXIT_CODES[self.verdict]


def judged_cells(checks: Sequence[Check]) -> int:
    """Return how many cells checks with status pass or fail compared; info and inconclusive judge nothing."""
    return sum(c.cells for c in checks if c.status in ("pass", "fail"))


def decide(
    checks: Sequence[Check],
    controls: Sequence[Control],
    coverage: Mapping[str, str],
    *,
    controls_required: bool = True,
    doubts: Sequence[str] = (),
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict and its reasons. FAIL wins over INCONCLUSIVE, but the reasons list both.

    doubts: further reasons for which a PASS would mean nothing (constant output, memory horizon too short).
    controls_required: without a single control that must be detected, the run is inconclusive.
    """
    failures = [f"check {c.id} failed" + (f": {c.note}" if c.note else "") for c in checks if c.status == "fail"]
    open_ = _open_reasons(checks)
    open_ += [_control_reason(c) for c in controls if not c.as_expected]
    if controls_required and not any(c.expect == "detected" for c in controls):
        open_.append("no positive control ran")
    if judged_cells(checks) == 0:
        open_.append("zero cells judged")
    if not any(state != "not covered" for state in coverage.values()):
        open_.append("the backend covers no surface")
    open_ += doubts
    verdict = "FAIL" if failures else "INCONCLUSIVE" if open_ else "PASS"
    return verdict, (*failures, *open_)


def _open_reasons(checks: Sequence[Check]) -> list[str]:
    """One reason for all checks that are inconclusive for the same one."""
    by_note: dict[str, list[str]] = {}
    for check in checks:
        if check.status == "inconclusive":
            by_note.setdefault(check.note, []).append(check.id)
    return [
        f"check {ids[0]} {f'and {len(ids) - 1} more are' if len(ids) > 1 else 'is'} inconclusive: {note}"
        for note, ids in by_note.items()
    ]


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as data that strict JSON can hold. Raises ReportError for a value that it cannot."""
    return {key: _plain(value, key) for key, value in asdict(report).items()}


def from_json(data: Mapping[str, Any]) -> Report:
    """Rebuild a report from `to_json` data; equal to the original. Raises ReportError if it does not fit the schema."""
    version = data.get("schema_version")
    _demand(version == SCHEMA_VERSION, f"report: expected schema_version {SCHEMA_VERSION}, got {version!r}")
    parts: dict[str, Any] = {"facts": {}, "matrix": (), "diagnosis": {}, **data}
    for name, kind in (("checks", Check), ("controls", Control), ("findings", Finding)):
        items = parts.get(name)
        if not isinstance(items, (list, tuple)):
            raise ReportError(f"report: expected a list in {name}, got {items!r}")
        parts[name] = tuple(_build(kind, item) for item in items)
    if parts.get("envelope") is not None:
        parts["envelope"] = _build(EnvelopeRef, parts["envelope"])
    for name in ("reasons", "warnings", "matrix"):
        if isinstance(parts.get(name), list):
            parts[name] = tuple(parts[name])
    return _build(Report, parts)


def _control_reason(control: Control) -> str:
    if control.cases == 0:
        return f"control {control.fault} ran on no case"
    if control.expect == "detected":
        return f"control {control.fault} was not detected"
    return f"control {control.fault} is harmless but was flagged by {control.by}"


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return "nan" if isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise ReportError(f"report: expected plain data in {where}, got {type(value).__name__}")


def _build(kind: type[_T], data: Any) -> _T:
    name = kind.__name__.lower()
    _demand(isinstance(data, Mapping), f"{name}: expected an object, got {data!r}")
    hints = _hints(kind)
    odd = sorted(set(data) ^ set(hints))
    _demand(not odd, f"{name}: missing or unknown fields: {', '.join(odd)}")
    return kind(**{key: _restore(value, hints[key]) for key, value in data.items()})


def _restore(value: Any, hint: Any) -> Any:
    """Turn "nan", "inf" and "-inf" back into floats where a float may stand."""
    if get_origin(hint) is dict and isinstance(value, Mapping):
        return {key: _restore(item, get_args(hint)[1]) for key, item in value.items()}
    options = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in options and isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    return value


def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _check_types(record: Any) -> None:
    """Refuse a value of another type than its field declares: a tensor or numpy integer would break the JSON later."""
    for name, hint in _hints(type(record)).items():
        value = getattr(record, name)
        kind = type(record).__name__.lower()
        _demand(_fits(value, hint), f"{kind}: expected {name} to be {_type_name(hint)}, got {name}={value!r}")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, arguments[1]) for v in value.values())
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)


def _one_of(where: str, what: str, value: str, allowed: Sequence[str]) -> None:
    _demand(value in allowed, f"{where}: expected {what} to be one of {', '.join(allowed)}, got {what}={value!r}")


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise ReportError(message)
