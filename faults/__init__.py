"""Known defects as wrappers of any correct backend: the catalogue, and the positive controls of every audit."""

from collections import ChainMap

from faults import (
    arithmetic,
    batch,
    cycles,
    keys,
    native,
    operands,
    outputs,
    paths,
    publication,
    slots,
    stored,
    topology,
)
from faults.blind import BLIND
from faults.catalogue import Fault, Knob, by_id
from faults.reach import NEEDS, Scene
from faults.wrap import Faulty

_MODULES = (topology, paths, publication, batch, slots, stored, outputs, keys, native, operands, cycles, arithmetic)

#: Every fault of the component, by id. Those of samplers are in `faults.sampler`.
CATALOGUE: dict[str, Fault] = by_id(*(m.FAULTS for m in _MODULES))

#: The same and, behind them, those written blind, whose detection is reported apart. (A ChainMap goes through its
#: last map first.)
EVERY: ChainMap[str, Fault] = ChainMap(BLIND, CATALOGUE)

_CONTROLS = ("wrong_parent", "sibling_published", "swapped_rings", "stale_metadata", "poisoned_inactive")

#: The few that every run of the component audit injects into its own cases.
CONTROLS: dict[str, Fault] = {f.id: f for f in CATALOGUE.values() if f.kind in _CONTROLS or f in publication.FAULTS}

__all__ = ["BLIND", "CATALOGUE", "CONTROLS", "EVERY", "NEEDS", "Fault", "Faulty", "Knob", "Scene"]
