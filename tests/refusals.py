"""A pytest plugin that writes down every bad input which the tests show to be refused, with the message it gets.

    python -m pytest -p tests.refusals --refusals reports/refusals.md

Recorded are the refusals that a test demands with `pytest.raises`, and those that the command line prints. One line a
raise statement; statements that no test reached are listed below the table.
"""

from __future__ import annotations

import ast
import json
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("lumotree", "faults", "audit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refusals", default=None, metavar="FILE", help="write the table of refusals there")


class Recorder:
    """Appends what it sees to a file of JSON lines, one process beside the other."""

    def __init__(self, path: Path) -> None:
        self.path, self.test = path, ""

    def record(self, error: BaseException) -> None:
        from lumotree.errors import InputError

        if not isinstance(error, InputError):
            return
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _inside(f.filename)]
        if not frames:
            return
        where = Path(frames[-1].filename).resolve().relative_to(ROOT).as_posix()
        line = {"where": where, "line": frames[-1].lineno, "kind": type(error).__name__, "message": str(error),
                "test": self.test}  # fmt: skip
        with self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")


def _inside(filename: str) -> bool:
    path = Path(filename).resolve()
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--refusals")
    if not target:
        return
    path = Path(target).with_suffix(".jsonl").resolve()
    if not hasattr(config, "workerinput"):
        path.unlink(missing_ok=True)
    recorder = Recorder(path)
    config.pluginmanager.register(_Hooks(recorder), "refusals")
    _watch_raises(recorder)
    _watch_command(recorder)


class _Hooks:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.recorder.test = item.nodeid.partition("[")[0]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        target = Path(session.config.getoption("--refusals"))
        lines = self.recorder.path.read_text().splitlines() if self.recorder.path.exists() else []
        target.write_text(table([json.loads(line) for line in lines]))
        self.recorder.path.unlink(missing_ok=True)


def _watch_raises(recorder: Recorder) -> None:
    own = pytest.raises

    class Watching:
        def __init__(self, context: Any) -> None:
            self.context = context

        def __enter__(self) -> Any:
            return self.context.__enter__()

        def __exit__(self, kind: Any, error: Any, tb: Any) -> Any:
            if error is not None:
                recorder.record(error)
            return self.context.__exit__(kind, error, tb)

    def raises(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return Watching(found) if hasattr(found, "__enter__") else found

    pytest.raises = raises  # type: ignore[assignment]


def _watch_command(recorder: Recorder) -> None:
    from audit import cli

    own = cli._run

    def run(*args: Any) -> int:
        try:
            return own(*args)
        except Exception as error:
            recorder.record(error)
            raise

    cli._run = run


def raise_statements() -> dict[tuple[str, int], str]:
    """Where the packages raise an error of the family: (file, first line) and (file, line inside) -> its class."""
    from lumotree import errors

    family = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ValueError)}
    found = {}
    for path in sorted(p for top in PACKAGES for p in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in family:
                found[path.relative_to(ROOT).as_posix(), node.lineno] = call.func.id
    return found


def table(seen: list[dict[str, Any]]) -> str:
    """Markdown: one line a raise statement that a test reached, then those that none did."""
    first: dict[tuple[str, int], dict[str, Any]] = {}
    for line in seen:
        first.setdefault((line["where"], line["line"]), line)
    statements = raise_statements()
    unseen = [f"`{where}:{n}`" for where, n in statements if not _reached(where, n, first)]
    rows = [
        f"| {e['kind']} | {_cell(e['message'])} | `{where}` | `{e['test'].rpartition('/')[2]}` |"
        for (where, _), e in sorted(first.items())
    ]
    head = [
        "# What is refused, and in which words",
        "",
        "Made from the tests by `python -m pytest -p tests.refusals --refusals reports/refusals.md`: each line is a",
        "refusal that a test demands. The command line turns all of them into exit code 2.",
        "",
        "| error | message, as one test saw it | where | test |",
        "|---|---|---|---|",
    ]
    reached = len(statements) - len(unseen)
    tail = ["", f"{reached} of {len(statements)} raise statements were reached by a test that demands the refusal."]
    return "\n".join([*head, *rows, *tail, *_unseen(unseen)]) + "\n"


def _unseen(unseen: list[str]) -> Iterator[str]:
    if unseen:
        yield "Not reached in this run: " + ", ".join(unseen) + "."


def _reached(where: str, line: int, first: dict[tuple[str, int], dict[str, Any]]) -> bool:
    """A traceback names the line of the statement's first word, or one of the lines of its call."""
    return any(file == where and line <= at <= line + 8 for file, at in first)


def _cell(message: str) -> str:
    text = re.sub(r"/tmp/[^\s'\",;:)]*", "FILE", " ".join(message.split()))
    text = text if len(text) <= 240 else text[:237] + "..."
    return text.replace("|", "\\|").replace("<", "&lt;")
