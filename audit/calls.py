"""Calls into the backend under audit: whatever a stranger's method raises is a message about it, not a bug of ours."""

from __future__ import annotations

import traceback
from typing import Any

from lumotree.errors import ANYTHING, BackendError, InputError


def call(backend: Any, method: str, case: str, *args: Any) -> Any:
    """Call a method of the backend. Refusals (InputError) pass; anything else becomes a BackendError naming the method,
    the case and the line that raised, also an exit: a kernel that ends the run has passed nothing."""
    try:
        return getattr(backend, method)(*args)
    except InputError:
        raise
    except ANYTHING as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise BackendError(
            f"case {case}: {method} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error
