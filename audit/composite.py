"""Any backend for any surface: one backend put together from several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lumotree.backends.mixed import MixedBackend
from lumotree.backends.protocol import SURFACES, covered_surfaces
from lumotree.errors import BackendError


class Composite(MixedBackend):
    """Serves each surface with its own backend, verification, publication and one-token step alike; a backend that
    serves several is named once, and graphs are never captured.

    parts: surface -> backend, all surfaces of `SURFACES`. Raises BackendError for a part that lacks the surface.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        for surface, backend in parts.items():
            if not all(covered_surfaces(backend)[surface]) or not callable(getattr(backend, "native_step", None)):
                raise BackendError(
                    f"backend {getattr(backend, 'name', backend)!r} cannot serve {surface}: expected "
                    f"{', '.join(SURFACES[surface])} and native_step"
                )
        super().__init__(**parts)
        self.name = "+".join(dict.fromkeys(str(getattr(b, "name", "?")) for b in parts.values()))
        self.contract = replace(self.contract, graph_safe=False)
