"""Find a backend by name, by `module:object` or by entry point, and check that it fits the protocol."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from lumotree.backends.protocol import SURFACES, covered_surfaces
from lumotree.contract import Contract
from lumotree.errors import ANYTHING, BackendError, InputError

ENTRY_POINTS = "lumotree_audit.backends"

#: Built-in name -> `module:object`; imported only when asked for, as most need packages that may be missing.
BUILTIN: dict[str, str] = {
    "torch": "lumotree.backends.torch_backend:TorchBackend",
    "triton": "lumotree.backends.triton_backend:TritonBackend",
    "triton_splitk": "lumotree.backends.splitk_backend:SplitKAttentionBackend",
    "cuda": "lumotree.backends.cuda_backend:CudaBackend",
    "triton_fused": "lumotree.backends.fused_backend:FusedBackend",
    "reference": "lumotree.backends.reference:ReferenceBackend",
    "bank": "lumotree.backends.bank:BankBackend",
    "split_k": "lumotree.backends.variants:SplitKBackend",
    "sqrt_norm": "lumotree.backends.variants:SqrtNormBackend",
    "kv_layout": "lumotree.backends.variants:KVLayoutBackend",
    "wy": "lumotree.backends.variants:WYBackend",
    "treewy": "lumotree.mechanisms.solve:TreeWYBackend",
    "treewy_tf32": "lumotree.mechanisms.solve:TreeWYTf32Backend",
    "weaver": "lumotree.mechanisms.solve:WeaverBackend",
    "specla": "lumotree.mechanisms.specla:SpecLABackend",
    "snapshot_chain": "lumotree.mechanisms.snapshot:SnapshotChainBackend",
    "bank_walk": "lumotree.mechanisms.bank_walk:BankWalkBackend",
    "sglang": "lumotree.backends.sglang:SglangBackend",
    "tokenspeed": "lumotree.backends.tokenspeed:TokenspeedBackend",
    "tokenspeed-replay": "lumotree.backends.tokenspeed:TokenspeedReplayBackend",
    "transformers": "lumotree.backends.transformers_native:TransformersBackend",
    "fla": "lumotree.backends.fla:FlaBackend",
}

#: Method -> its positional arguments after self (see `BackendBase`).
ARGUMENTS: dict[str, str] = {
    "allocate": "dims, limits, device",
    "export": "pools, ws, slot, layer",
    "gdn_verify": "ops, pool, batch, ws, out, layer",
    "gdn_publish": "pool, batch, accepted, ws, layers",
    "conv_verify": "ops, pool, batch, ws, out, layer",
    "conv_publish": "pool, batch, accepted, ws, layers",
    "attention_verify": "ops, cache, batch, ws, out, layer",
    "kv_publish": "cache, batch, accepted, ws, layers",
    "native_step": "ops, pools, batch, out, layer",
}


def load_backend(spec: str, **contract: Any) -> Any:
    """The backend named by `spec`: a built-in name, an entry point of `lumotree_audit.backends`, or `module:object`.

    The object may be an instance, a class or a factory without required arguments; modules of the current directory
    can be imported. contract: fields that replace those of the default contract, for a class or factory that takes
    `contract`. Raises BackendError when nothing is found, it cannot be made, or it does not fit the protocol;
    ContractError when the contract is not a possible one.
    """
    backend = _make(spec, _find(spec), contract)
    check_backend(backend, spec)
    return backend


def backend_maker(spec: str) -> Callable[[], Any]:
    """What `load_backend` does, found and checked once: each call makes another backend of the same kind (an instance
    is itself). Raises as it does."""
    found = _find(spec)
    check_backend(_make(spec, found, {}), spec)
    return lambda: _make(spec, found, {})


def known_backends() -> list[str]:
    """Names that `load_backend` knows: built-in ones and installed entry points."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def check_backend(backend: Any, spec: str) -> None:
    """Raise BackendError, naming what is missing or wrong, when an object does not fit the protocol."""
    if not isinstance(getattr(backend, "contract", None), Contract):
        raise BackendError(
            f"backend {spec!r}: expected an attribute contract of type lumotree.contract.Contract, "
            f"got {getattr(backend, 'contract', None)!r}"
        )
    covered = covered_surfaces(backend)
    if not any(any(has) for has in covered.values()):
        methods = ", ".join(verify for verify, _ in SURFACES.values())
        raise BackendError(f"backend {spec!r}: it has no surface; write at least one of {methods} and its publish")
    missing = [SURFACES[surface][0 if has[1] else 1] for surface, has in covered.items() if has[0] != has[1]]
    missing += [name for name in ("native_step", "allocate", "export") if not callable(getattr(backend, name, None))]
    if missing:
        raise BackendError(f"backend {spec!r}: it lacks {', '.join(missing)}; see lumotree.backends.protocol")
    for name, arguments in ARGUMENTS.items():
        check_arguments(spec, name, getattr(backend, name, None), arguments)


def check_arguments(spec: str, name: str, method: Any, arguments: str, kind: str = "backend") -> None:
    """Raise BackendError if a method cannot be called with these positional arguments; None is no method and passes."""
    if not callable(method):
        return
    try:
        signature = inspect.signature(method)
    except ValueError:  # compiled callables do not tell
        return
    count = len(arguments.split(", "))
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise BackendError(
            f"{kind} {spec!r}: {name}{signature} cannot be called with the {count} positional arguments "
            f"({arguments}): {error}"
        ) from None


def _find(spec: str) -> Any:
    if spec in BUILTIN:
        return import_object(spec, BUILTIN[spec])
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == spec:
            return import_object(spec, point.value)
    if ":" not in spec:
        raise BackendError(f"backend {spec!r} is unknown; known: {', '.join(known_backends())}; or give module:object")
    return import_object(spec, spec)


def import_object(spec: str, target: str, kind: str = "backend") -> Any:
    """The object that `target`, module:object, names. kind, spec: how messages call it. Raises BackendError."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise BackendError(f"{kind} {spec!r}: expected module:object, got {target!r}")
    if os.getcwd() not in sys.path:  # left there: the module may import its neighbours later
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except InputError:
        raise
    except ANYTHING as error:  # whatever a stranger's module raises while it is imported
        raise BackendError(
            f"{kind} {spec!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise BackendError(f"{kind} {spec!r}: module {module_name!r} has no object {path!r}")
        found = getattr(found, name)
    return found


def _make(spec: str, found: Any, overrides: dict[str, Any]) -> Any:
    """Call a class or factory; an instance is taken as it is."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        if overrides:
            raise BackendError(f"backend {spec!r} is an instance, whose contract cannot be replaced")
        return found
    arguments = {"contract": _replaced(spec, found, overrides)} if overrides else {}
    try:
        return found(**arguments)
    except InputError:
        raise
    except ANYTHING as error:
        raise BackendError(
            f"backend {spec!r}: {found.__qualname__} cannot be called: {type(error).__name__}: {error}"
        ) from error


def _replaced(spec: str, found: Callable[..., Any], overrides: dict[str, Any]) -> Contract:
    if "contract" not in inspect.signature(found).parameters:
        raise BackendError(f"backend {spec!r}: {found.__qualname__} takes no contract, so it cannot be replaced")
    default = getattr(found, "contract", None)
    try:
        return replace(default if isinstance(default, Contract) else Contract(), **overrides)
    except TypeError as error:
        raise BackendError(f"backend {spec!r}: not a field of the contract: {error}") from None
