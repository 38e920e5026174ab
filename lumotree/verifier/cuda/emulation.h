// Runs gdn.cu on a CPU: the threads of a block are fibers, switched at barriers and shuffles. For tests; not fast.
//
// It finds what a GPU hides: a lane of a warp at another collective than its neighbours, a barrier that not all threads
// reach, shared memory read before it was written (it starts as NaN in every block).
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define KERNEL(threads, resident) extern "C" void
#define PARAMETER
#define SHARED_MEMORY(name) char *name = emulated.shared.data()

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Dim { int x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int STACK_BYTES = 128 << 10;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool done;
    long shuffles, barriers;   // collectives entered so far
    unsigned deposit[2];
};

struct Emulated {
    std::vector<Fiber> fibers;
    std::vector<char> shared;
    ucontext_t scheduler;
    int running;
    Dim block, grid;
};
inline Emulated emulated;

#define threadIdx (Dim{emulated.running, 0, 0})
#define blockIdx (emulated.block)
#define gridDim (emulated.grid)

inline void pause() { swapcontext(&emulated.fibers[emulated.running].context, &emulated.scheduler); }

[[noreturn]] inline void broken(const char *what) {
    std::fprintf(stderr, "emulation: block (%d, %d, %d) thread %d: %s\n", emulated.block.x, emulated.block.y,
                 emulated.block.z, emulated.running, what);
    std::abort();
}

// Waits until every thread of [first, last) has entered as many collectives of this kind. A thread that has returned
// no longer counts at a barrier, but a shuffle needs all lanes.
inline void meet(long Fiber::*kind, int first, int last) {
    const long mine = ++(emulated.fibers[emulated.running].*kind);
    for (;;) {
        bool all = true;
        for (int t = first; t < last; ++t) {
            const Fiber &f = emulated.fibers[t];
            if (f.*kind >= mine) continue;
            if (f.done && kind == &Fiber::shuffles) broken("a lane has returned before a shuffle");
            all = all && f.done;
        }
        if (all) return;
        pause();
    }
}

inline void __syncthreads() { meet(&Fiber::barriers, 0, (int)emulated.fibers.size()); }

// What each lane of the warp deposits; the base of all shuffles and votes.
inline const unsigned *gather(unsigned mine) {
    Fiber &me = emulated.fibers[emulated.running];
    const int first = emulated.running / 32 * 32, buffer = (int)(me.shuffles % 2);  // a lane can be one ahead, not two
    static unsigned seen[32];
    me.deposit[buffer] = mine;
    meet(&Fiber::shuffles, first, first + 32);
    for (int lane = 0; lane < 32; ++lane) seen[lane] = emulated.fibers[first + lane].deposit[buffer];
    return seen;
}

inline void __syncwarp() { gather(0); }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline int lane_id() { return emulated.running % 32; }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
    return __uint_as_float(gather(__float_as_uint(x))[lane_id() ^ mask]);
}
inline float __shfl_sync(unsigned, float x, int lane) { return __uint_as_float(gather(__float_as_uint(x))[lane & 31]); }
inline unsigned __shfl_sync(unsigned, unsigned x, int lane) { return gather(x)[lane & 31]; }
inline int __shfl_sync(unsigned, int x, int lane) { return (int)gather((unsigned)x)[lane & 31]; }
inline unsigned __ballot_sync(unsigned, bool x) {
    const unsigned *all = gather(x);
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= (all[lane] ? 1u : 0u) << lane;
    return mask;
}
inline unsigned __match_any_sync(unsigned, int x) {
    const unsigned *all = gather((unsigned)x);
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= (all[lane] == (unsigned)x ? 1u : 0u) << lane;
    return mask;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int atomicAdd(int *at, int x) { const int old = *at; *at += x; return old; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return (float)(1.0 / std::sqrt((double)x)); }
inline unsigned short to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : 0x7fff;
}
inline void copy_ahead(float4 *to, const float *from, bool live) {
    if (live) std::memcpy(to, from, 16);
    else std::memset(to, 0, 16);
}
inline void wait_for_copies() {}
inline void store_streaming(float4 *at, float4 y) { *at = y; }
inline void let_next_start() {}
inline void wait_for_previous() {}

inline void (*emulated_entry)();

inline void fiber_main() {
    emulated_entry();
    emulated.fibers[emulated.running].done = true;
    pause();
}

inline bool step_fibers() {
    bool alive = false;
    for (size_t t = 0; t < emulated.fibers.size(); ++t) {
        if (emulated.fibers[t].done) continue;
        alive = true;
        emulated.running = (int)t;
        swapcontext(&emulated.scheduler, &emulated.fibers[t].context);
    }
    return alive;
}

inline void run_block(int threads, int bytes) {
    emulated.fibers.resize(threads);
    emulated.shared.assign(bytes, (char)0xff);  // NaN as float, -1 as int
    for (Fiber &f : emulated.fibers) {
        f.done = false;
        f.shuffles = f.barriers = 0;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, fiber_main, 0);
    }
    while (step_fibers()) {}
}

inline void run_grid(Dim grid, int threads, int bytes, void (*entry)()) {
    emulated.grid = grid;
    emulated_entry = entry;
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x; ++x) {
                emulated.block = {x, y, z};
                run_block(threads, bytes);
            }
}
