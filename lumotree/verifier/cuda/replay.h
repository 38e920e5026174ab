// PUBLISH: replays the accepted rows from the record. The value rows of a key head are cut into parts of up to PART tiles;
// a block takes part after part, and all its tiles share the keys and gates that it prepares once.
#pragma once
#include "elements.h"
#include "states.h"

constexpr int PARTS = (BLOCKS + PART - 1) / PART;     // of a key head
constexpr int GATE_ITEMS = (STAGE * RATIO + THREADS - 1) / THREADS;
constexpr int VALUE_ITEMS = (STAGE * SLABS + 31) / 32;
constexpr bool ONE_HEAD = HEAD_SLABS % SLABS == 0;    // a warp's slabs have one gate
static_assert(MODE != PUBLISH || STACK <= 1, "one tile is on its way at most");

struct Replay {
    float4 *arriving, *key, *value;                   // value: for each row and slab, four values, the gate, and a gap
    float2 *gate;
};

// Mirrored by `shared_bytes` in build.py.
__device__ inline Replay carve_replay(char *memory) {
    Replay m;
    m.arriving = (float4 *)memory;
    m.key = m.arriving + STACK * TILE;
    m.value = m.key + STAGE * WIDTH / 4;
    m.gate = (float2 *)(m.value + 2 * STAGE * BLOCK_SLABS);
    return m;
}

// A block's way through the parts of a launch, tile by tile. `b.rows` are accepted rows here.
struct Course {
    int part, tile;
    Block b;

    __device__ bool more(const Args &x) const { return part < x.parts; }

    // The first part from `part` on that has accepted rows.
    __device__ void find(const Args &x) {
        for (tile = 0; part < x.parts; part += gridDim.x) {
            const int request = part / (HK * PARTS) % x.requests;
            if (request != b.request) {
                b.request = request;
                b.slot = x.state_slot[request];
                b.base = x.cu_rows[request];
                b.rows = x.accepted_length[request];
            }
            if (b.slot >= 0 && b.rows > 0) break;
        }
        b.key_head = part % (HK * PARTS) / PARTS;
        b.first_slab = part % PARTS * (PART * BLOCK_SLABS);
        b.layer = x.layer + part / (HK * PARTS) / x.requests;
    }

    __device__ void start(const Args &x) {
        b.request = -1;
        part = blockIdx.x;
        find(x);
    }

    __device__ void next(const Args &x) {
        b.first_slab += BLOCK_SLABS;
        if (++tile < PART && b.first_slab < GROUP_SLABS) return;
        part += gridDim.x;
        find(x);
    }
};

__device__ inline long long recorded_row(const Args &x, const Block &b, int i) {
    return (long long)b.layer * x.rec_rows + b.base + x.accepted_rows[(long long)b.request * x.accepted_width + i];
}

// Keys and gates of a part's rows on their way to shared memory.
struct Ahead {
    uint4 key[KEY_PASSES];
    float4 gate[GATE_ITEMS];
};

__device__ inline void fetch_shared(const Args &x, const Block &b, int at, int n, Ahead &s) {
#pragma unroll
    for (int p = 0; p < KEY_PASSES; ++p) {
        const int i = p * TEAMS + threadIdx.x / TEAM, first = threadIdx.x % TEAM * 8;
        s.key[p] = make_uint4(0, 0, 0, 0);
        if (i < n && threadIdx.x < TEAMS * TEAM)
            s.key[p] = load_key(x.k + (recorded_row(x, b, at + i) * HK + b.key_head) * DK, first);
    }
#pragma unroll
    for (int p = 0; p < GATE_ITEMS; ++p) {
        const int item = p * THREADS + threadIdx.x, i = item / RATIO, head = b.key_head * RATIO + item % RATIO;
        if (i >= n) continue;
        const long long row = recorded_row(x, b, at + i) * HV + head;
        const int parameter = b.layer * HV + head;
        s.gate[p] = make_float4(from_bf16(x.a[row]), from_bf16(x.b[row]), x.a_log[parameter], x.dt_bias[parameter]);
    }
}

__device__ inline void place_shared(int n, const Ahead &s, Replay &m) {
#pragma unroll
    for (int p = 0; p < KEY_PASSES; ++p) {
        const int i = p * TEAMS + threadIdx.x / TEAM, first = threadIdx.x % TEAM * 8;
        if (p * TEAMS >= n) continue;
        float y[8];
        unpack(s.key[p], y);
        float kk = __fmul_rn(y[0], y[0]);
#pragma unroll
        for (int j = 1; j < 8; ++j) kk = __fmaf_rn(y[j], y[j], kk);
#pragma unroll
        for (int mask = TEAM / 2; mask > 0; mask >>= 1) kk = exchange(kk, mask);
        const float at_key = rsqrtf(__fadd_rn(kk, EPSILON));
        if (i >= n || threadIdx.x >= TEAMS * TEAM) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(y[j], at_key);
        float4 *to = m.key + (i * WIDTH + first) / 4;
        to[0] = make_float4(y[0], y[1], y[2], y[3]);
        to[1] = make_float4(y[4], y[5], y[6], y[7]);
    }
#pragma unroll
    for (int p = 0; p < GATE_ITEMS; ++p) {
        const int item = p * THREADS + threadIdx.x;
        if (item / RATIO < n) m.gate[item] = gates(s.gate[p].x, s.gate[p].y, s.gate[p].z, s.gate[p].w);
    }
}

__device__ inline void fetch_values(const Args &x, const Block &b, Lane t, int at, int n, uint2 *v) {
#pragma unroll
    for (int p = 0; p < VALUE_ITEMS; ++p) {
        const int item = p * 32 + t.thread % 32, i = item / SLABS, slab = t.slab(b, item % SLABS);
        v[p] = make_uint2(0, 0);
        if (i >= n || slab >= GROUP_SLABS) continue;
        v[p] = load_values(x.v + (recorded_row(x, b, at + i) * HV + b.head(slab)) * DV, slab % HEAD_SLABS * 4);
    }
}

// By and for a warp: the four values and the gate of each row and slab.
__device__ inline void place_values(const Block &b, Lane t, int n, const uint2 *v, Replay &m) {
    __syncwarp();
#pragma unroll
    for (int p = 0; p < VALUE_ITEMS; ++p) {
        const int item = p * 32 + t.thread % 32;
        if (item / SLABS >= n) continue;
        float4 *to = m.value + 2 * (t.warp * (STAGE * SLABS) + item);
        to[0] = make_float4(
            from_bf16(v[p].x & 0xffffu), from_bf16(v[p].x >> 16), from_bf16(v[p].y & 0xffffu), from_bf16(v[p].y >> 16));
        const int head = t.slab(b, item % SLABS) / HEAD_SLABS;
        *(float2 *)(to + 1) = m.gate[item / SLABS * RATIO + (head < RATIO ? head : RATIO - 1)];
    }
    __syncwarp();
}

// What a lane needs of a row: of the four values the one of the slab whose correction it computes.
struct Step {
    float key[4 * CHUNKS], value;
    float2 own;
    float decay[SLABS];
};

__device__ inline void take_step(const float4 *key, const float *value, Lane t, int i, Step &y) {
    const int own = t.lane / 2 < SLABS ? t.lane / 2 : 0;
    take_row(key, i, t.lane, y.key);
    value += i * (8 * SLABS);
    y.value = value[8 * own + t.sub];
    y.own = *(const float2 *)(value + 8 * own + 4);
#pragma unroll
    for (int r = 0; r < SLABS; ++r) y.decay[r] = ONE_HEAD ? y.own.x : value[8 * r + 4];
}

__device__ inline void step(float (*state)[4 * CHUNKS], const Step &y, Lane t) {
    float at_key[SLABS];
    product(state, y.key, at_key);
    const float u = correction(y.own, y.value, whole_transposed(at_key, t.lane));
#pragma unroll
    for (int r = 0; r < SLABS; ++r)
        advance(state[r], y.key, y.decay[r], __shfl_sync(0xffffffffu, u, t.thread % 32 / LANES * LANES + 2 * r));
}

// A row's operands are fetched while the row before is worked on.
__device__ inline void replay_rows(const Replay &m, Lane t, int n, float (*state)[4 * CHUNKS]) {
    const float *value = (const float *)(m.value + 2 * t.warp * (STAGE * SLABS));
    Step even, odd;
    take_step(m.key, value, t, 0, even);
    for (int i = 0; i < n; i += 2) {
        if (i + 1 < n) take_step(m.key, value, t, i + 1, odd);
        step(state, even, t);
        if (i + 2 < n) take_step(m.key, value, t, i + 2, even);
        if (i + 1 < n) step(state, odd, t);
    }
}

__device__ inline int first_rows(const Block &b) { return b.rows < STAGE ? b.rows : STAGE; }

// The next tile's states and operands are asked for before a tile is worked on, so that memory is never idle. Warps meet
// at barriers only where a part begins, or where a path has more than STAGE rows.
__device__ inline void replay(const Args &x) {
    let_next_start();
    wait_for_previous();
    SHARED_MEMORY(memory);
    Replay m = carve_replay(memory);
    const Lane t = {(int)threadIdx.x % LANES, (int)threadIdx.x % 32 / LANES, (int)threadIdx.x / 32, (int)threadIdx.x};
    Course ahead;
    ahead.start(x);
    Ahead shared;
    uint2 values[VALUE_ITEMS];
    if (ahead.more(x)) {
        if (EARLY) ask_early(x, ahead.b, m.arriving, t);
        fetch_shared(x, ahead.b, 0, first_rows(ahead.b), shared);
        fetch_values(x, ahead.b, t, 0, first_rows(ahead.b), values);
    }
    bool fresh = true;
    while (ahead.more(x)) {
        const Block b = ahead.b;
        const int part = ahead.part;
        float state[SLABS][4 * CHUNKS];
        if (!EARLY) move_states<false>(x, b, t, state);
        for (int first = 0; first < b.rows; first += STAGE) {
            const int some = b.rows - first < STAGE ? b.rows - first : STAGE;
            if (first) {
                fetch_shared(x, b, first, some, shared);
                fetch_values(x, b, t, first, some, values);
            }
            if (fresh || first) {
                __syncthreads();
                place_shared(some, shared, m);
                __syncthreads();
            }
            place_values(b, t, some, values, m);
            if (EARLY && first == 0) arrive_early(m.arriving, t, state);
            if (first + STAGE >= b.rows) {
                ahead.next(x);
                fresh = ahead.part != part || b.rows > STAGE;
                if (ahead.more(x)) {
                    if (EARLY) ask_early(x, ahead.b, m.arriving, t);
                    if (fresh) fetch_shared(x, ahead.b, 0, first_rows(ahead.b), shared);
                    fetch_values(x, ahead.b, t, 0, first_rows(ahead.b), values);
                }
            }
            replay_rows(m, t, some, state);
        }
        move_states<true, true>(x, b, t, state);
    }
}
