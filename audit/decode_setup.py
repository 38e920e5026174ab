"""What a decode run works on: the model, the backend, the prompts, the drafters and the room for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from audit.decode_types import Options
from lumotree.backends.loader import load_backend
from lumotree.backends.mixed import MixedBackend
from lumotree.backends.protocol import covered_surfaces
from lumotree.byte_tokens import END, encode
from lumotree.contract import SURFACE_NAMES
from lumotree.cycle_types import Stack
from lumotree.draft import drafter
from lumotree.errors import BackendError, InputError, RequestError
from lumotree.model import load_model
from lumotree.prompts import SETS, prompt_set
from lumotree.requests import Request
from lumotree.sampling import SamplingParams
from lumotree.shipped import shipped_folder
from lumotree.slots import Capacity

#: What sampled requests are sampled with.
SAMPLING = SamplingParams(temperature=1.0)
PAGE_SIZE = 16
#: Modes whose drafter can draw its candidates.
DRAWN = ("mtp5", "hydra27")
#: Rows of `hydra27`, and of a prompt chunk.
ROWS = 32


def open_stack(options: Options) -> Stack:
    """Model, backend and draft head. Raises CheckpointError, BackendError and InputError."""
    backend = open_backend(options.backend)
    model = load_model(folder_of(options), options.device)
    head = model.draft_head(backend) if model.config.mtp_layers else None
    return Stack(model, backend, head)


def folder_of(options: Options) -> Path:
    """The folder of the model."""
    return Path(options.checkpoint) if options.checkpoint else shipped_folder()


def open_backend(spec: str) -> Any:
    """A backend for all surfaces: one by name, or `gdn=NAME,conv=NAME,attention=NAME`.

    Raises BackendError for one that lacks a surface or claims less than bits, InputError for a malformed list.
    """
    if "=" not in spec:
        return _checked(load_backend(spec), spec)
    parts: dict[str, str] = {}
    for item in spec.split(","):
        surface, _, name = item.partition("=")
        if surface not in SURFACE_NAMES or not name or surface in parts:
            raise InputError(f"--backend: expected NAME or gdn=NAME,conv=NAME,attention=NAME, got {spec!r}")
        parts[surface] = name
    missing = [s for s in SURFACE_NAMES if s not in parts]
    if missing:
        raise InputError(f"--backend: no backend named for {', '.join(missing)} in {spec!r}")
    return _checked(MixedBackend(**{surface: load_backend(name) for surface, name in parts.items()}), spec)


def _checked(backend: Any, spec: str) -> Any:
    covered = covered_surfaces(backend)
    missing = [s for s, has in covered.items() if not all(has)]
    if missing or not callable(getattr(backend, "native_step", None)):
        what = ", ".join(missing) or "a one-token step"
        raise BackendError(
            f"decode: backend {spec!r} has no {what}; combine backends with --backend gdn=NAME,conv=NAME,attention=NAME"
        )
    weaker = [s for s in SURFACE_NAMES if backend.contract.claim(s) != "bitwise"]
    if weaker:
        raise BackendError(
            f"decode: backend {spec!r} claims only {backend.contract.claim(weaker[0])!r} for "
            f"{', '.join(weaker)}; decode compares bits, and can only judge a backend that claims them"
        )
    return backend


def identity_of(folder: Path) -> str:
    """SHA-256 over configuration and weights of a checkpoint folder."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def prompts_of(options: Options) -> list[tuple[int, ...]]:
    """Token lists, set one before set two. Raises InputError for a bad file."""
    if options.prompt_file is not None:
        texts = _read_prompts(options.prompt_file)
    else:
        texts = [encode(p.text) for name in SETS for p in prompt_set(name)[: options.prompts]]
    return [tuple(tokens[: options.prompt_tokens]) for tokens in texts]


def _read_prompts(path: str) -> list[list[int]]:
    try:
        data: list[list[int]] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise InputError(f"--prompt-file {path}: expected a JSON list of token lists, found: {cause}") from cause
    right = isinstance(data, list) and all(
        isinstance(p, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in p) for p in data
    )
    if not right or not data:
        raise InputError(f"--prompt-file {path}: expected a non-empty JSON list of lists of token numbers")
    return data


def requests_of(options: Options, mode: str, law: str, run: int) -> list[Request]:
    """The requests of one run: numbers are the prompts' places.

    Sampled requests draw the candidates of the MTP head from its law; suffix matches and budget trees are point masses.
    """
    drawn = "-sampled" if law == "sampled" and mode in DRAWN else ""
    chosen = None if mode == "plain" else drafter(mode + drawn)
    sampling = SAMPLING if law == "sampled" else SamplingParams(temperature=0.0)
    eos = END if options.checkpoint is None and options.prompt_file is None else options.eos
    return [
        Request(number, prompt, options.tokens, sampling, chosen, eos=eos, seed=options.seed + run)
        for number, prompt in enumerate(prompts_of(options))
    ]


def check_positions(requests: Sequence[Request], positions: int) -> None:
    """Raise RequestError for a request that is longer than the model's positions."""
    for request in requests:
        if request.longest > positions:
            raise RequestError(
                f"request {request.number}: {len(request.prompt)} prompt tokens and max_tokens={request.max_tokens} "
                f"need {request.longest} positions; the model has {positions}"
            )


def capacity_for(requests: Sequence[Request], batch: int, rows: int = ROWS) -> Capacity:
    """Room for `batch` of these requests at a time."""
    context = max(request.longest for request in requests)
    return Capacity(min(batch, len(requests)), context, rows, PAGE_SIZE)


def poisoned(stack: Stack) -> Stack:
    """The same stack, its caches born full of NaN: a read of what was never written shows."""
    return replace(stack, model=_Poisoned(stack.model), head=None if stack.head is None else _PoisonedHead(stack.head))


class _Wrapped:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Poisoned(_Wrapped):
    def empty_pools(self, *args: Any) -> Any:
        pools = self.inner.empty_pools(*args)
        for tensor in pools.tensors().values():
            tensor.fill_(torch.nan)
        return pools


class _PoisonedHead(_Wrapped):
    def empty_cache(self, *args: Any) -> Any:
        cache = self.inner.empty_cache(*args)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
        return cache
