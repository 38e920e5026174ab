"""The small trained model that comes with the package: 5.7 million parameters over bytes, both layer kinds, MTP head.

How it was trained, and what it is worth: `reports/small-model/`; `lumotree.training` made it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

from lumotree.model import HybridModel, load_model


def shipped_folder() -> Path:
    """The folder of config.json and model.safetensors."""
    return Path(str(resources.files("lumotree").joinpath("weights")))


def shipped_model(device: torch.device | str = "cpu") -> HybridModel:
    """The model, its tokens those of `lumotree.byte_tokens`. Raises CheckpointError for a damaged installation."""
    return load_model(shipped_folder(), device)
