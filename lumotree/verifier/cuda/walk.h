// VERIFY and NATIVE: a block walks all rows of a tree.
#pragma once
#include "plan.h"
#include "states.h"

// For each slab of the warp: its head, counted from the block's first.
__device__ inline void block_heads(const Block &b, Lane t, int *heads) {
#pragma unroll
    for (int r = 0; r < SLABS; ++r) {
        const int head = t.slab(b, r) / HEAD_SLABS - b.first_head();
        heads[r] = head < HEADS ? head : HEADS - 1;
    }
}

// What a lane needs of a staged row.
struct Operands {
    float key[4 * CHUNKS], query[4 * CHUNKS], value[SLABS], dot;
    float2 gate[SLABS];
};

// All but the query, which can be fetched earlier.
__device__ inline void take(const Shared &m, Lane t, const int *heads, int i, Operands &y) {
    take_row(m.key, i, t.lane, y.key);
    const float *values = (const float *)(m.value + i * BLOCK_SLABS + t.warp * SLABS) + t.sub;
#pragma unroll
    for (int r = 0; r < SLABS; ++r) y.gate[r] = m.gate[i * HEADS + heads[r]], y.value[r] = values[4 * r];
    y.dot = m.dot[i];
}

// Pending states: a thread reads back only what it wrote, so no barrier is needed.
template <bool STORE>
__device__ inline void move_pending(const Args &x, const Block &b, Shared &m, int slot, int thread,
                                    float (*state)[4 * CHUNKS]) {
    if (slot < STACK) {
        move_tile<STORE>(m.stack + slot * TILE, thread, state);
    } else {
        const long long extra = b.base / SPILL_ROWS + slot - STACK;
        move_tile<STORE>(x.spill + (extra * gridDim.x + blockIdx.x) * TILE, thread, state);
    }
}

template <int mode> __device__ inline void walk(const Args &x) {
    let_next_start();
    wait_for_previous();
    Block b;
    b.request = blockIdx.y;
    b.slot = x.state_slot[b.request];
    b.base = x.cu_rows[b.request];
    const int rows = x.cu_rows[b.request + 1] - b.base;
    b.key_head = blockIdx.x / BLOCKS;
    b.first_slab = blockIdx.x % BLOCKS * BLOCK_SLABS;
    b.layer = x.layer + blockIdx.z;
    const int n = mode == NATIVE && (rows <= 0 || !x.active[b.base]) ? 0 : rows;
    if (b.slot < 0 || n <= 0) return;

    SHARED_MEMORY(memory);
    Shared m = carve(memory, x.capacity);
    const bool staged_once = n <= STAGE;
    const bool planner = threadIdx.x >= THREADS;
    if (mode == VERIFY && !staged_once) plan_large(x, b, n, m);
    else if (mode == VERIFY && (PLANNERS ? planner : threadIdx.x < 32)) plan_small(x, b, n, m);
    if (planner || !staged_once) __syncthreads();
    if (planner) return;

    const Lane t = {(int)threadIdx.x % LANES, (int)threadIdx.x % 32 / LANES, (int)threadIdx.x / 32, (int)threadIdx.x};
    float state[SLABS][4 * CHUNKS];
    if (mode != VERIFY || !EARLY) move_states<false>(x, b, t, state);
    // Lanes 2 r and 2 r + 1 of a value row have the output of slab r; the first writes it.
    const int own = t.lane / 2 < SLABS ? t.lane / 2 : 0, slab = t.slab(b, own);
    const bool writes = t.lane / 2 < SLABS && t.lane % 2 == 0 && t.live(b, own);
    u16 *out = x.out + ((long long)b.base * HV + b.head(slab)) * DV + slab % HEAD_SLABS * 4 + t.sub;
    int heads[SLABS];
    block_heads(b, t, heads);

    int count = mode == VERIFY && !staged_once ? *m.count : n;
    for (int first = 0; first < count; first += STAGE) {
        // Rows that all fit are staged in their own order, which does not wait for the plan of the walk.
        const int *order = staged_once ? nullptr : m.order;
        const int some = count - first < STAGE ? count - first : STAGE;
        Stage stage;
        fetch<mode>(x, b, order, first, some, stage);
        if (first == 0 && mode == VERIFY && EARLY) ask_early(x, b, m.stack + (STACK - 1) * TILE, t);
        if (first) __syncthreads();
        place<mode>(x, b, order, first, some, stage, m);
        if (first == 0 && mode == VERIFY && EARLY) arrive_early(m.stack + (STACK - 1) * TILE, t, state);
        __syncthreads();
        if (mode == VERIFY && staged_once) count = *m.count;
        if (first >= count) break;
        const int end = count - first < STAGE ? count : first + STAGE;
        int at = first, entry = mode == VERIFY ? m.order[first] : first, next = entry;
        Operands y;
        take_row(m.query, mode == VERIFY && staged_once ? entry & ROW : 0, t.lane, y.query);
        take(m, t, heads, mode == VERIFY && staged_once ? entry & ROW : 0, y);
        float late = 0.0f;  // the last row's output, stored while the next row's products are on their way
        u16 *late_at = nullptr;
        do {
            bool plain;
            do {
                entry = next;
                next = mode == VERIFY ? m.order[at + 1] : at + 1;
                float at_key[SLABS], at_query[SLABS], u[SLABS];
                ++at;
                plain = at < end;
                const int i = mode == VERIFY && staged_once ? next & ROW : at - first;
                product(state, y.query, at_query);
                if (plain) take_row(m.query, i, t.lane, y.query);
                product(state, y.key, at_key);
                const float mine = whole_transposed(at_query, t.lane);
                whole(at_key);
                if (writes && late_at) *late_at = to_bf16(late);
                float decay[SLABS];
#pragma unroll
                for (int r = 0; r < SLABS; ++r) {
                    u[r] = correction(y.gate[r], y.value[r], at_key[r]);
                    decay[r] = y.gate[r].x;
                }
                late = __fmaf_rn(pick(u, own), y.dot, __fmul_rn(pick(decay, own), mine));
                late_at = out + (long long)(entry & ROW) * (HV * DV);
                if (mode != VERIFY || !(entry & LEAF)) {
#pragma unroll
                    for (int r = 0; r < SLABS; ++r) advance(state[r], y.key, y.gate[r].x, u[r]);
                }
                if (plain) take(m, t, heads, i, y);
                if (mode == VERIFY) plain = plain && !((entry & SAVE) | (next & LOAD));
            } while (plain);
            if (mode == VERIFY && (entry & SAVE)) move_pending<true>(x, b, m, (entry >> 24) - 1, t.thread, state);
            if (mode == VERIFY && at < count && (next & LOAD))
                move_pending<false>(x, b, m, (next >> 16 & 0xff) - 1, t.thread, state);
        } while (at < end);
        if (writes) *late_at = to_bf16(late);
    }
    if (mode == NATIVE) move_states<true>(x, b, t, state);
}
