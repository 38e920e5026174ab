"""Per-cell results as one pandas frame, saved beside a report."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

#: Columns of every frame, in this order; a record may leave out the indices that do not apply, and may add columns.
COLUMNS = ("case", "set", "instance", "surface", "request", "layer", "row", "head", "statistic", "value")
_REQUIRED = ("case", "surface", "statistic", "value")
_INDICES = ("set", "instance", "request", "layer", "row", "head")

#: Every name that a saved frame can have, so that a stale one can be found.
FRAME_FILES = ("cells.parquet", "cells.csv.gz")


def cells_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one line per record; indices become nullable integers. Raises KeyError for a record without a value."""
    import pandas as pd  # a quarter of a second, which commands and workers without a frame do without

    rows = list(records)
    for row in rows:
        missing = [name for name in _REQUIRED if name not in row]
        if missing:
            raise KeyError(f"cells: expected {', '.join(_REQUIRED)} in every record, missing {', '.join(missing)}")
    frame = pd.DataFrame.from_records(rows)
    extra = [name for name in frame.columns if name not in COLUMNS]
    frame = frame.reindex(columns=[*COLUMNS, *extra])
    return frame.astype(dict.fromkeys(_INDICES, "Int64"))


def frame_bytes(frame: pd.DataFrame) -> tuple[str, bytes]:
    """Return file name and content: Parquet where pyarrow is installed, else gzip-compressed CSV (reproducible)."""
    buffer = io.BytesIO()
    if importlib.util.find_spec("pyarrow") is not None:
        frame.to_parquet(buffer, index=False)
        return FRAME_FILES[0], buffer.getvalue()
    frame.to_csv(buffer, index=False, compression={"method": "gzip", "mtime": 0})
    return FRAME_FILES[1], buffer.getvalue()
