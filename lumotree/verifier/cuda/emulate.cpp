// The kernel of gdn.cu behind a C function, for emulation on a CPU.
#include "emulation.h"
#include "gdn.cu"

static Args arguments;

extern "C" void emulate(int x, int y, int z, int shared_bytes, const Args *args) {
    arguments = *args;
    run_grid({x, y, z}, THREADS + PLANNERS, shared_bytes, [] { gdn_walk(arguments); });
}
