"""Gated DeltaNet verification, publication and native step in CUDA C++, compiled when first used.

NVRTC, which torch's CUDA builds bring along, compiles `gdn.cu` for the shape at hand: neither nvcc nor a host compiler
is needed. On a machine without a GPU, g++ compiles the same source with `emulation.h`, whose fibers stand for threads.

* *One launch a layer.* A block owns 48 value rows of one key head (96 in a large grid) and walks the whole tree depth
  first, the state in registers. A row's leaf children come right behind it: they need its state and leave it as it
  is. Where two or more other children hang, the state goes to shared memory until the last of them starts; each row's
  largest subtree comes last, so a tree of n rows never has more than log2((n + 1) / 3) states pending. Those beyond
  shared memory go to a spill buffer, which a tree of fewer than 47 rows never needs (11 in a large grid). One warp
  plans the walk: in a small grid, which waits for it, a warp of its own while the others fetch operands.
* *One reduction a row.* Eight lanes hold a value row. Both products are taken on the state before the update:
  `u = beta (v - g (R k))`, `o = g (R q) + u (k . q)`, `R = g R + u k^T`. That is the contract's step in another order
  of operations, inside its derived bounds.
* *Bits.* Verification, publication and native step inline the same functions. Every product and sum in them is an
  intrinsic whose rounding is fixed, the file is compiled without contraction, and the reduction over eight lanes does
  not depend on the tile: bits agree across the three although tiles, stages and registers differ.
* *Replay.* Verification records the bf16 operands it used; publication reads these. One launch serves all layers. A
  block takes the value rows of a key head tile after tile, prepares their keys and gates once, and asks for the next
  tile's state before it works on this one. Warps meet at barriers only where a key head begins.
* *Launch.* Programmatic dependent launch hides the start of a layer behind the end of the one before. Nothing
  allocates, and grids depend on shapes alone, so a captured graph may be replayed with other trees, slots and lengths.
"""
