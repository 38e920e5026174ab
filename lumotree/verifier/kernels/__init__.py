"""Path-parallel verification in Triton, on a GPU or on a CPU through Triton's interpreter.

Why a tree row has the bits of the one-token chain, and a published state the bits of the native state:

* *One binary.* `gdn.gdn_walk` serves verification, publication and the native step; `attention.attend` serves tree rows
  and native rows. What differs between the uses (where the rows are listed, whether outputs are written, whether the
  final state is committed) are run-time arguments, and those arguments are excluded from Triton's specialisation, so
  that all uses launch the same machine code. Reduction trees, layouts and instruction selection cannot differ.
* *One tile.* A program owns the whole key dimension, padded to a power of two, so a sum over keys is one reduction of
  fixed shape. Tile sizes and `num_warps` come from `launch.gdn_tile` and `launch.attention_tile` alone.
* *No contraction.* Launches pass `enable_fp_fusion=False`: products are rounded before they are added, as in torch and
  in the interpreter. So where the compiler clones a loop for a run-time flag, the clones still agree: layouts and
  reduction trees are settled before it does, and without contraction it may not change what an operation returns.
* *The carry is lossless.* Along a path the state stays in registers; between levels and between native steps it goes
  through fp32 memory.
* *The operands are the recorded ones.* Verification records the bf16 k, v, a, b that it used (and the layer's fp32
  gate parameters); replay reads these.
* *Keys are split by position.* Attention runs over blocks of consecutive positions, prefix and ancestors in one list,
  so the partition of the online softmax does not depend on the tree, on the slots or on the rest of the batch.
* *bf16 is ours.* Tensors are passed as int16 and converted with integer arithmetic (`bits`), because Triton's
  interpreter truncates when it rounds fp32 to bf16.

The convolution has no reduction across lanes: its arithmetic is elementwise in a fixed order.

Nothing here allocates or asks the device for a value; grids depend on shapes alone, so a captured graph may be replayed
with other trees, slots and lengths.
"""

from __future__ import annotations

import os
import sys

import torch

from lumotree.errors import BackendError


def prepare_triton() -> bool:
    """Choose the interpreter when there is no GPU; must run before triton is imported. Returns whether it is in use.

    Raises BackendError when triton was imported earlier in compiled mode and there is no GPU.
    """
    if not torch.cuda.is_available() and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    compiled = isinstance(tl.sum, triton.runtime.jit.JITFunction)
    if compiled and not torch.cuda.is_available():
        raise BackendError(
            "triton: there is no GPU and triton was imported without TRITON_INTERPRET=1; set TRITON_INTERPRET=1 in the "
            "environment, or import lumotree.backends.triton_backend before anything that imports triton"
        )
    return not compiled


INTERPRETED = prepare_triton()
