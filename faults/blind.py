"""The tenth of the catalogue that was written after the checks, by somebody who had not read them.

Their detection is reported apart. They are not changed after their result is known.
"""

from __future__ import annotations

from faults import blind_cycles, blind_math, blind_publish, blind_rows
from faults.catalogue import Fault, by_id

_MODULES = (blind_rows, blind_math, blind_publish, blind_cycles)

#: Every fault written blind, by id.
BLIND: dict[str, Fault] = by_id(*(m.FAULTS for m in _MODULES))
