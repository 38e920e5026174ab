// Single elements: bf16 to fp32, gates, groups of keys and values.
#pragma once
#include "shapes.h"

__device__ inline float from_bf16(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ inline float exchange(float x, int mask) { return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, mask)); }

__device__ inline float2 gates(float a, float b, float a_log, float dt_bias) {
    const float x = __fadd_rn(a, dt_bias);
    const float rate = x > 20.0f ? x : log1pf(expf(x));
    const float e = expf(-fabsf(b));
    return make_float2(expf(-__fmul_rn(expf(a_log), rate)), __fdiv_rn(b >= 0.0f ? 1.0f : e, __fadd_rn(1.0f, e)));
}

// Eight bf16 of a row, zeros beyond DK.
__device__ inline uint4 load_key(const u16 *row, int first) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (VECTOR) {
        if (first < DK) x = *(const uint4 *)(row + first);
        return x;
    }
    unsigned *words = (unsigned *)&x;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (first + i < DK) words[i / 2] |= (unsigned)row[first + i] << (16 * (i % 2));
    return x;
}

__device__ inline void store_key(u16 *row, int first, uint4 x) {
    if (VECTOR) {
        if (first < DK) *(uint4 *)(row + first) = x;
        return;
    }
    const unsigned *words = (const unsigned *)&x;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (first + i < DK) row[first + i] = (u16)(words[i / 2] >> (16 * (i % 2)));
}

// Four bf16 values of a slab, zeros beyond DV.
__device__ inline uint2 load_values(const u16 *row, int first) {
    uint2 x = make_uint2(0, 0);
    if (VECTOR) return *(const uint2 *)(row + first);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (first + i < DV) (i < 2 ? x.x : x.y) |= (unsigned)row[first + i] << (16 * (i % 2));
    return x;
}

__device__ inline void store_values(u16 *row, int first, uint2 x) {
    if (VECTOR) {
        *(uint2 *)(row + first) = x;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (first + i < DV) row[first + i] = (u16)((i < 2 ? x.x : x.y) >> (16 * (i % 2)));
}

__device__ inline void unpack(uint4 x, float *y) {
    const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = from_bf16(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu);
}
