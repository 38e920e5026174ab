"""Bad input has one family of exceptions; the command line turns it into exit code 2.

A traceback that is not one of these is a bug of ours.
"""

from __future__ import annotations


class InputError(ValueError):
    """Input that the toolkit refuses. The message says what was expected, what came, where, what to do."""


class TreeError(InputError):
    """A tree descriptor is malformed. Remedy: fix the row that the message names."""


class PathError(InputError):
    """An accepted path is not parent-linked, is empty, too long or leaves the tree."""


class ContractError(InputError):
    """Tensors do not have the shape, dtype, layout or finiteness that the contract demands."""


class BackendError(InputError):
    """A backend cannot be loaded or does not fit the protocol. Remedy: see `lumotree.backends.protocol`."""


class EnvelopeError(InputError):
    """An envelope is missing, damaged, edited, or was made for something else. Remedy: recalibrate."""


class ReportError(InputError):
    """A report cannot be written or read."""


class RequestError(InputError):
    """A generation request, or a state to restore, does not fit the model or the cache."""


class CapacityError(InputError):
    """No state slot or not enough pages are free. Remedy: wait for a request to finish, or make the cache larger."""


class DecodeError(InputError):
    """A forward left logits that nothing can be selected from; the message names request and cycle."""


class RecordError(InputError):
    """A recorded cycle is missing, damaged, foreign or out of sequence. Remedy: record the run again."""


#: What code that is not ours may raise: an exit too, whose code would be taken for ours.
ANYTHING: tuple[type[BaseException], ...] = (Exception, SystemExit)
