// Gated DeltaNet: depth-first walk of a tree with the states of all its rows on chip. See the package docstring.
//
// Compile-time: HK HV DK DV (shape); SLABS, WARPS (value rows at once: 4 * SLABS * WARPS); STACK (states kept in shared
// memory: pending ones, one on its way); STAGE (rows whose operands are staged at once); PART (tiles that share a
// publication's keys); PLANNER (a warp of its own plans the walk); LEAN (fewer operands in registers); VECTOR (operands
// allow 16-byte loads); SCALE (DK^-1/2); MODE; RESIDENT (blocks that must fit a multiprocessor's registers).
//
// Eight lanes hold a value row: lane l holds keys 32 c + 4 l .. + 3 for each chunk c. A slab is the four value rows of a
// warp that share one register index; a slab never spans two heads. Every product and sum is written as an intrinsic
// and the file is compiled without contraction, so `advance` returns the same bits wherever it is inlined.

#include "replay.h"
#include "walk.h"

KERNEL(THREADS + PLANNERS, RESIDENT) gdn_walk(const PARAMETER Args x) {
    if (MODE == PUBLISH) replay(x);
    else walk<MODE == PUBLISH ? NATIVE : MODE>(x);
}
