// States in registers: the arithmetic of a row, and their way from and to memory.
#pragma once
#include "elements.h"

// A lane's part of the products of the states with a key or query; `whole` completes them.
__device__ inline void product(const float (*state)[4 * CHUNKS], const float *x, float *y) {
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i)
#pragma unroll
        for (int r = 0; r < SLABS; ++r) y[r] = i ? __fmaf_rn(state[r][i], x[i], y[r]) : __fmul_rn(state[r][i], x[i]);
}

__device__ inline void whole(float *y) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1)
#pragma unroll
        for (int r = 0; r < SLABS; ++r) y[r] = exchange(y[r], mask);
}

// The sum of slab lane / 2 alone, by the same additions as `whole`. SLABS <= 4.
__device__ inline float whole_transposed(const float *y, int lane) {
    static_assert(SLABS <= 4, "two lanes a slab");
    const bool high = lane & 4, odd = lane & 2;
    const float y1 = SLABS > 1 ? y[SLABS > 1] : 0.0f, y2 = SLABS > 2 ? y[SLABS > 2 ? 2 : 0] : 0.0f;
    const float y3 = SLABS > 3 ? y[SLABS > 3 ? 3 : 0] : 0.0f;
    const float give0 = high ? y[0] : y2, keep0 = high ? y2 : y[0];
    const float a = __fadd_rn(keep0, __shfl_xor_sync(0xffffffffu, give0, 4));
    float b = 0.0f;
    if (SLABS > 1) {
        const float give1 = high ? y1 : y3, keep1 = high ? y3 : y1;
        b = __fadd_rn(keep1, __shfl_xor_sync(0xffffffffu, give1, 4));
    }
    const float give = odd ? a : b, keep = odd ? b : a;
    return exchange(__fadd_rn(keep, __shfl_xor_sync(0xffffffffu, give, 2)), 1);
}

template <class T> __device__ inline T pick(const T *y, int r) {
    T z = y[0];
#pragma unroll
    for (int i = 1; i < SLABS; ++i)
        if (r == i) z = y[i];
    return z;
}

// u = beta (v - g (R k)).
__device__ inline float correction(float2 gate, float value, float at_key) {
    return __fmul_rn(gate.y, __fmaf_rn(-gate.x, at_key, value));
}

// The one native update of a value row's part of the state.
__device__ inline void advance(float *state, const float *key, float decay, float u) {
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) state[i] = __fmaf_rn(u, key[i], __fmul_rn(decay, state[i]));
}

// A lane's part of a block's states.
struct Lane {
    int lane, sub, warp, thread;
    __device__ int slab(const Block &b, int r) const { return b.first_slab + warp * SLABS + r; }
    __device__ bool live(const Block &b, int r) const {
        const int s = slab(b, r);
        return s < GROUP_SLABS && (DV % 4 == 0 || s % HEAD_SLABS * 4 + sub < DV);
    }
    // Of the layer's HV * DV.
    __device__ int value_row(const Block &b, int r) const {
        const int s = slab(b, r);
        if (DV % 4 == 0) return b.key_head * (RATIO * DV) + s * 4 + sub;  // the same, in fewer instructions
        return b.head(s) * DV + s % HEAD_SLABS * 4 + sub;
    }
};

__device__ inline void take_row(const float4 *staged, int i, int lane, float *x) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float4 y = staged[(i * CHUNKS + c) * LANES + lane];
        x[4 * c] = y.x, x[4 * c + 1] = y.y, x[4 * c + 2] = y.z, x[4 * c + 3] = y.w;
    }
}

template <bool STORE, bool STREAMED = false>
__device__ inline void move_states(const Args &x, const Block &b, Lane t, float (*state)[4 * CHUNKS]) {
    float *home = x.pool + ((long long)b.layer * x.slots + b.slot) * ((long long)HV * DV * DK);
#pragma unroll
    for (int r = 0; r < SLABS; ++r) {
        float *row = home + (long long)t.value_row(b, r) * DK;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int first = 32 * c + 4 * t.lane;
            float *s = state[r] + 4 * c;
            if (!STORE) s[0] = s[1] = s[2] = s[3] = 0.0f;
            if (!t.live(b, r)) continue;
            if (DK % 4 == 0) {
                if (first >= DK) continue;
                float4 *at = (float4 *)(row + first);
                const float4 y = make_float4(s[0], s[1], s[2], s[3]);
                if (STORE && STREAMED) store_streaming(at, y);
                else if (STORE) *at = y;
                else s[0] = at->x, s[1] = at->y, s[2] = at->z, s[3] = at->w;
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (first + j >= DK) continue;
                if (STORE) row[first + j] = s[j];
                else s[j] = row[first + j];
            }
        }
    }
}

// States on their way travel to a slot of the stack while something else is done; a thread waits for and reads only what
// it asked for itself.
constexpr bool EARLY = STACK > 0 && DK % 4 == 0;

__device__ inline void ask_early(const Args &x, const Block &b, float4 *slot, Lane t) {
    const float *home = x.pool + ((long long)b.layer * x.slots + b.slot) * ((long long)HV * DV * DK);
#pragma unroll
    for (int i = 0; i < SLABS * CHUNKS; ++i) {
        const int r = i / CHUNKS, first = 32 * (i % CHUNKS) + 4 * t.lane;
        const bool live = t.live(b, r) && first < DK;
        const float *from = home + (long long)t.value_row(b, r) * DK + first;
        copy_ahead(slot + i * THREADS + t.thread, live ? from : home, live);
    }
}

template <bool STORE> __device__ inline void move_tile(float4 *tile, int thread, float (*state)[4 * CHUNKS]) {
#pragma unroll
    for (int i = 0; i < SLABS * CHUNKS; ++i) {
        float4 *at = tile + i * THREADS + thread;
        float *s = state[i / CHUNKS] + i % CHUNKS * 4;
        if (STORE) {
            *at = make_float4(s[0], s[1], s[2], s[3]);
        } else {
            const float4 y = *at;
            s[0] = y.x, s[1] = y.y, s[2] = y.z, s[3] = y.w;
        }
    }
}

__device__ inline void arrive_early(float4 *slot, Lane t, float (*state)[4 * CHUNKS]) {
    wait_for_copies();
    move_tile<false>(slot, t.thread, state);
}
