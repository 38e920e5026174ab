"""The cycle over the Triton backend, interpreted where there is no GPU: a few tokens of a tiny model."""

import torch

from lumotree.backends.triton_backend import TritonBackend
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.draft import drafter
from lumotree.model import HybridModel
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.plain import PlainDecoder
from lumotree.random_weights import random_weights
from lumotree.requests import Request
from lumotree.sampling import SamplingParams
from lumotree.slots import Capacity

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = ModelConfig(
    vocab=30, hidden=24, intermediate=32, layer_kinds=(LINEAR, FULL), hk=1, hv=2, dk=8, dv=4, q_heads=2, kv_heads=1,
    head_dim=16, rotary_dim=4, mtp_layers=1, positions=64,
)  # fmt: skip


def test_trees_on_triton_leave_what_its_own_steps_leave():
    backend = TritonBackend()
    model = HybridModel(CONFIG, random_weights(CONFIG), DEVICE)
    stack = Stack(model, backend, model.draft_head(backend))
    sampled = SamplingParams(temperature=1.0)
    requests = [
        Request(0, (3, 1, 4), 4, drafter=drafter("comb:2")),
        Request(1, (2, 7), 3, sampled, drafter("star:4-sampled"), seed=2),
    ]
    decoder = Decoder(stack, Capacity(2, 8, rows=4, page_size=4))
    for request in requests:
        decoder.admit(request)
    while any(state.finished is None for state in decoder.running.values()):
        decoder.cycle()
    outputs = [decoder.running[r.number].output for r in requests]
    results = PlainDecoder(stack, requests, outputs).run()
    for request, result in zip(requests, results, strict=True):
        assert result.differs == ()
        assert decoder.surfaces(request.number).differences(result.surfaces) == []
