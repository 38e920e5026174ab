"""What an envelope file holds, and how it is written and read.

One JSON object with the fields of `Envelope` and `sha256`, the hash of its canonical payload (all other fields, keys
sorted, no blanks). The hash catches edits and accidents; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from audit.exceedance import allowed_exceedances, bonferroni
from audit.files import probe_writable, write_atomically
from lumotree.errors import EnvelopeError

SCHEMA_VERSION = 1
ALPHA_FAMILY = 1e-6
ARMS = ("native", "verify")
REMEDY = "recalibrate: lumotree-audit calibrate --force"


@dataclass(frozen=True)
class Statistic:
    """Bound of one statistic: the `order`-th largest of `n` calibration values; `allowed` of the planned held-out
    units may lie strictly above it. `values_sha256` hashes the calibration values (float64, little-endian)."""

    bound: float
    order: int
    n: int
    values_sha256: str
    allowed: int


@dataclass(frozen=True)
class Envelope:
    """What was measured, on what, and what follows from it.

    shape, trees: name of the shape and of the trees the units were drawn from; arm: "native" or "verify".
    planned: held-out units m that `allowed` was computed for; alpha_family: false-alarm probability of all statistics
    together; case_sha256: the calibration cases; code_sha256: the judging code; backend_sha256: the backend's source,
    recorded but not enforced; created: ISO date.

    Raises EnvelopeError when the counts do not follow from n, planned, order and alpha_family.
    """

    backend: str
    contract: dict[str, Any]
    dims: dict[str, Any]
    shape: str
    arm: str
    trees: tuple[str, ...]
    statistics: dict[str, Statistic]
    planned: int
    alpha_family: float
    guarantee: str
    case_sha256: str
    code_sha256: str
    backend_sha256: str | None
    seed: int
    environment: dict[str, Any]
    created: str
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise EnvelopeError(f"envelope: expected arm native or verify, got arm={self.arm!r}")
        alpha = bonferroni(self.alpha_family, len(self.statistics))
        for name, stat in self.statistics.items():
            if not (isfinite(stat.bound) and stat.bound >= 0):
                raise EnvelopeError(f"envelope: expected a finite bound >= 0 for {name}, got bound={stat.bound}")
            allowed = allowed_exceedances(stat.n, self.planned, alpha, stat.order)
            if stat.allowed != allowed:
                raise EnvelopeError(
                    f"envelope: {name} allows {stat.allowed} exceedances, but n={stat.n}, m={self.planned}, "
                    f"order={stat.order}, alpha={float(alpha):.3g} give {allowed}; {REMEDY}"
                )

    @property
    def sha256(self) -> str:
        """Hash of the canonical payload, as it stands in the file."""
        return _payload_sha256(_payload(self))


def check_target(path: str | Path, force: bool = False) -> None:
    """Raise EnvelopeError, before a long run, where `save` would: a folder, an existing file, no way to write."""
    target = Path(path)
    if target.is_dir():
        raise EnvelopeError(f"envelope {target}: expected a file name, found a folder")
    if target.exists() and not force:
        raise EnvelopeError(f"envelope {target}: expected no such file, found one; to replace it use --force")
    try:
        probe_writable(target.parent)
    except OSError as cause:
        raise EnvelopeError(f"envelope {target}: expected a writable folder, found: {cause}") from cause


def save(envelope: Envelope, path: str | Path, force: bool = False) -> None:
    """Write the envelope in one piece. Raises EnvelopeError if the file exists (without `force`) or cannot be made."""
    target = Path(path)
    check_target(target, force)
    payload = _payload(envelope)
    text = json.dumps({**payload, "sha256": _payload_sha256(payload)}, indent=2, allow_nan=False) + "\n"
    try:
        write_atomically({target: text.encode()})
    except OSError as cause:
        raise EnvelopeError(f"envelope {target}: expected a writable folder, found: {cause}") from cause


def load(path: str | Path) -> Envelope:
    """Read an envelope. Raises EnvelopeError, each with its own message, for a file that is missing, unreadable,
    truncated or not JSON, of another schema version, edited by hand, or without the fields of an envelope."""
    source = Path(path)
    data = _read_json(source)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise _refusal(source, f"schema_version {SCHEMA_VERSION}", f"{version!r}")
    recorded = data.pop("sha256", None)
    actual = _payload_sha256(data)
    if recorded != actual:
        raise _refusal(source, f"content with sha256 {recorded}", f"{actual}: the file was edited or damaged")
    return _from_payload(source, data)


def _payload(envelope: Envelope) -> dict[str, Any]:
    return asdict(envelope)


def _payload_sha256(payload: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise EnvelopeError(f"envelope: expected plain finite data, found: {cause}") from cause
    return hashlib.sha256(text.encode()).hexdigest()


def _read_json(source: Path) -> dict[str, Any]:
    try:
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError as cause:
        raise _refusal(source, "a file", "none") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise _refusal(source, "a readable text file", str(cause)) from cause
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise _refusal(source, "JSON", f"a truncated or damaged file ({cause})") from cause
    if not isinstance(data, dict):
        raise _refusal(source, "a JSON object", type(data).__name__)
    return data


def _from_payload(source: Path, data: dict[str, Any]) -> Envelope:
    expected, found = {f.name for f in fields(Envelope)}, set(data)
    if expected != found:
        odd = ", ".join(sorted(expected ^ found))
        raise _refusal(source, "the fields of an envelope", f"missing or unknown: {odd}")
    try:
        statistics = {name: Statistic(**stat) for name, stat in data["statistics"].items()}
        return Envelope(**{**data, "statistics": statistics, "trees": tuple(data["trees"])})
    except EnvelopeError as cause:
        raise EnvelopeError(f"{source}: {cause}") from cause
    except (TypeError, AttributeError, ValueError) as cause:
        raise _refusal(source, "well-formed fields", str(cause)) from cause


def _refusal(source: Path, expected: str, found: str) -> EnvelopeError:
    return EnvelopeError(f"envelope {source}: expected {expected}, found {found}; {REMEDY}")
