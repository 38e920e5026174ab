"""The benchmark of the selection rules runs every rule and counts the shared part once; its speed is not tested."""

from __future__ import annotations

from audit.bench_select import seconds, table
from lumotree.select import RULES


def test_every_rule_is_timed() -> None:
    spent = seconds(walks=64, steps=1, vocab=64)
    assert set(spent) == {"shared", *RULES}
    assert all(s > 0 for s in spent.values())


def test_the_shared_part_is_added_to_each_rule_and_has_no_line_of_its_own() -> None:
    assert table({"shared": 1.0, "greedy": 0.25}).splitlines()[1:] == ["greedy            0.25    1.25"]
