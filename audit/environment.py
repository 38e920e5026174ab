"""Where a run happened, and hashes of the code that judged it and of the code that was judged."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lumotree.errors import EnvelopeError

#: The code that decides what a measured value is. A change in any of it makes frozen envelopes meaningless.
#: Globs relative to the folder of the package they begin with; one that matches nothing is skipped.
JUDGING_CODE: tuple[str, ...] = (
    "lumotree/reference/**/*.py",
    "lumotree/tree*.py",
    "lumotree/backends/batch.py",
    "audit/cases.py",
    "audit/component.py",
    "audit/distance.py",
    "audit/envelope*.py",
    "audit/errors_of.py",
    "audit/exceedance.py",
    "audit/families.py",
    "audit/judge.py",
    "audit/native.py",
    "audit/next_cycle.py",
    "audit/operands.py",
    "audit/rotation.py",
    "audit/stage.py",
    "audit/truth.py",
)


def environment() -> dict[str, Any]:
    """Return plain data: versions, machine, threads, interpreter switch, git commit (None outside a checkout), date."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "platform": platform.platform(),
        "processor": processor_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "triton_interpret": os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"),
        "git_commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def environment_on(device: str) -> dict[str, Any]:
    """Facts of the environment; the GPU only where the run uses it, so that a CPU envelope does not depend on it."""
    facts = environment()
    return facts if torch.device(device).type == "cuda" else {**facts, "gpu": None}


def processor_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model name (Linux), else what the platform says."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with `+` appended if it has changes."""
    here = Path(__file__).resolve()
    # A virtual environment may lie inside a foreign checkout; only one that tracks this very file counts.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")


def code_sha256(patterns: Iterable[str] = JUDGING_CODE) -> str:
    """Return the SHA-256 of all sources that match package-relative globs.

    Files are taken in the order of their package-relative names, which are hashed with them; line ends are
    normalised, so that a checkout on another system agrees. Raises EnvelopeError when nothing matches.
    """
    files: dict[str, Path] = {}
    for pattern in patterns:
        files.update(_matching(pattern))
    if not files:
        raise EnvelopeError("code hash: no source file found; the package is installed without its sources")
    return _hash_files(files)


def object_sha256(target: Any) -> str | None:
    """Return the SHA-256 of the source files that define a backend: its class and that class's own bases.

    target: an instance, a class or a module. None when it has no Python source (compiled, or typed interactively).
    Kernels that the module imports are not followed; the hash is recorded as a hint, and nothing is refused for it.
    """
    files: dict[str, Path] = {}
    for part in _definitions(target):
        try:
            source = inspect.getsourcefile(part)
        except (TypeError, OSError):
            continue
        if source is not None and Path(source).is_file():
            name = part.__name__ if inspect.ismodule(part) else part.__module__
            files[name] = Path(source)
    return _hash_files(files) if files else None


def _definitions(target: Any) -> list[Any]:
    if inspect.ismodule(target):
        return [target]
    mro = (target if inspect.isclass(target) else type(target)).__mro__
    return [part for part in mro if part.__module__ not in ("builtins", "typing", "abc")]


def _matching(pattern: str) -> dict[str, Path]:
    package, _, rest = pattern.partition("/")
    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec else []
    return {
        f"{package}/{path.relative_to(root).as_posix()}": path
        for root in map(Path, roots)
        for path in root.glob(rest)
        if path.is_file()
    }


def _hash_files(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        source = files[name].read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        digest.update(f"{name}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()


def _version(distribution: str) -> str | None:
    module = sys.modules.get(distribution)
    try:
        return str(getattr(module, "__version__", None) or metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output, None if it fails, is missing or hangs."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
