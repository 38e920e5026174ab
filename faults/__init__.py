"""Known defects as wrappers of any correct backend: the positive controls of every audit."""

from faults import batch, publication, topology
from faults.catalogue import Fault, Faulty

#: Every fault of the catalogue, by id.
CATALOGUE: dict[str, Fault] = {f.id: f for f in [*topology.FAULTS, *publication.FAULTS, *batch.FAULTS]}

__all__ = ["CATALOGUE", "Fault", "Faulty"]
