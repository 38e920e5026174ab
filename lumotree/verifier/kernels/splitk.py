# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Device code of split-K tree attention: one pass over the prefix for all rows of a request, then one combination.

Keys are cut at fixed positions: into *splits* of `split` keys, and each split into blocks of `BN`. A work item is one
split of one KV head for a tile of `BM` (row, query head) pairs. Splits that lie in the prefix are shared by tiles that
hold many rows. What is left, the remainder of the prefix, the ancestors and the row itself, is an item of one row,
whose keys are gathered in position order: the row's ancestors are the set bits of its mask, in row order.

A pair's bits depend on its own query and keys alone. Cuts are positions, and do not move with the tree, the batch or
the number of programs; a tile has one shape, so that an element of a matrix product is the same sum wherever in the
tile it stands; a key has the place in its block that its position gives it, whether it is a candidate or committed.
So a one-token step, for which the ancestors are prefix, computes the same partial results.

The error is within `lumotree.reference.bounds`: a weight is rescaled once for each later block of its split and once
when splits are combined, by nothing where there is one split, which is no more than one exp for each SOFTMAX_BLOCK of
16 keys; the exponents still add up to the spread of the scores; and the splits' sums are another order of the same
terms. That bound is for sums in fp32. How a matrix unit rounds within one step is not documented, so on a card it is
the component audit and the bench that show it, not a derivation.
"""

import triton
import triton.language as tl

from lumotree.verifier.kernels.attention import rotate
from lumotree.verifier.kernels.bits import bf16_to_f32, f32_to_bf16, row_sum

#: Requests whose item counts are read at a time, and splits that are combined at a time: part of the kernels' shape.
REQUESTS: tl.constexpr = tl.constexpr(32)
SPLITS: tl.constexpr = tl.constexpr(8)


@triton.jit
def count_items(
    items, cu_rows, state_slot, prefix_len, requests, split, GROUP: tl.constexpr, KH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Running totals of the requests' work items; see `split_keys` for their order."""
    before = 0
    for first in range(0, requests, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        ok = request < requests
        rows = tl.load(cu_rows + request + 1, mask=ok, other=0) - tl.load(cu_rows + request, mask=ok, other=0)
        live = ok & (tl.load(state_slot + request, mask=ok, other=-1) >= 0) & (rows > 0)
        prefix = tl.load(prefix_len + request, mask=ok, other=0)
        whole = prefix // split
        shared = whole * ((rows * GROUP + BM - 1) // BM)
        # The deepest row that a request could have; items behind a row's last key find nothing to do.
        own = rows * ((prefix + rows - 1) // split - whole + 1)
        ends = before + tl.cumsum(tl.where(live, KH * (shared + own), 0), 0)
        tl.store(items + request, ends, mask=ok)
        before = tl.reduce(ends, 0, tl.standard._elementwise_max)


@triton.jit(
    do_not_specialize=("layer", "flat_slots", "words", "tree", "requests", "split"),
)  # fmt: skip
def place_rows(
    q, k, v, cos, sin, cache_k, cache_v, query, mask, keys, items,
    parent, active, position, row_request, cu_rows, state_slot, prefix_len, row_slot,
    layer, flat_slots, words, tree, requests, split,
    QH: tl.constexpr, KH: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Program (row, key head): Q and K rotated, K and V into the row's slot; head 0 packs the row's ancestors."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    GROUP: tl.constexpr = QH // KH
    if (row == 0) & (head == 0):
        count_items(items, cu_rows, state_slot, prefix_len, requests, split, GROUP, KH, BM)
    request = tl.load(row_request + row)
    if (tl.load(active + row) == 0) | (tl.load(state_slot + request) < 0):
        return
    dim = tl.arange(0, BD)
    ok = dim < DIM
    place = tl.load(position + row).to(tl.int64)
    source = (row.to(tl.int64) * KH + head) * DIM
    to = ((layer.to(tl.int64) * flat_slots + tl.load(row_slot + row)) * KH + head) * DIM + dim
    tl.store(cache_k + to, rotate(k + source, dim, cos, sin, place, ok, ROTARY), mask=ok)
    tl.store(cache_v + to, tl.load(v + source + dim, mask=ok, other=0), mask=ok)
    for member in tl.static_range(GROUP):
        at = (row.to(tl.int64) * QH + head * GROUP + member) * DIM
        tl.store(query + at + dim, rotate(q + at, dim, cos, sin, place, ok, ROTARY), mask=ok)
    if head == 0:
        base = tl.load(cu_rows + request)
        lane = tl.arange(0, BW)
        bits = tl.zeros([BW], tl.int32)
        # Depth is counted, not derived from the position, which may be anything.
        seen = tl.load(prefix_len + request) + 1
        above = tl.load(parent + row, mask=tree != 0, other=-1)
        while above >= 0:
            bits = tl.where(lane == above // 32, bits | (1 << (above % 32)), bits)
            seen += 1
            above = tl.load(parent + base + above)
        tl.store(mask + row.to(tl.int64) * words + lane, bits, mask=lane < words)
        tl.store(keys + row, seen)


@triton.jit
def count_bits(word):
    """Set bits of each uint32, as int32."""
    pairs = word - ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    halves = octets + (octets >> 8)
    return ((halves + (halves >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def place_of_bit(word, rank):
    """Place of the set bit that has `rank` set bits below it, by bisection; rank < set bits."""
    place = rank * 0
    for log in tl.static_range(5):
        below = count_bits((word >> place.to(tl.uint32)) & ((1 << (16 >> log)) - 1))
        above = rank >= below
        place = tl.where(above, place + (16 >> log), place)
        rank = tl.where(above, rank - below, rank)
    return place


@triton.jit
def ancestor_of_rank(mask, words, rank):
    """Row of the ancestor at depth `rank`, -1 where there is none. mask: the row's words, ancestors in row order."""
    found = rank * 0 - 1
    before = 0
    for w in range(words):
        word = tl.load(mask + w).to(tl.uint32, bitcast=True)
        size = count_bits(word)
        inside = (rank >= before) & (rank < before + size)
        found = tl.where(inside, w * 32 + place_of_bit(word, tl.where(inside, rank - before, 0)), found)
        before += size
    return found


@triton.jit
def load_operand(pointer, ok, FULL: tl.constexpr):
    """A tile of bf16 for a matrix product: as it is, or from its bits (int16) as fp32, which is exact."""
    tile = tl.load(pointer) if FULL else tl.load(pointer, mask=ok, other=0)
    return bf16_to_f32(tile) if tile.dtype == tl.int16 else tile


@triton.jit
def operand_like(bits, tile):
    """bf16 bits as an operand of the type that `tile` has."""
    return bf16_to_f32(bits) if tile.dtype == tl.float32 else bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def fold_block(query, keys, values, seen, top, total, acc, SCALE: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr):
    """Online softmax over one block of keys `[BN, BD]` for a tile of queries `[BM, BD]`; products of bf16, sums fp32.

    seen: keys that count, `[BN]`; ALL: that is every one. PARTS: bf16 numbers that stand for one weight. One rounds it
    to the nearest; three are exact, 3 x 8 bits.
    """
    score = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE
    if not ALL:
        score = tl.where(seen[None, :], score, -3.0e38)
    best = tl.maximum(top, tl.reduce(score, 1, tl.standard._elementwise_max))
    weight = tl.exp(score - best[:, None])
    rescale = tl.exp(top - best)
    total = total * rescale + row_sum(weight, 1)
    acc = acc * rescale[:, None]
    rest = weight
    for _ in tl.static_range(PARTS):
        part = ((rest.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16)
        acc = tl.dot(operand_like(part, values), values, acc, input_precision="ieee")
        rest = rest - bf16_to_f32(part)
    return best, total, acc


@triton.jit
def find_request(items, requests, item):
    """Request that an item belongs to: the number of requests whose items end at or before it."""
    request = 0
    for first in range(0, requests, REQUESTS):
        lane = first + tl.arange(0, REQUESTS)
        ended = (tl.load(items + lane, mask=lane < requests, other=0x7FFFFFFF) <= item).to(tl.int32)
        request += tl.reduce(ended, 0, tl.standard._sum_combine)
    return request


@triton.jit(
    do_not_specialize=(
        "layer", "flat_slots", "words", "requests", "max_pages", "split", "splits",
    ),
    do_not_specialize_on_alignment=(
        "mask", "keys", "items", "active", "cu_rows", "prefix_len", "page_table", "row_slot",
    ),
)  # fmt: skip
def split_keys(
    query, cache_k, cache_v, mask, keys, items, top_of, total_of, acc_of,
    active, cu_rows, prefix_len, page_table, row_slot,
    layer, flat_slots, words, requests, max_pages, split, splits,
    QH: tl.constexpr, KH: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Any number of programs share the items. A request's come as (split of the prefix, KV head, tile), the tiles that
    read the same keys next to each other, then (split behind them, row, KV head). `split` is a multiple of BN. PAGE is
    fixed when compiled, so that no thread divides each key's position by a variable.
    """
    GROUP: tl.constexpr = QH // KH
    FULL: tl.constexpr = DIM == BD
    SCALE: tl.constexpr = DIM**-0.5
    dim = tl.arange(0, BD)
    slot = tl.arange(0, BM)
    offset = tl.arange(0, BN)
    for item in range(tl.program_id(0), tl.load(items + requests - 1), tl.num_programs(0)):
        request = find_request(items, requests, item)
        local = item - tl.load(items + request - 1, mask=request > 0, other=0)
        base = tl.load(cu_rows + request)
        rows = tl.load(cu_rows + request + 1) - base
        prefix = tl.load(prefix_len + request)
        whole = prefix // split
        tiles = (rows * GROUP + BM - 1) // BM
        behind = local - tiles * KH * whole
        single = behind >= 0
        head = tl.where(single, behind, local // tiles) % KH
        part = tl.where(single, whole + behind // (KH * rows), local // (tiles * KH))
        member = tl.where(single, behind // KH % rows, 0)
        pair = tl.where(single, member * GROUP, local % tiles * BM) + slot
        row = base + member
        begin = part * split
        live = ((tl.load(active + row) != 0) | ~single) & (part < splits)
        last = tl.load(keys + row, mask=single & live, other=0)
        stop = tl.where(single, tl.maximum(begin, tl.minimum(last, begin + split)), begin + split)
        even = tl.where(single, tl.minimum(stop, tl.maximum(begin, prefix // BN * BN)), stop)
        inside = tl.where(single, slot < GROUP, pair < rows * GROUP)
        inside &= tl.load(active + base + pair // GROUP, mask=inside, other=0) != 0
        place = (base + pair // GROUP).to(tl.int64) * QH + head * GROUP + pair % GROUP
        q = load_operand(query + place[:, None] * DIM + dim[None, :], inside[:, None] & (dim < DIM)[None, :], False)
        top = tl.full([BM], -3.0e38, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        plane = layer.to(tl.int64) * flat_slots
        for start in range(begin, even, BN):
            index = start + offset
            page = tl.load(page_table + request * max_pages + index // PAGE)
            flat = (page * PAGE + index % PAGE).to(tl.int64)
            tile = (((plane + flat) * KH + head) * DIM)[:, None] + dim[None, :]
            k = load_operand(cache_k + tile, (dim < DIM)[None, :], FULL)
            v = load_operand(cache_v + tile, (dim < DIM)[None, :], FULL)
            top, total, acc = fold_block(q, k, v, index < stop, top, total, acc, SCALE, PARTS, True)
        for start in range(even, stop, BN):
            index = start + offset
            committed = index < prefix
            page = tl.load(page_table + request * max_pages + index // PAGE, mask=committed, other=0)
            above = ancestor_of_rank(mask + row.to(tl.int64) * words, words, index - prefix)
            # The row itself stands behind its ancestors, and in for keys that do not count: it is never poison.
            candidate = tl.load(row_slot + tl.where(above >= 0, base + above, row))
            flat = tl.where(committed, page * PAGE + index % PAGE, candidate).to(tl.int64)
            tile = (((plane + flat) * KH + head) * DIM)[:, None] + dim[None, :]
            k = load_operand(cache_k + tile, (dim < DIM)[None, :], FULL)
            v = load_operand(cache_v + tile, (dim < DIM)[None, :], FULL)
            top, total, acc = fold_block(q, k, v, index < stop, top, total, acc, SCALE, PARTS, False)
        inside &= live & (stop > begin)
        at = place * splits + part
        tl.store(top_of + at, top, mask=inside)
        tl.store(total_of + at, total, mask=inside)
        tl.store(acc_of + at[:, None] * DIM + dim[None, :], acc, mask=inside[:, None] & (dim < DIM)[None, :])


@triton.jit(
    do_not_specialize=("split", "splits"),
    do_not_specialize_on_alignment=("keys", "active", "row_request", "state_slot", "out"),
)
def combine_splits(
    top_of, total_of, acc_of, keys, active, row_request, state_slot, out, split, splits,
    QH: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): partial results added in the order of positions, SPLITS of them at a time."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    if (tl.load(active + row) == 0) | (tl.load(state_slot + tl.load(row_request + row)) < 0):
        return
    dim = tl.arange(0, BD)
    ok = dim < DIM
    lane = tl.arange(0, SPLITS)
    place = row.to(tl.int64) * QH + head
    parts = tl.minimum((tl.load(keys + row) + split - 1) // split, splits)
    best = -3.0e38
    for first in range(0, parts, SPLITS):
        top = tl.load(top_of + place * splits + first + lane, mask=first + lane < parts, other=-3.0e38)
        best = tl.maximum(best, tl.reduce(top, 0, tl.standard._elementwise_max))
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    for first in range(0, parts, SPLITS):
        seen = first + lane < parts
        at = place * splits + first + lane
        weight = tl.exp(tl.load(top_of + at, mask=seen, other=-3.0e38) - best)
        total += row_sum(weight * tl.load(total_of + at, mask=seen, other=0.0), 0)
        tile = tl.load(acc_of + at[:, None] * DIM + dim[None, :], mask=seen[:, None] & ok[None, :], other=0.0)
        acc += row_sum(weight[:, None] * tile, 0)
    tl.store(out + place * DIM + dim, f32_to_bf16(acc / total), mask=ok)
