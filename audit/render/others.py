"""The comparison with other projects' rules as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from audit.others import RULES, Comparison


def print_comparison(c: Comparison, console: Console | None = None) -> None:
    """One line a rule: faults caught, right runs flagged."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_edge=False, header_style="bold")
    table.add_column("rule")
    table.add_column("from", overflow="fold")
    table.add_column(f"caught of {len(c.faults)}", justify="right")
    table.add_column(f"flagged of {c.clean} right", justify="right")
    for name, (origin, _) in RULES.items():
        table.add_row(name, origin, str(len(c.caught[name])), str(c.alarms[name]))
    table.add_row("this audit", "component checks", str(c.ours), "-")
    (console or Console()).print(table)
