"""Loading kernels that other people wrote, and nothing else of their packages.

An inference engine's package root imports servers, tokenizers and CUDA extensions that an audit does not need and
that a machine without a GPU often cannot import. Kernel modules themselves need torch, triton and a handful of
helpers. So a kernel module is loaded *by file*, while stand-ins for those helpers are in `sys.modules`; they are
taken out again afterwards, so that a later `import sglang` still gets the real package.

No peer is a dependency of this project: `require` says what to install.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from lumotree.errors import BackendError

#: Peer -> (module that must be there, the line that installs the version that was read and tested).
INSTALL: dict[str, tuple[str, str]] = {
    "sglang": ("sglang", "pip install --no-deps sglang==0.5.23"),
    "tokenspeed": ("tokenspeed_kernel", "pip install --no-deps tokenspeed-kernel==0.1.4"),
    "transformers": ("transformers", "pip install transformers==5.24.0"),
    "flashinfer": ("flashinfer", "pip install --no-deps flashinfer-python==0.6.14"),
    "fla": ("fla", "pip install fla-core==0.6.0"),
}


def require(peer: str) -> Path:
    """Directory of a peer's package. Raises BackendError with the `pip install` line when it is not installed."""
    module, line = INSTALL[peer]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise BackendError(
            f"backend {peer!r} needs the package {module}, which is not installed. Install it with: {line}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def installed_version(peer: str) -> str:
    """Version of the peer's distribution, for reports; "unknown" if it has no metadata."""
    distribution = INSTALL[peer][1].split()[-1].split("==")[0]
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def load_kernel_module(peer: str, file: str, stand_ins: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    """Load `file` (relative to the peer's package) as a module of its own; loaded once.

    stand_ins: dotted module name -> the attributes that the kernel module imports from it; parent packages are made
    as needed. Raises BackendError when the package, the file or one of its imports is missing.
    """
    root = require(peer)
    name = f"_lumotree_peer_{peer}_{file.removesuffix('.py').replace('/', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    path = root / file
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BackendError(f"backend {peer!r}: {path} is missing; {_versions(peer)}")
    module = importlib.util.module_from_spec(spec)
    with _in_sys_modules(stand_ins):
        # Triton finds a kernel's globals through its module, which must be known while it is decorated.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as cause:
            del sys.modules[name]
            raise BackendError(f"backend {peer!r}: cannot load {path}: {cause!r}; {_versions(peer)}") from cause
    return module


def import_peer(peer: str, module: str) -> ModuleType:
    """Import an installed peer's module the ordinary way. Raises BackendError when it is missing or breaks."""
    require(peer)
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise BackendError(f"backend {peer!r}: cannot import {module}: {cause}; {_versions(peer)}") from cause


def attribute(peer: str, module: ModuleType, name: str) -> Any:
    """`module.name`. Raises BackendError when this version of the peer lacks it."""
    if not hasattr(module, name):
        raise BackendError(f"backend {peer!r}: {module.__name__} has no {name}; {_versions(peer)}")
    return getattr(module, name)


def _versions(peer: str) -> str:
    return f"installed: {installed_version(peer)}; tested: {INSTALL[peer][1].split('==')[-1]} ({INSTALL[peer][1]})"


@contextlib.contextmanager
def _in_sys_modules(stand_ins: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Put stand-in modules (and their parents, as empty packages) into `sys.modules`; restore it on exit."""
    packages = {name.rsplit(".", i)[0] for name in stand_ins for i in range(1, name.count(".") + 1)}
    made = {name: ModuleType(name) for name in packages | set(stand_ins)}
    for name, module in made.items():
        if name in packages:
            module.__path__ = []
        vars(module).update(stand_ins.get(name, {}))
    saved = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, old in saved.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


# Helpers that kernel modules ask their package for


def compute_capability() -> tuple[int, int]:
    """(major, minor) of the current CUDA device; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def sglang_stand_ins() -> dict[str, dict[str, Any]]:
    """What sglang's GDN and convolution kernels import from sglang: questions about the device.

    The answers are the true ones, because launch tiles depend on them, except that programmatic dependent launch is
    off: it only overlaps launches and changes no bits.
    """
    major, minor = compute_capability()
    return {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
        "sglang.srt.utils": {
            "get_device_sm": lambda: major * 10 + minor,
            "is_cuda": torch.cuda.is_available,
            "is_gfx95_supported": lambda: False,
            "is_hip": lambda: False,
            "is_sm90_supported": lambda: major == 9,
        },
    }


def tokenspeed_stand_ins() -> dict[str, dict[str, Any]]:
    """What tokenspeed-kernel's GDN module imports: its triton fork, a kernel registry, and prefill parts.

    The fork's place is taken by the installed triton, so the peer's *source* is audited as this triton compiles it.
    Registration returns the function as it is; prefill is not used here and gets None.
    """
    triton = importlib.import_module("triton")
    gdn = "tokenspeed_kernel.ops.attention.gdn"

    def register_kernel(*_: Any, **__: Any) -> Any:
        return lambda function: function

    def nothing(*names: str) -> dict[str, Any]:
        return dict.fromkeys(names)

    return {
        "tokenspeed_kernel._triton": {"triton": triton, "tl": importlib.import_module("triton.language")},
        "tokenspeed_kernel.platform": {"CapabilityRequirement": lambda **_: None, "pdl_enabled": lambda: False},
        "tokenspeed_kernel.registry": {"Priority": SimpleNamespace(PORTABLE=None), "register_kernel": register_kernel},
        "tokenspeed_kernel.signature": {"format_signatures": lambda *_, **__: None},
        gdn: nothing("GdnCheckpointLayout", "GdnChunkPrefillResult"),
        f"{gdn}._triton.causal_conv1d_metadata": nothing(
            "CAUSAL_CONV1D_BLOCK_M", "CausalConv1dPrefillMetadata", "build_causal_conv1d_capacity_metadata",
            "build_causal_conv1d_prefill_metadata", "refresh_causal_conv1d_capacity_metadata",
        ),
        f"{gdn}._triton.chunk": nothing("chunk_gated_delta_rule"),
        f"{gdn}._triton.chunk_delta_h": nothing("CHUNK_SIZE"),
        f"{gdn}._triton.index": nothing(
            "prepare_chunk_indices", "set_total_chunks_hint", "set_total_chunks_hint_uniform"
        ),
        f"{gdn}._triton.prefill_state_inputs": nothing("prepare_prefill_state_inputs"),
        f"{gdn}._triton.qkv_split": nothing("fused_qkv_split_gdn_prefill"),
    }  # fmt: skip
