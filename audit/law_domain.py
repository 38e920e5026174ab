"""The bounded domain on which the law of a selection rule is proved: trees, vocabularies, rational rows.

A configuration is one decoding step seen as a random experiment. Drafted tokens are random, so a target row that hangs
on a tree row would not define a sequence law; here the target is a *prefix law*: `target[l][code]` is the law of the
next token after the path tokens `s_1 .. s_l`, whose code is their number in base `vocab`, first token foremost.
Every prefix has a row of its own, which includes Markov and context-free targets. The drafter is such a prefix law too
(`laws`), from which siblings are drawn in turn without replacement, or the drafted tokens are fixed (`tokens`).

A block holds all configurations of one tree, vocabulary, denominator and kind of draft. It is numbered by a mixed
radix, so that configuration k of a block is the same for ever and the size of a block is an exact integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np

from lumotree.errors import InputError

Row = tuple[int, ...]
"""Numerators of a law over the block's denominator."""

Levels = tuple[tuple[Row, ...], ...]
Draft = Literal["sampled", "fixed"]

MAX_ROWS = 5
MAX_VOCAB = 4
MAX_SEQUENCES = 256
"""Largest `vocab ** (depth + 1)` in the domain; with the bounds here it leaves out nothing."""
MAX_VOCAB_OF_LARGEST = 3
"""Vocabulary bound for trees of MAX_ROWS rows."""

DENOMINATORS = (4, 6)
"""4 makes ties and halves, 6 thirds. Vocabulary 4 has the denominator 4 only."""

SEED = 20251129
DEFAULT_COUNT = 10_000
FULL_COUNT = 1_000_000


@dataclass(frozen=True)
class Configuration:
    """One step: a tree, a target prefix law, and either a draft prefix law or fixed drafts.

    parents: -1 for row 0, otherwise an earlier row; siblings are tried in row order. target: levels 0..depth. laws:
    levels 0..depth-1, or None. tokens: drafted token of every row (row 0 carries -1), or None.
    """

    parents: tuple[int, ...]
    vocab: int
    den: int
    target: Levels
    laws: Levels | None
    tokens: tuple[int, ...] | None

    @property
    def depth(self) -> int:
        """Edges between row 0 and the deepest row."""
        return len(self.target) - 1

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each row in row order."""
        return children_of(self.parents)


@dataclass(frozen=True)
class Block:
    """All configurations of one shape; see the module."""

    parents: tuple[int, ...]
    vocab: int
    den: int
    draft: Draft

    @cached_property
    def grid(self) -> tuple[Row, ...]:
        """Every law over the vocabulary with this denominator, zeros and point masses included."""
        return compositions(self.den, self.vocab)

    @cached_property
    def depth(self) -> int:
        """Depth of the tree."""
        return depth_of(self.parents)

    @cached_property
    def _radices(self) -> tuple[int, ...]:
        rows: int = sum(self.vocab**level for level in range(self.depth + 1))
        if self.draft == "fixed":
            return (len(self.grid),) * rows + (self.vocab,) * (len(self.parents) - 1)
        inner: int = rows - self.vocab**self.depth
        return (len(self.grid),) * (rows + inner)

    @cached_property
    def size(self) -> int:
        """Number of configurations."""
        return math.prod(self._radices)

    def configuration(self, number: int) -> Configuration:
        """Return configuration `number` of the block. Raises InputError if there is none."""
        if not 0 <= number < self.size:
            raise InputError(f"no configuration {number} in the block; allowed: 0..{self.size - 1}")
        digits = []
        for radix in self._radices:
            number, digit = divmod(number, radix)
            digits.append(digit)
        target, rest = self._levels(digits, self.depth + 1)
        if self.draft == "fixed":
            return Configuration(self.parents, self.vocab, self.den, target, None, (-1, *rest))
        laws, _ = self._levels(rest, self.depth)
        return Configuration(self.parents, self.vocab, self.den, target, laws, None)

    def _levels(self, digits: list[int], count: int) -> tuple[Levels, list[int]]:
        levels, start = [], 0
        for level in range(count):
            end = start + self.vocab**level
            levels.append(tuple(self.grid[digit] for digit in digits[start:end]))
            start = end
        return tuple(levels), digits[start:]

    def numbers(self, count: int, seed: int = SEED, part: int = 0, parts: int = 1) -> Iterator[int]:
        """Return part `part` of `parts` of `count` different configuration numbers: all if the block has no more.

        Larger blocks are walked by k -> (a k + b) mod size with a coprime to the size, hence without repetition.
        """
        if count >= self.size:
            yield from range(part, self.size, parts)
            return
        step, start = self._stride(seed)
        for k in range(part, count, parts):
            yield (step * k + start) % self.size

    def _stride(self, seed: int) -> tuple[int, int]:
        key = (seed, *(parent + 1 for parent in self.parents), self.vocab, self.den, int(self.draft == "fixed"))
        words = np.random.SeedSequence(key).generate_state(128, np.uint64)
        step = int.from_bytes(words.tobytes(), "little") % self.size  # 8192 bits: more than any size of the domain
        while math.gcd(step, self.size) != 1:
            step += 1
        return step, int(words[0]) % self.size


@cache
def compositions(total: int, parts: int) -> tuple[Row, ...]:
    """Return every tuple of `parts` non-negative integers with the sum `total`, in descending order."""
    if parts == 1:
        return ((total,),)
    return tuple((first, *rest) for first in range(total, -1, -1) for rest in compositions(total - first, parts - 1))


@cache
def ordered_trees(rows: int) -> tuple[tuple[int, ...], ...]:
    """Return the parents of every ordered tree of `rows` rows, numbered in pre-order (Catalan(rows - 1) trees)."""
    if rows == 1:
        return ((-1,),)
    return tuple((*tree, parent) for tree in ordered_trees(rows - 1) for parent in _rightmost(tree))


def _rightmost(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The path from row 0 to the newest row: where the next row in pre-order may hang."""
    path = [len(parents) - 1]
    while path[-1]:
        path.append(parents[path[-1]])
    return tuple(reversed(path))


@cache
def children_of(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the children of each row in row order."""
    rows = range(len(parents))
    return tuple(tuple(child for child in rows if parents[child] == row) for row in rows)


def depth_of(parents: tuple[int, ...]) -> int:
    """Return the depth of the deepest row."""
    depth = [0] * len(parents)
    for row in range(1, len(parents)):
        depth[row] = depth[parents[row]] + 1
    return max(depth)


@cache
def blocks() -> tuple[Block, ...]:
    """Return every block of the domain, small trees first."""
    return tuple(
        Block(parents, vocab, den, draft)
        for rows in range(1, MAX_ROWS + 1)
        for parents in ordered_trees(rows)
        for vocab in range(1, (MAX_VOCAB if rows < MAX_ROWS else MAX_VOCAB_OF_LARGEST) + 1)
        if vocab ** (depth_of(parents) + 1) <= MAX_SEQUENCES
        for den in (DENOMINATORS if vocab < MAX_VOCAB else DENOMINATORS[:1])
        for draft in _drafts(rows)
    )


def _drafts(rows: int) -> tuple[Draft, ...]:
    return ("sampled", "fixed") if rows > 1 else ("fixed",)


def quotas(count: int) -> dict[Block, int]:
    """Share `count` configurations among the blocks: equal shares, small blocks whole, the rest to the larger ones.

    The shares add up to `count` exactly (or to the size of the domain, if that is smaller).
    """
    shares, left = {}, count
    by_size = sorted(blocks(), key=lambda block: block.size)
    for place, block in enumerate(by_size):
        shares[block] = min(block.size, left // (len(by_size) - place))
        left -= shares[block]
    return {block: shares[block] for block in blocks()}


def configurations(
    count: int = DEFAULT_COUNT, seed: int = SEED, part: int = 0, parts: int = 1
) -> Iterator[Configuration]:
    """Yield part `part` of `parts` of `count` different configurations, block by block; same arguments, same result."""
    for block, share in quotas(count).items():
        for number in block.numbers(share, seed, part, parts):
            yield block.configuration(number)


def describe(count: int) -> dict[str, object]:
    """Return the domain in words and numbers for a report over `count` configurations."""
    shares = quotas(count)
    whole = [block for block, share in shares.items() if share == block.size]
    size = sum(block.size for block in shares)
    trees = sum(len(ordered_trees(rows)) for rows in range(1, MAX_ROWS + 1))
    return {
        "trees": f"every ordered tree of 1..{MAX_ROWS} rows ({trees})",
        "vocabularies": f"1..{MAX_VOCAB} (1..{MAX_VOCAB_OF_LARGEST} for {MAX_ROWS} rows)",
        "rows": f"target and draft: an independent law for every prefix, every composition of {DENOMINATORS} over the "
        f"vocabulary (zeros, ties, point masses included; vocabulary {MAX_VOCAB}: {DENOMINATORS[0]} only)",
        "drafts": "sampled without replacement from the draft law (also laws with fewer tokens than siblings), or "
        "fixed (any tokens, duplicate siblings and tokens of target probability 0 included)",
        "blocks": len(shares),
        "blocks_whole": len(whole),
        "configurations": sum(shares.values()),
        "configurations_in_whole_blocks": sum(block.size for block in whole),
        "domain_size_log10": round(math.log10(size), 1),
        "seed": SEED,
    }
