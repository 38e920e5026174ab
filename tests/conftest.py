"""Triton runs in its interpreter where there is no GPU; it looks at the environment when it is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
