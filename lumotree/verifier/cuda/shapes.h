// Arguments of a launch and the constants that follow from its compilation.
#pragma once

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
    int layer, slots, rec_rows, accepted_width, capacity, requests, parts;
};

constexpr int LANES = 8;                              // that share a value row
constexpr int CHUNKS = DK <= 32 ? 1 : DK <= 64 ? 2 : DK <= 128 ? 4 : 8;
constexpr int WIDTH = 32 * CHUNKS;                    // padded key dimension
constexpr int RATIO = HV / HK;
constexpr int HEAD_SLABS = (DV + 3) / 4;
constexpr int GROUP_SLABS = RATIO * HEAD_SLABS;       // value heads that share a key head
constexpr int BLOCK_SLABS = WARPS * SLABS;
constexpr int BLOCKS = (GROUP_SLABS + BLOCK_SLABS - 1) / BLOCK_SLABS;  // of a key head
constexpr int THREADS = 32 * WARPS;                   // that hold states
constexpr int PLANNERS = MODE == VERIFY && PLANNER ? 32 : 0;  // a warp of their own; without it the first one plans
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

// What a block works on.
struct Block {
    int request, slot, base, rows, key_head, first_slab, layer;
    __device__ int head(int slab) const { return key_head * RATIO + slab / HEAD_SLABS; }
    __device__ int first_head() const { return first_slab / HEAD_SLABS; }
};
