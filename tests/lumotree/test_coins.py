"""Coins are a pure function of their address, and the generator is the published one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lumotree import coins as module
from lumotree.coins import Purpose, coins_for, draft_coins, philox4x32, uniforms
from lumotree.errors import InputError

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN_ANSWERS = [  # Random123, tests/kat_vectors, philox4x32 10
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_generator_gives_the_published_answers(counter: tuple, key: tuple, answer: tuple) -> None:
    before = words(*counter)
    assert tuple(int(word[0]) for word in philox4x32(before, key)) == answer
    assert [int(word[0]) for word in before] == list(counter)


def test_a_coin_is_the_block_at_its_address() -> None:
    seed, request, cycle, row = 0x299F31D0A4093822, (5 << 32) + 7, 9, 3
    key, head = (0xA4093822, 0x299F31D0), (7, 5, 9)
    for purpose, block, first in ((Purpose.ACCEPT, 0, 0), (Purpose.RESIDUAL, 0, 2), (Purpose.DRAFT, 1, 0)):
        out = [int(word[0]) for word in philox4x32(words(*head, row * 256 + block), key)]
        want = ((out[first + 1] << 32 | out[first]) >> 11) * 2.0**-53
        assert uniforms(seed, [request], cycle, row, purpose)[0] == want


def test_coins_do_not_depend_on_the_batch_or_the_rows_asked_for() -> None:
    whole = coins_for(1, range(40_000), 2, 5)
    order = [39_999, 7, 32_768, 0]
    some = coins_for(1, torch.tensor(order), 2, 5, rows=[4, 1])
    for name in ("accept", "residual"):
        assert torch.equal(getattr(some, name)[:, [1, 4]], getattr(whole, name)[order][:, [1, 4]])
        assert not getattr(some, name)[:, [0, 2, 3]].any()
    assert torch.equal(draft_coins(1, order, 2, 5, rows=[3])[:, 3], draft_coins(1, range(40_000), 2, 5)[order, 3])
    assert np.array_equal(uniforms(1, order, 2, 4, Purpose.RESIDUAL), some.residual[:, 4].numpy())
    fewer = coins_for(1, range(10_000), 2, 5)  # three rows at a time, then two
    assert torch.equal(fewer.accept, whole.accept[:10_000]) and torch.equal(fewer.residual, whole.residual[:10_000])


def test_every_part_of_the_address_changes_the_coins() -> None:
    base = {"seed": 1, "requests": [2], "cycle": 3, "row": 4, "purpose": Purpose.ACCEPT}
    others = [
        {"seed": 2}, {"seed": 1 + (1 << 32)}, {"requests": [3]}, {"requests": [2 + (1 << 32)]}, {"cycle": 4},
        {"row": 5}, {"purpose": Purpose.RESIDUAL}, {"purpose": Purpose.DRAFT},
    ]  # fmt: skip
    assert len({float(uniforms(**{**base, **other})[0]) for other in [{}, *others]}) == len(others) + 1


def test_coins_reach_zero_and_the_largest_float_below_one_but_never_one() -> None:
    ones = np.full(1, 0xFFFFFFFF, np.uint64)
    assert module._to_unit(ones, ones)[0] == 1 - 2.0**-53 == np.nextafter(1, 0)
    assert module._to_unit(ones & np.uint64(0x7FF), ones * np.uint64(0))[0] == 0


def test_coins_are_uniform_and_the_purposes_unrelated() -> None:
    coins, drafts = coins_for(5, range(50_000), 0, 3), draft_coins(5, range(50_000), 0, 3)
    columns = torch.cat([coins.accept, coins.residual, drafts], dim=1).numpy()
    counts = np.stack([np.histogram(column, 20, (0, 1))[0] for column in columns.T])
    assert (((counts - 2500) ** 2 / 2500).sum(axis=1) < 60).all()  # chi-square with 19 degrees, level below 1e-5
    correlation = np.corrcoef(columns.T) - np.eye(9)
    assert np.abs(correlation).max() < 5 / np.sqrt(50_000)
    assert np.abs(np.corrcoef(columns[1:, 0], columns[:-1, 0])[0, 1]) < 5 / np.sqrt(50_000)


def test_no_request_gives_no_coins() -> None:
    assert coins_for(0, [], 0, 4).accept.shape == (0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, [0], 0, 1), r"coins: seed -1 is out of range; allowed: 0\.\.18446744073709551615"),
        ((1 << 64, [0], 0, 1), "coins: seed 18446744073709551616 is out of range"),
        ((0, [-3], 0, 1), r"coins: request -3 is out of range; allowed: 0\.\.2\^63-1"),
        ((0, [0.5], 0, 1), r"coins: requests must be integers \[W\], got float64 with shape \(1,\)"),
        ((0, [0], 1 << 32, 1), r"coins: cycle 4294967296 is out of range; allowed: 0\.\.4294967295"),
        ((0, [0], 1.5, 1), r"coins: cycle must be an integer, got 1\.5"),
        ((0, [0], 0, 1 << 24), "coins: rows 16777216 is out of range"),
    ],
)
def test_addresses_out_of_range_are_refused_by_value(arguments: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        coins_for(*arguments)
