"""What a training run was asked for, and the shape of the shipped model."""

from __future__ import annotations

from dataclasses import dataclass

from lumotree.byte_tokens import END, VOCAB
from lumotree.model_config import FULL, LINEAR, ModelConfig

#: 5.7 million parameters: 11.4 MB in bf16. Value heads outnumber key heads and differ from them in size.
SHIPPED = ModelConfig(
    vocab=VOCAB,
    hidden=256,
    intermediate=448,
    layer_kinds=(LINEAR, LINEAR, LINEAR, FULL) * 2,
    hk=2,
    hv=8,
    dk=64,
    dv=32,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    rotary_dim=16,
    rope_theta=1e4,
    mtp_layers=1,
    eos=(END,),
)


@dataclass(frozen=True)
class Settings:
    """Optimisation. steps, or as many as fit into `seconds` if steps is 0; batch: windows of `length` tokens
    a step.

    rate: peak of AdamW's learning rate, after `warmup` steps linearly up and then a cosine down to a tenth of it;
    decay: of matrices. chained: steps of the MTP head, the later ones on `chained_windows` windows; draft_weight: of
    their mean loss beside the target's. every: steps between validations, of which the best weights are kept. graph:
    1 = replay a captured CUDA graph where there is a GPU.
    """

    steps: int = 0
    seconds: float = 230.0
    batch: int = 16
    length: int = 2048
    rate: float = 2e-3
    warmup: int = 200
    decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.1
    chained: int = 4
    chained_windows: int = 4
    draft_weight: float = 0.4
    every: int = 500
    seed: int = 1
    graph: int = 1
