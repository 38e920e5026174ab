"""Progress of a long loop: a live bar on a terminal, a plain line now and then in a log, silence for short runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

#: Seconds before anything is shown, and between two plain lines.
QUIET_S = 2.0
EVERY_S = 5.0
#: Share of the steps that must be done before the time that is left is estimated.
TELLING = 0.1


class Progress:
    """Context manager around a loop of `total` steps; writes to standard error unless a console is given.

    with Progress(48, "held-out") as progress:
        for layer in layers:
            ...
            progress.advance(note="layer 3")
    """

    def __init__(
        self,
        total: int,
        label: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._total, self._label, self._clock = total, label, clock
        self._done = 0
        self._started = self._last = clock()
        self._live = self._console.is_terminal and not self._console.no_color and not self._console.is_dumb_terminal
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        self._started = self._last = self._clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count `steps` as done and show it if it is time to; `note` says what is at hand."""
        self._done += steps
        now = self._clock()
        if now - self._started < QUIET_S:
            return
        if self._live:
            self._draw(note)
        elif self._last == self._started or now - self._last >= EVERY_S:
            self._last = now
            self._print_line(now - self._started, note)

    def _draw(self, note: str) -> None:
        if self._bar is None:
            columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            text = TextColumn("{task.description}", markup=False)
            self._bar = RichProgress(text, BarColumn(), *columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total)
        if self._task is not None:
            self._bar.update(self._task, completed=self._done, description=f"{self._label} {note}".strip())

    def _print_line(self, elapsed: float, note: str) -> None:
        line = f"{self._label}: {self._done}/{self._total}, {elapsed:.0f} s"
        # The longest pieces come first: from a few of them the rest would look many times longer than it is.
        if self._done >= max(2, TELLING * self._total):
            line += f", about {elapsed / self._done * (self._total - self._done):.0f} s left"
        text = f"{line}, {note}" if note else line
        self._console.print(text, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
