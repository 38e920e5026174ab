"""Random weights for any configuration: for tests and benchmarks, where arithmetic matters and text does not."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.model_config import ModelConfig


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of `config.parameters()`, in its first dtype.

    Projections have unit gain; norms and gates are spread around the values that training leaves them near. No tensor
    is at a neutral value, so that one that is ignored or misread shows.
    """
    gen = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=gen)
        if name.endswith("linear_attn.norm.weight"):
            return 1 + 0.2 * x
        if name.endswith("linear_attn.dt_bias"):
            return 0.5 * x - 2  # decays between about 0.7 and 0.97: states remember a few dozen tokens
        if name.endswith("linear_attn.A_log"):
            return 0.5 * x
        return 0.2 * x if len(shape) == 1 else x * shape[-1] ** -0.5

    return {name: draw(name, p.shape).to(p.dtypes[0]) for name, p in config.parameters().items()}
