"""Compiles `gdn.cu` for a shape: with NVRTC for a GPU, with g++ and `emulation.h` for a CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lumotree.errors import BackendError

FOLDER = Path(__file__).parent
LEAST_CAPABILITY = (8, 0)
MODES = {"verify": 0, "publish": 1, "native": 2}


@dataclass(frozen=True)
class Tile:
    """Work of a block. Value rows: 4 * slabs * warps; stage: rows at once.

    stack: states in shared memory, pending or on their way. resident: blocks that must fit a multiprocessor's
    registers. part: tiles of a key head that share a publication's prepared keys. planner: whether a warp of its own
    plans a verification's walk. lean: one pass of a verification's operands in registers at a time.
    """

    slabs: int
    warps: int
    stack: int
    stage: int
    resident: int = 1
    part: int = 1
    planner: bool = True
    lean: bool = False


@dataclass(frozen=True)
class Spec:
    """What one compilation is for. vector: all operands allow 16-byte accesses."""

    mode: str
    hk: int
    hv: int
    dk: int
    dv: int
    tile: Tile
    vector: bool

    def defines(self) -> list[str]:
        """Macros of `gdn.cu`."""
        t = self.tile
        named = {
            "HK": self.hk, "HV": self.hv, "DK": self.dk, "DV": self.dv, "SLABS": t.slabs, "WARPS": t.warps,
            "STACK": t.stack, "STAGE": t.stage, "RESIDENT": t.resident, "PART": t.part, "PLANNER": int(t.planner),
            "LEAN": int(t.lean), "VECTOR": int(self.vector), "MODE": MODES[self.mode],
        }  # fmt: skip
        return [*(f"-D{name}={value}" for name, value in named.items()), f"-DSCALE={self.dk**-0.5:.9g}f"]

    @property
    def chunks(self) -> int:
        """Groups of 32 keys, a power of two."""
        return max(1, 1 << ((self.dk + 31) // 32 - 1).bit_length())

    @property
    def blocks(self) -> int:
        """Blocks of one request and layer."""
        slabs = self.hv // self.hk * -(-self.dv // 4)
        return self.hk * -(-slabs // (self.tile.slabs * self.tile.warps))

    @property
    def parts(self) -> int:
        """Parts of one request and layer in a publication; mirrors PARTS in replay.h."""
        return self.hk * -(-self.blocks // self.hk // self.tile.part)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.tile.warps + (self.mode == "verify" and self.tile.planner))

    @property
    def state_bytes(self) -> int:
        """Bytes of one block's states."""
        return self.tile.warps * self.tile.slabs * self.chunks * 512

    def shared_bytes(self, capacity: int) -> int:
        """Dynamic shared memory of a block that walks up to `capacity` rows; mirrors `carve` and `carve_replay`."""
        t, ratio, head_slabs = self.tile, self.hv // self.hk, -(-self.dv // 4)
        block_slabs = t.slabs * t.warps
        if self.mode == "publish":
            return t.stack * self.state_bytes + t.stage * (128 * self.chunks + 32 * block_slabs + 8 * ratio)
        heads = min((block_slabs + head_slabs - 2) // head_slabs + 1, ratio)
        scratch = -(-16 * capacity // 16) * 16
        staged = t.stage * (2 * 128 * self.chunks + 16 * block_slabs + 8 * heads + 4)
        return max(t.stack * self.state_bytes, scratch) + staged + 4 * (capacity + 2)


class Kernel:
    """A compiled `gdn_walk`; `launch` runs it on the current stream (GPU) or at once (CPU)."""

    def launch(self, grid: tuple[int, int, int], shared_bytes: int, arguments: ctypes.Structure) -> None:
        raise NotImplementedError


class EmulatedKernel(Kernel):
    """`gdn_walk` on the CPU."""

    def __init__(self, spec: Spec) -> None:
        self._emulate = ctypes.CDLL(str(_emulated_library(spec))).emulate

    def launch(self, grid: tuple[int, int, int], shared_bytes: int, arguments: ctypes.Structure) -> None:
        """Run all blocks, one after another."""
        self._emulate(*grid, shared_bytes, ctypes.byref(arguments))


class GpuKernel(Kernel):
    """`gdn_walk` on a CUDA device. Raises BackendError when it cannot be compiled or loaded.

    overlap: whether launches may overlap the end of the one before (programmatic dependent launch).
    """

    overlap = True

    def __init__(self, spec: Spec, device: int) -> None:
        check_card(device)
        with torch.cuda.device(device):
            major, minor = torch.cuda.get_device_capability(device)
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            self._driver = _bindings("driver")
            cubin = compile_cubin(spec, f"sm_{major}{minor}")
            module = _ask("load gdn.cu", self._driver.cuModuleLoadData(cubin))
            self._function = _ask("find gdn_walk", self._driver.cuModuleGetFunction(module, b"gdn_walk"))
        self._shared_limit = 48 << 10
        self.threads = spec.threads

    def launch(self, grid: tuple[int, int, int], shared_bytes: int, arguments: ctypes.Structure) -> None:
        """Launch on torch's current stream; the next such launch may overlap its end."""
        driver = self._driver
        if shared_bytes > self._shared_limit:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _ask("reserve shared memory", driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))
            self._shared_limit = shared_bytes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        if self.overlap:
            config.attrs, config.numAttrs = [overlap], 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _ask("launch gdn_walk", driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0))


@cache
def kernel(spec: Spec, device: torch.device) -> Kernel:
    """The compiled kernel for a device; compiled once a process.

    Raises BackendError: no compiler, no NVRTC, or a card that is too old.
    """
    if device.type == "cuda":
        return GpuKernel(spec, torch.cuda.current_device() if device.index is None else device.index)
    return EmulatedKernel(spec)


def check_card(device: int) -> None:
    """Raise BackendError for a card that the kernel is not made for."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise BackendError(
            f"cuda: {torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
            f"expected at least {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}; use --backend triton"
        )


def compile_cubin(spec: Spec, architecture: str) -> bytes:
    """Machine code of a spec for an architecture such as sm_90; needs NVRTC but no GPU. Raises BackendError."""
    nvrtc = _bindings("nvrtc")
    source = (FOLDER / "device.h").read_text() + '\n#line 1 "gdn.cu"\n' + (FOLDER / "gdn.cu").read_text()
    try:
        program = _ask("read gdn.cu", nvrtc.nvrtcCreateProgram(source.encode(), b"gdn.cu", 0, [], []))
    except RuntimeError as error:  # cuda-bindings looks for the library at the first call
        raise BackendError(
            f"cuda: NVRTC, the run-time compiler, is missing ({error}); install lumotree-audit[cuda], or use --backend "
            "triton"
        ) from error
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--fmad=false", f"--include-path={FOLDER}"]
    options += spec.defines()
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(status):
        size = _ask("read the log", nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BackendError(f"cuda: NVRTC could not compile gdn.cu for {architecture}: {log.decode(errors='replace')}")
    size = _ask("size machine code", nvrtc.nvrtcGetCUBINSize(program))
    cubin: bytes = b" " * size
    _ask("read machine code", nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _bindings(part: str) -> Any:
    try:
        bindings = __import__(f"cuda.bindings.{part}", fromlist=[part])
    except ImportError as error:
        raise BackendError(
            f"cuda: the Python package cuda-bindings is missing ({error}); install lumotree-audit[cuda], or use "
            "--backend triton"
        ) from error
    return bindings


def _ask(what: str, answer: tuple[Any, ...]) -> Any:
    """The value of a driver or NVRTC call. Raises BackendError with the call's status when it failed."""
    status, *values = answer
    if int(status):
        raise BackendError(f"cuda: could not {what}: {status!s}")
    return values[0] if values else None


def _emulated_library(spec: Spec) -> Path:
    """g++'s output for a spec, kept in the user's cache. Raises BackendError without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BackendError(
            "cuda: there is no GPU, and emulation on the CPU needs g++ or clang++, which is not on the PATH; install "
            "one, or use --backend triton"
        )
    digest = hashlib.sha256("\0".join(spec.defines()).encode())
    for source in sorted(p for pattern in ("*.cu", "*.h", "*.cpp") for p in FOLDER.glob(pattern)):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lumotree-audit"
    target = cache / f"gdn-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "gdn.so"
            command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", *spec.defines()]
            done = subprocess.run(
                [*command, "-o", str(made), str(FOLDER / "emulate.cpp")], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise BackendError(f"cuda: {compiler} could not compile the emulation: {done.stderr.strip()[:2000]}")
            os.replace(made, target)  # another process may have made it meanwhile
    return target
