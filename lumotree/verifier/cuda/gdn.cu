// Gated DeltaNet: depth-first walk of a tree with the states of all its rows on chip. See the package docstring.
//
// Compile-time: HK HV DK DV (shape); SLABS, WARPS (a block's value rows: 4 * SLABS * WARPS); STACK (pending states kept
// in shared memory); STAGE (rows whose operands are staged at once); VECTOR (operands allow 16-byte loads); SCALE
// (DK^-1/2); MODE; RESIDENT (blocks that must fit a multiprocessor's registers).
//
// Eight lanes hold a value row: lane l holds keys 32 c + 4 l .. + 3 for each chunk c. A slab is the four value rows of a
// warp that share one register index; a slab never spans two heads. Every product and sum is written as an intrinsic
// and the file is compiled without contraction, so `advance` returns the same bits wherever it is inlined.

using u16 = unsigned short;

enum { VERIFY, PUBLISH, NATIVE };

struct Args {
    const u16 *q, *k, *v, *a, *b;                     // bf16 [rows, ..]; PUBLISH: the record [layers, rec_rows, ..]
    const float *a_log, *dt_bias;                     // [HV]; PUBLISH: [layers, HV]
    float *pool;                                      // [layers, slots, HV, DV, DK]
    float4 *spill;                                    // pending states beyond STACK
    u16 *out;                                         // bf16 [rows, HV, DV]
    u16 *rec_k, *rec_v, *rec_a, *rec_b;               // the record that VERIFY writes
    float *rec_a_log, *rec_dt_bias;
    const int *state_slot, *cu_rows, *parent;
    const unsigned char *active;
    const int *accepted_rows, *accepted_length;       // [requests, accepted_width], [requests]
    int layer, slots, rec_rows, accepted_width, capacity, requests, tiles;
};

constexpr int LANES = 8;                              // that share a value row
constexpr int CHUNKS = DK <= 32 ? 1 : DK <= 64 ? 2 : DK <= 128 ? 4 : 8;
constexpr int WIDTH = 32 * CHUNKS;                    // padded key dimension
constexpr int RATIO = HV / HK;
constexpr int HEAD_SLABS = (DV + 3) / 4;
constexpr int GROUP_SLABS = RATIO * HEAD_SLABS;       // value heads that share a key head
constexpr int BLOCK_SLABS = WARPS * SLABS;
constexpr int BLOCKS = (GROUP_SLABS + BLOCK_SLABS - 1) / BLOCK_SLABS;  // of a key head
constexpr int THREADS = 32 * WARPS;                   // VERIFY has one more warp, which plans the walk
constexpr int SPANNED = (BLOCK_SLABS + HEAD_SLABS - 2) / HEAD_SLABS + 1;
constexpr int HEADS = SPANNED < RATIO ? SPANNED : RATIO;  // heads that a block can touch
constexpr int TEAM = WIDTH / 8;                       // threads that prepare one row's key
constexpr int TEAMS = THREADS / TEAM;
constexpr int KEY_PASSES = (STAGE + TEAMS - 1) / TEAMS;
constexpr int VALUE_PASSES = (STAGE * BLOCK_SLABS + THREADS - 1) / THREADS;
constexpr int GATE_PASSES = (STAGE * HEADS + THREADS - 1) / THREADS;
constexpr int SPILL_ROWS = 3 * (2 << STACK) - 1;      // a tree needs a state beyond STACK for each so many rows at most
constexpr int TILE = WARPS * SLABS * CHUNKS * 32;     // float4 of a block's states
constexpr float EPSILON = 1e-6f;
constexpr int ROW = 0x7fff, LEAF = 0x8000, LOAD = 0xff << 16, SAVE = 0x7f << 24;  // of an entry of the walk
static_assert(STAGE <= 32, "a warp plans what is staged at once");

struct Shared {
    float4 *stack, *key, *query;
    float4 *value;
    float2 *gate;
    float *dot;
    int *count, *order, *up, *size, *weight, *many;
};

// Mirrored by `shared_bytes` in launch.py. The scratch of `plan_walk` lies in the stack, which is not in use then.
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

// Operands of up to STAGE rows between global and shared memory.
struct Stage {
    uint4 key[KEY_PASSES], query[KEY_PASSES];
    uint2 value[VALUE_PASSES];
    float4 gate[GATE_PASSES];
};

struct Block {
    int request, slot, base, rows, key_head, first_slab, layer;
    __device__ int head(int slab) const { return key_head * RATIO + slab / HEAD_SLABS; }
    __device__ int first_head() const { return first_slab / HEAD_SLABS; }
};

template <int mode> __device__ inline long long operand_row(const Args &x, const Block &b, const int *order, int i) {
    int row = i;
    if (mode == PUBLISH) row = x.accepted_rows[(long long)b.request * x.accepted_width + i];
    if (mode == VERIFY && order) row = order[i] & ROW;
    return (mode == PUBLISH ? (long long)b.layer * x.rec_rows : 0) + b.base + row;
}

template <int mode>
__device__ inline void fetch(const Args &x, const Block &b, const int *order, int at, int n, Stage &s) {
#pragma unroll
    for (int p = 0; p < KEY_PASSES; ++p) {
        const int i = p * TEAMS + threadIdx.x / TEAM, first = threadIdx.x % TEAM * 8;
        s.key[p] = s.query[p] = make_uint4(0, 0, 0, 0);
        if (i < n && threadIdx.x < TEAMS * TEAM) {
            const long long row = operand_row<mode>(x, b, order, at + i) * HK + b.key_head;
            s.key[p] = load_key(x.k + row * DK, first);
            if (mode != PUBLISH) s.query[p] = load_key(x.q + row * DK, first);
        }
    }
#pragma unroll
    for (int p = 0; p < VALUE_PASSES; ++p) {
        const int i = (p * THREADS + threadIdx.x) / BLOCK_SLABS;
        const int slab = b.first_slab + (p * THREADS + threadIdx.x) % BLOCK_SLABS;
        s.value[p] = make_uint2(0, 0);
        if (i < n && slab < GROUP_SLABS) {
            const long long row = operand_row<mode>(x, b, order, at + i) * HV + b.head(slab);
            s.value[p] = load_values(x.v + row * DV, slab % HEAD_SLABS * 4);
        }
    }
#pragma unroll
    for (int p = 0; p < GATE_PASSES; ++p) {
        const int i = (p * THREADS + threadIdx.x) / HEADS;
        const int group_head = b.first_head() + (p * THREADS + threadIdx.x) % HEADS;
        if (i < n && group_head < RATIO) {
            const int head = b.key_head * RATIO + group_head;
            const long long row = operand_row<mode>(x, b, order, at + i) * HV + head;
            const int parameter = (mode == PUBLISH ? b.layer * HV : 0) + head;
            s.gate[p] = make_float4(from_bf16(x.a[row]), from_bf16(x.b[row]), x.a_log[parameter], x.dt_bias[parameter]);
        }
    }
}

// VERIFY also records: the block with a key head's first slab its key, the block with a head's first slab its gates.
template <int mode>
__device__ inline void place(const Args &x, const Block &b, const int *order, int at, int n, Stage &s, Shared &m) {
    const long long recorded = (long long)b.layer * x.rec_rows;
    constexpr int GROUP = KEY_PASSES % 2 ? 1 : 2;  // passes whose reductions overlap; more would need more registers
#pragma unroll
    for (int at_pass = 0; at_pass < KEY_PASSES; at_pass += GROUP) {
        float key[GROUP][8], query[GROUP][8], kk[GROUP], qq[GROUP], kq[GROUP];
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
                if (mode != PUBLISH) qq[p] = exchange(qq[p], mask), kq[p] = exchange(kq[p], mask);
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
            if (mode == PUBLISH) continue;
            y = query[p];
            to = m.query + (i * WIDTH + first) / 4;
            to[0] = make_float4(y[0], y[1], y[2], y[3]);
            to[1] = make_float4(y[4], y[5], y[6], y[7]);
            if (first == 0) m.dot[i] = kq[p];
            if (mode == VERIFY && b.first_slab == 0) {
                const long long row = (recorded + operand_row<mode>(x, b, order, at + i)) * HK + b.key_head;
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
            const long long row = (recorded + operand_row<mode>(x, b, order, at + i)) * HV + b.head(slab);
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
        const long long row = (recorded + operand_row<mode>(x, b, order, at + i)) * HV + head;
        x.rec_a[row] = (u16)(__float_as_uint(g.x) >> 16);
        x.rec_b[row] = (u16)(__float_as_uint(g.y) >> 16);
        x.rec_a_log[(long long)b.layer * HV + head] = g.z;
        x.rec_dt_bias[(long long)b.layer * HV + head] = g.w;
    }
}

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
    const int threads = THREADS + 32;
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
};

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

__device__ inline void take_row(const float4 *staged, int i, int lane, float *x) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float4 y = staged[(i * CHUNKS + c) * LANES + lane];
        x[4 * c] = y.x, x[4 * c + 1] = y.y, x[4 * c + 2] = y.z, x[4 * c + 3] = y.w;
    }
}

// All but the query, which can be fetched earlier.
template <int mode> __device__ inline void take(const Shared &m, Lane t, const int *heads, int i, Operands &y) {
    take_row(m.key, i, t.lane, y.key);
    const float *values = (const float *)(m.value + i * BLOCK_SLABS + t.warp * SLABS) + t.sub;
#pragma unroll
    for (int r = 0; r < SLABS; ++r) y.gate[r] = m.gate[i * HEADS + heads[r]], y.value[r] = values[4 * r];
    y.dot = mode == PUBLISH ? 0.0f : m.dot[i];
}

template <bool STORE> __device__ inline void move_states(const Args &x, const Block &b, Lane t, float (*state)[4 * CHUNKS]) {
    float *home = x.pool + ((long long)b.layer * x.slots + b.slot) * ((long long)HV * DV * DK);
#pragma unroll
    for (int r = 0; r < SLABS; ++r) {
        const int slab = t.slab(b, r);
        float *row = home + ((long long)b.head(slab) * DV + slab % HEAD_SLABS * 4 + t.sub) * DK;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int first = 32 * c + 4 * t.lane;
            float *s = state[r] + 4 * c;
            if (!STORE) s[0] = s[1] = s[2] = s[3] = 0.0f;
            if (!t.live(b, r)) continue;
            if (DK % 4 == 0) {
                if (first >= DK) continue;
                float4 *at = (float4 *)(row + first);
                if (STORE) *at = make_float4(s[0], s[1], s[2], s[3]);
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

// States on their way travel to the last slot of the stack while something else is done; a thread waits for and reads
// only what it asked for itself. The first slot is plan_large's when a verification has one slot alone.
constexpr bool EARLY = STACK > (MODE == VERIFY ? 1 : 0) && DK % 4 == 0;

__device__ inline void ask_early(const Args &x, const Block &b, Shared &m, Lane t) {
    const float *home = x.pool + ((long long)b.layer * x.slots + b.slot) * ((long long)HV * DV * DK);
#pragma unroll
    for (int i = 0; i < SLABS * CHUNKS; ++i) {
        const int r = i / CHUNKS, slab = t.slab(b, r), first = 32 * (i % CHUNKS) + 4 * t.lane;
        const bool live = t.live(b, r) && first < DK;
        const float *from = home + ((long long)b.head(slab) * DV + slab % HEAD_SLABS * 4 + t.sub) * DK + first;
        copy_ahead(m.stack + (STACK - 1) * TILE + i * THREADS + t.thread, live ? from : home, live);
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

__device__ inline void arrive_early(Shared &m, Lane t, float (*state)[4 * CHUNKS]) {
    wait_for_copies();
    move_tile<false>(m.stack + (STACK - 1) * TILE, t.thread, state);
}

// Pending states: a thread reads back only what it wrote, so no barrier is needed.
template <bool STORE>
__device__ inline void move_pending(const Args &x, const Block &b, Shared &m, int slot, int thread, float (*state)[4 * CHUNKS]) {
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
    const bool planner = mode == VERIFY && threadIdx.x >= THREADS;
    if (mode == VERIFY && !staged_once) plan_large(x, b, n, m);
    else if (planner) plan_small(x, b, n, m);
    if (planner || !staged_once) __syncthreads();
    if (planner) return;

    const Lane t = {(int)threadIdx.x % LANES, (int)threadIdx.x % 32 / LANES, (int)threadIdx.x / 32, (int)threadIdx.x};
    float state[SLABS][4 * CHUNKS];
    if (mode == VERIFY && EARLY) ask_early(x, b, m, t);
    else move_states<false>(x, b, t, state);
    // Lane r of a value row writes the output of slab r.
    const int own = t.lane < SLABS ? t.lane : 0, slab = t.slab(b, own);
    const bool writes = t.lane < SLABS && t.live(b, own);
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
        if (first) __syncthreads();
        place<mode>(x, b, order, first, some, stage, m);
        if (first == 0 && mode == VERIFY && EARLY) arrive_early(m, t, state);
        __syncthreads();
        if (mode == VERIFY && staged_once) count = *m.count;
        if (first >= count) break;
        const int end = count - first < STAGE ? count : first + STAGE;
        int at = first, entry = mode == VERIFY ? m.order[first] : first, next = entry;
        Operands y;
        take_row(m.query, mode == VERIFY && staged_once ? entry & ROW : 0, t.lane, y.query);
        take<mode>(m, t, heads, mode == VERIFY && staged_once ? entry & ROW : 0, y);
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
                whole(at_query);
                whole(at_key);
                if (writes && late_at) *late_at = to_bf16(late);
#pragma unroll
                for (int r = 0; r < SLABS; ++r) {
                    u[r] = correction(y.gate[r], y.value[r], at_key[r]);
                    if (t.lane == r) late = __fmaf_rn(u[r], y.dot, __fmul_rn(y.gate[r].x, at_query[r]));
                }
                late_at = out + (long long)(entry & ROW) * (HV * DV);
                if (mode != VERIFY || !(entry & LEAF)) {
#pragma unroll
                    for (int r = 0; r < SLABS; ++r) advance(state[r], y.key, y.gate[r].x, u[r]);
                }
                if (plain) take<mode>(m, t, heads, i, y);
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

// One tile of a publication: block of value rows, request and layer. Returns the accepted rows, 0 where there are none.
__device__ inline int choose_tile(const Args &x, int tile, Block &b) {
    const int blocks = HK * BLOCKS, request = tile / blocks % x.requests;
    if (request != b.request) {
        b.request = request;
        b.slot = x.state_slot[request];
        b.base = x.cu_rows[request];
        b.rows = x.accepted_length[request];
    }
    b.key_head = tile % blocks / BLOCKS;
    b.first_slab = tile % blocks % BLOCKS * BLOCK_SLABS;
    b.layer = x.layer + tile / blocks / x.requests;
    return b.slot < 0 || b.rows < 0 ? 0 : b.rows;
}

__device__ inline int next_tile(const Args &x, int tile, Block &b) {
    for (; tile < x.tiles; tile += gridDim.x)
        if (choose_tile(x, tile, b)) break;
    return tile;
}

// Replays the accepted rows. A block takes tile after tile and asks for the next one's state and operands before it works
// on this one, so that memory is never idle.
__device__ inline void replay(const Args &x) {
    let_next_start();
    wait_for_previous();
    SHARED_MEMORY(memory);
    Shared m = carve(memory, 0);
    const Lane t = {(int)threadIdx.x % LANES, (int)threadIdx.x % 32 / LANES, (int)threadIdx.x / 32, (int)threadIdx.x};
    Block b, ahead;
    ahead.request = -1;
    int tile = next_tile(x, blockIdx.x, ahead);
    Stage stage;
    if (tile < x.tiles) {
        if (EARLY) ask_early(x, ahead, m, t);
        fetch<PUBLISH>(x, ahead, nullptr, 0, ahead.rows < STAGE ? ahead.rows : STAGE, stage);
    }
    while (tile < x.tiles) {
        b = ahead;
        float state[SLABS][4 * CHUNKS];
        int heads[SLABS];
        block_heads(b, t, heads);
        if (!EARLY) move_states<false>(x, b, t, state);
        for (int first = 0; first < b.rows; first += STAGE) {
            const int some = b.rows - first < STAGE ? b.rows - first : STAGE;
            if (first) fetch<PUBLISH>(x, b, nullptr, first, some, stage);
            __syncthreads();
            place<PUBLISH>(x, b, nullptr, first, some, stage, m);
            if (EARLY && first == 0) arrive_early(m, t, state);
            __syncthreads();
            if (first + STAGE >= b.rows) {
                tile = next_tile(x, tile + gridDim.x, ahead);
                if (tile < x.tiles) {
                    if (EARLY) ask_early(x, ahead, m, t);
                    fetch<PUBLISH>(x, ahead, nullptr, 0, ahead.rows < STAGE ? ahead.rows : STAGE, stage);
                }
            }
            Operands y;
            take<PUBLISH>(m, t, heads, 0, y);
            for (int i = 0; i < some; ++i) {
                float at_key[SLABS];
                product(state, y.key, at_key);
                whole(at_key);
#pragma unroll
                for (int r = 0; r < SLABS; ++r)
                    advance(state[r], y.key, y.gate[r].x, correction(y.gate[r], y.value[r], at_key[r]));
                if (i + 1 < some) take<PUBLISH>(m, t, heads, i + 1, y);
            }
        }
        move_states<true>(x, b, t, state);
    }
}

KERNEL(THREADS + (MODE == VERIFY ? 32 : 0), RESIDENT) gdn_walk(const PARAMETER Args x) {
    if (MODE == PUBLISH) replay(x);
    else walk<MODE == PUBLISH ? NATIVE : MODE>(x);
}
