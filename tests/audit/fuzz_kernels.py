"""Kernels as a user has them in a module, for the tests of the fuzz audit."""

#: Right at the first publication of a request, one row short at every later one.
LATE = """
from dataclasses import replace
from lumotree.backends.torch_backend import TorchBackend

class Kernel(TorchBackend):
    def conv_publish(self, pool, batch, accepted, ws, layers):
        late = (batch.prefix_len >= 2) & (accepted.length > 1)
        super().conv_publish(pool, batch, replace(accepted, length=accepted.length - late.int()), ws, layers)
"""
