"""Triton runs in its interpreter where there is no GPU; it looks at the environment when it is first imported."""

import os

import pytest
import torch

from audit import processes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def one_thread():
    """As the runs do: bits and times do not depend on the machine, and tiny operations do not wait for threads."""
    with processes.one_thread():
        yield
