// The order in which VERIFY visits the rows of a tree.
#pragma once
#include "operands.h"

// The walk visits rows depth first. A row's leaf children come right behind it: their outputs need its state but leave
// it as it is. Then come its other children, the largest subtree last, so that a tree of n rows never has more than
// log2((n + 1) / 3) states pending. An entry is row | LEAF | load << 16 | save << 24: the state before the row comes from
// stack slot load - 1, the state after it goes to slot save - 1; 0 is neither.
struct Siblings {
    int leaves, earlier_leaves, before, total, largest, heavy;  // before, total: rows in subtrees that are no leaf
    __device__ void see(int y, int r, int size) {
        if (size == 1) {
            ++leaves;
            if (y < r) ++earlier_leaves;
            return;
        }
        if (y < r) before += size;
        if (size > largest) largest = size, heavy = y;
        total += size;
    }
    __device__ bool light(int r, int size) const { return size > 1 && r != heavy; }
    // Rows of siblings that the walk visits before row r.
    __device__ int rows_before(int r, int size) const {
        if (size == 1) return earlier_leaves;
        return leaves + (r == heavy ? total - size : before - (heavy < r ? largest : 0));
    }
};

// sum: of `1 + rows_before | light << 16` over a row and its ancestors; own: the row's alone; first: no load is needed.
__device__ inline void place_entry(Shared &m, int r, int size, int sum, int own, bool first, bool many) {
    const int slot = sum >> 16, load = size == 1 || first ? 0 : slot - (own >> 16) + 1;
    m.order[(sum & 0xffff) - 1] = r | (size == 1 ? LEAF : 0) | load << 16 | (many ? slot + 1 : 0) << 24;
}

// By one warp, for at most 32 rows: ancestors by pointer jumping, descendants by transposing their masks.
__device__ inline void plan_small(const Args &x, const Block &b, int n, Shared &m) {
    const unsigned all = 0xffffffffu;
    const int r = threadIdx.x % 32;
    const int named = r < n && x.active[b.base + r] ? x.parent[b.base + r] : -2;
    const int up = named < r ? named : -2;
    const bool alive = up > -2;
    unsigned above = alive ? 1u << r : 0u;
    int jump = up;
    while (__ballot_sync(all, jump >= 0)) {
        const unsigned mask = __shfl_sync(all, above, jump & 31);
        const int further = __shfl_sync(all, jump, jump & 31);
        if (jump >= 0) above |= mask, jump = further;
    }
    unsigned below = 0;
#pragma unroll
    for (int y = 0; y < 32; ++y) {
        const unsigned mask = __ballot_sync(all, above >> y & 1u);
        if (y == r) below = mask;
    }
    const int size = __popc(below);
    const unsigned siblings = __match_any_sync(all, alive ? up : 64 + r);
    Siblings s = {0, 0, 0, 0, 0, r};
    for (unsigned rest = siblings; __ballot_sync(all, rest != 0); rest &= rest - 1) {
        const int y = rest ? __ffs(rest) - 1 : r;
        const int its = __shfl_sync(all, size, y);
        if (rest) s.see(y, r, its);
    }
    const bool light = alive && s.light(r, size);
    const int rows_before = s.rows_before(r, size);
    const int own = 1 + rows_before + (light ? 0x10000 : 0);
    bool many = false;
    for (unsigned rest = __ballot_sync(all, light); rest; rest &= rest - 1)
        if (__shfl_sync(all, up, __ffs(rest) - 1) == r) many = true;
    int sum = alive ? own : 0;
    jump = up;
    while (__ballot_sync(all, jump >= 0)) {
        const int more = __shfl_sync(all, sum, jump & 31), further = __shfl_sync(all, jump, jump & 31);
        if (jump >= 0) sum += more, jump = further;
    }
    if (alive) place_entry(m, r, size, sum, own, rows_before == s.leaves, many);
    const int count = __popc(__ballot_sync(all, alive));
    if (r == 0) *m.count = count, m.order[count] = 0;  // looked at, never walked
}

// By all threads of the block, for any number of rows. Its scratch lies in the stack, which is not in use yet.
__device__ inline void plan_large(const Args &x, const Block &b, int n, Shared &m) {
    const int threads = THREADS + PLANNERS;
    for (int r = threadIdx.x; r < n; r += threads) {
        const int up = x.parent[b.base + r];
        m.up[r] = x.active[b.base + r] && up < r ? up : -2;
        m.size[r] = m.many[r] = 0;
    }
    __syncthreads();
    for (int r = threadIdx.x; r < n; r += threads)
        if (m.up[r] != -2)
            for (int y = r; y >= 0; y = m.up[y]) atomicAdd(&m.size[y], 1);
    __syncthreads();
    for (int r = threadIdx.x; r < n; r += threads) {
        const int up = m.up[r], size = m.size[r];
        if (up == -2) continue;
        Siblings s = {0, 0, 0, 0, 0, r};
        for (int y = up + 1; up >= 0 && y < n; ++y)
            if (m.up[y] == up) s.see(y, r, m.size[y]);
        const bool light = s.light(r, size);
        if (light) m.many[up] = 1;
        const int rows_before = up < 0 ? 0 : s.rows_before(r, size);
        m.weight[r] = (1 + rows_before) | (light ? 0x10000 : 0);
        m.order[r] = rows_before == s.leaves;  // for a moment: whether the row is the first that is no leaf
    }
    __syncthreads();
    const int rows = 1024 / threads + 1;
    bool first[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) first[i] = threadIdx.x + i * threads < n && m.order[threadIdx.x + i * threads];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int r = threadIdx.x + i * threads;
        if (r >= n || m.up[r] == -2) continue;
        int sum = 0;
        for (int y = r; y >= 0; y = m.up[y]) sum += m.weight[y];
        place_entry(m, r, m.size[r], sum, m.weight[r], first[i], m.many[r]);
    }
    if (threadIdx.x == 0) *m.count = m.size[0], m.order[m.size[0]] = 0;
}
