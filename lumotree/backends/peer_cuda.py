"""CUDA kernels that other people ship as headers: compiled with `nvcc` when they are asked for, called through ctypes.

sglang 0.5.23 has its tree sampler in `kernels/jit/include/sgl_kernel/speculative/sampling.cuh`, a template over
flashinfer's sampling primitives. Only a launcher is ours; the package's own needs its JIT and tvm-ffi.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lumotree.backends.peer_loading import require
from lumotree.errors import BackendError

_TREE_LAUNCHER = r"""
#include <cuda_runtime.h>
#include <sgl_kernel/speculative/sampling.cuh>

template <uint32_t VEC>
static int launch(void **p, uint32_t batch, uint32_t path, uint32_t rows, uint32_t vocab, cudaStream_t stream) {
  using namespace flashinfer::sampling;
  constexpr uint32_t threads = 1024;
  constexpr size_t shared = sizeof(SamplingTempStorage<threads, SCAN_ALGO, REDUCE_ALGO>);
  constexpr auto kernel = sglang::speculative_sampling::TreeSpeculativeSamplingTargetOnly<
      threads, SCAN_ALGO, REDUCE_ALGO, VEC, true, float, int32_t, int64_t>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  kernel<<<batch, threads, shared, stream>>>(
      (int32_t *)p[0], (int32_t *)p[1], (int32_t *)p[2], (int64_t *)p[3], (int64_t *)p[4], (int64_t *)p[5],
      (int64_t *)p[6], (float *)p[7], (float *)p[8], (float *)p[9], (float *)p[10], batch, path, rows, vocab, 1.0f,
      1.0f);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int tree_sampling(void **p, uint32_t batch, uint32_t path, uint32_t rows, uint32_t vocab, void *stream) {
  auto s = static_cast<cudaStream_t>(stream);
  if (vocab % 4 == 0) return launch<4>(p, batch, path, rows, vocab, s);
  if (vocab % 2 == 0) return launch<2>(p, batch, path, rows, vocab, s);
  return launch<1>(p, batch, path, rows, vocab, s);
}
"""


def tree_sampling(tensors: Sequence[Tensor], path: int) -> None:
    """Launch sglang's `TreeSpeculativeSamplingTargetOnly` with both thresholds at 1.

    tensors: contiguous on one GPU, in the kernel's order: predicts int32 `[B * N]`, accept_index int32 `[B, path]`,
    accept_token_num int32 `[B]`, candidates, retrive_index, retrive_next_token, retrive_next_sibling int64 `[B, N]`,
    uniform_samples float32 `[B, N]`, uniform_samples_for_final_sampling float32 `[B]`, target_probs, draft_probs
    float32 `[B, N, V]`; all but the middle ones are written to. path: longest path, row 0 included. Raises BackendError
    without a GPU, nvcc or the packages, and for a launch that fails.
    """
    batch, rows, vocab = tensors[9].shape
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    stream = ctypes.c_void_p(torch.cuda.current_stream(tensors[0].device).cuda_stream)
    code = _tree_library().tree_sampling(pointers, batch, path, rows, vocab, stream)
    if code:
        raise BackendError(f"sglang tree sampling: the launch failed with CUDA error {code}")


@cache
def _tree_library() -> ctypes.CDLL:
    folders = [require("sglang") / "kernels/jit/include", require("flashinfer") / "data/include", *_toolkit_headers()]
    return ctypes.CDLL(str(_compiled("tree_sampling", _TREE_LAUNCHER, folders)))


def _toolkit_headers() -> list[Path]:
    """Headers of CUDA libraries that were installed as Python packages, if any; a whole toolkit needs none."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return [header.parent for place in places for header in sorted(Path(place).glob("*/include/curand.h"))]


def _compiled(name: str, source: str, folders: Sequence[Path]) -> Path:
    """Compile a launcher for this machine's GPU into a temporary library; about 10 s."""
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler is None:
        raise BackendError(f"{name}: needs nvcc of the CUDA toolkit on the PATH, which was not found")
    major, minor = torch.cuda.get_device_capability()
    out = Path(tempfile.mkdtemp(prefix="lumotree-")) / f"{name}.so"
    (unit := out.with_suffix(".cu")).write_text(source)
    include = [word for folder in folders for word in ("-I", str(folder))]
    options = ["-O3", "-std=c++17", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC"]
    done = subprocess.run([compiler, *options, *include, "-o", str(out), str(unit)], capture_output=True, text=True)
    if done.returncode:
        raise BackendError(f"{name}: nvcc failed with exit status {done.returncode}: {done.stderr.strip()[-800:]}")
    return out
