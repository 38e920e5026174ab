// Operands of VERIFY and NATIVE: from global memory through registers to shared memory, recorded on the way.
#pragma once
#include "elements.h"

struct Shared {
    float4 *stack, *key, *query;
    float4 *value;
    float2 *gate;
    float *dot;
    int *count, *order, *up, *size, *weight, *many;
};

// Mirrored by `shared_bytes` in build.py. The scratch of `plan_walk` lies in the stack, which is not in use then.
__device__ inline Shared carve(char *memory, int capacity) {
    Shared s;
    s.stack = (float4 *)memory;
    s.up = (int *)memory;
    s.size = s.up + capacity;
    s.weight = s.size + capacity;
    s.many = s.weight + capacity;
    const int stack = STACK * TILE * 16, scratch = (16 * capacity + 15) / 16 * 16;
    s.key = (float4 *)(memory + (stack > scratch ? stack : scratch));
    s.query = s.key + STAGE * WIDTH / 4;
    s.value = s.query + STAGE * WIDTH / 4;
    s.gate = (float2 *)(s.value + STAGE * BLOCK_SLABS);
    s.dot = (float *)(s.gate + STAGE * HEADS);
    s.count = (int *)(s.dot + STAGE);
    s.order = s.count + 1;
    return s;
}

// Operands of up to STAGE rows between global and shared memory.
struct Stage {
    uint4 key[KEY_PASSES], query[KEY_PASSES];
    uint2 value[VALUE_PASSES];
    float4 gate[GATE_PASSES];
};

template <int mode> __device__ inline long long operand_row(const Block &b, const int *order, int i) {
    return b.base + (mode == VERIFY && order ? order[i] & ROW : i);
}

// Passes whose reductions overlap, which takes registers. A lean block has one, and fetches the next when it is done.
constexpr int GROUP = KEY_PASSES % 2 || LEAN ? 1 : 2;

template <int mode>
__device__ inline void fetch_keys(const Args &x, const Block &b, const int *order, int at, int n, int from, int to,
                                  Stage &s) {
#pragma unroll
    for (int p = from; p < to; ++p) {
        const int i = p * TEAMS + threadIdx.x / TEAM, first = threadIdx.x % TEAM * 8;
        s.key[p] = s.query[p] = make_uint4(0, 0, 0, 0);
        if (i < n && threadIdx.x < TEAMS * TEAM) {
            const long long row = operand_row<mode>(b, order, at + i) * HK + b.key_head;
            s.key[p] = load_key(x.k + row * DK, first);
            s.query[p] = load_key(x.q + row * DK, first);
        }
    }
}

template <int mode>
__device__ inline void fetch(const Args &x, const Block &b, const int *order, int at, int n, Stage &s) {
    fetch_keys<mode>(x, b, order, at, n, 0, LEAN ? GROUP : KEY_PASSES, s);
#pragma unroll
    for (int p = 0; p < VALUE_PASSES; ++p) {
        const int i = (p * THREADS + threadIdx.x) / BLOCK_SLABS;
        const int slab = b.first_slab + (p * THREADS + threadIdx.x) % BLOCK_SLABS;
        s.value[p] = make_uint2(0, 0);
        if (i < n && slab < GROUP_SLABS) {
            const long long row = operand_row<mode>(b, order, at + i) * HV + b.head(slab);
            s.value[p] = load_values(x.v + row * DV, slab % HEAD_SLABS * 4);
        }
    }
#pragma unroll
    for (int p = 0; p < GATE_PASSES; ++p) {
        const int i = (p * THREADS + threadIdx.x) / HEADS;
        const int group_head = b.first_head() + (p * THREADS + threadIdx.x) % HEADS;
        if (i < n && group_head < RATIO) {
            const int head = b.key_head * RATIO + group_head;
            const long long row = operand_row<mode>(b, order, at + i) * HV + head;
            s.gate[p] = make_float4(from_bf16(x.a[row]), from_bf16(x.b[row]), x.a_log[head], x.dt_bias[head]);
        }
    }
}

// VERIFY also records: the block with a key head's first slab its key, the block with a head's first slab its gates.
template <int mode>
__device__ inline void place(const Args &x, const Block &b, const int *order, int at, int n, Stage &s, Shared &m) {
    const long long recorded = (long long)b.layer * x.rec_rows;
#pragma unroll
    for (int at_pass = 0; at_pass < KEY_PASSES; at_pass += GROUP) {
        float key[GROUP][8], query[GROUP][8], kk[GROUP], qq[GROUP], kq[GROUP];
        if (LEAN && at_pass) fetch_keys<mode>(x, b, order, at, n, at_pass, at_pass + GROUP, s);
#pragma unroll
        for (int p = 0; p < GROUP; ++p) {
            unpack(s.key[at_pass + p], key[p]);
            unpack(s.query[at_pass + p], query[p]);
            kk[p] = __fmul_rn(key[p][0], key[p][0]);
            qq[p] = __fmul_rn(query[p][0], query[p][0]);
            kq[p] = __fmul_rn(key[p][0], query[p][0]);
#pragma unroll
            for (int j = 1; j < 8; ++j) {
                kk[p] = __fmaf_rn(key[p][j], key[p][j], kk[p]);
                qq[p] = __fmaf_rn(query[p][j], query[p][j], qq[p]);
                kq[p] = __fmaf_rn(key[p][j], query[p][j], kq[p]);
            }
        }
#pragma unroll
        for (int mask = TEAM / 2; mask > 0; mask >>= 1)
#pragma unroll
            for (int p = 0; p < GROUP; ++p) {
                kk[p] = exchange(kk[p], mask);
                qq[p] = exchange(qq[p], mask);
                kq[p] = exchange(kq[p], mask);
            }
#pragma unroll
        for (int p = 0; p < GROUP; ++p) {
            const float at_key = rsqrtf(__fadd_rn(kk[p], EPSILON));
            const float at_query = __fmul_rn(rsqrtf(__fadd_rn(qq[p], EPSILON)), SCALE);
            kq[p] = __fmul_rn(__fmul_rn(kq[p], at_key), at_query);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                key[p][j] = __fmul_rn(key[p][j], at_key);
                query[p][j] = __fmul_rn(query[p][j], at_query);
            }
        }
#pragma unroll
        for (int p = 0; p < GROUP; ++p) {
            const int i = (at_pass + p) * TEAMS + threadIdx.x / TEAM, first = threadIdx.x % TEAM * 8;
            if (i >= n || threadIdx.x >= TEAMS * TEAM) continue;
            const float *y = key[p];
            float4 *to = m.key + (i * WIDTH + first) / 4;
            to[0] = make_float4(y[0], y[1], y[2], y[3]);
            to[1] = make_float4(y[4], y[5], y[6], y[7]);
            y = query[p];
            to = m.query + (i * WIDTH + first) / 4;
            to[0] = make_float4(y[0], y[1], y[2], y[3]);
            to[1] = make_float4(y[4], y[5], y[6], y[7]);
            if (first == 0) m.dot[i] = kq[p];
            if (mode == VERIFY && b.first_slab == 0) {
                const long long row = (recorded + operand_row<mode>(b, order, at + i)) * HK + b.key_head;
                store_key(x.rec_k + row * DK, first, s.key[at_pass + p]);
            }
        }
    }
#pragma unroll
    for (int p = 0; p < VALUE_PASSES; ++p) {
        const int item = p * THREADS + threadIdx.x, i = item / BLOCK_SLABS;
        const int slab = b.first_slab + item % BLOCK_SLABS;
        if (i >= n || slab >= GROUP_SLABS) continue;
        const uint2 v = s.value[p];
        m.value[item] = make_float4(
            from_bf16(v.x & 0xffffu), from_bf16(v.x >> 16), from_bf16(v.y & 0xffffu), from_bf16(v.y >> 16));
        if (mode == VERIFY) {
            const long long row = (recorded + operand_row<mode>(b, order, at + i)) * HV + b.head(slab);
            store_values(x.rec_v + row * DV, slab % HEAD_SLABS * 4, v);
        }
    }
#pragma unroll
    for (int p = 0; p < GATE_PASSES; ++p) {
        const int item = p * THREADS + threadIdx.x, i = item / HEADS, group_head = b.first_head() + item % HEADS;
        if (i >= n || group_head >= RATIO) continue;
        const float4 g = s.gate[p];
        m.gate[item] = gates(g.x, g.y, g.z, g.w);
        if (mode != VERIFY || group_head * HEAD_SLABS < b.first_slab) continue;
        const int head = b.key_head * RATIO + group_head;
        const long long row = (recorded + operand_row<mode>(b, order, at + i)) * HV + head;
        x.rec_a[row] = (u16)(__float_as_uint(g.x) >> 16);
        x.rec_b[row] = (u16)(__float_as_uint(g.y) >> 16);
        x.rec_a_log[(long long)b.layer * HV + head] = g.z;
        x.rec_dt_bias[(long long)b.layer * HV + head] = g.w;
    }
}
