"""Adapter for the pure torch GDN recurrence of transformers (read and tested: transformers 5.24.0).

`torch_recurrent_gated_delta_rule` is what a cached model runs for one token. It knows chains only; over a tree every
active row is one call at T = 1 from its parent's state. Gates are formed as `Qwen3_5GatedDeltaNet.forward` forms
them. Its convolution is not adapted: it rounds the pre-activation to bf16, which is no variant of the contract.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.backends import peer_loading
from lumotree.backends.peer_rows import WalkedBackend
from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract
from lumotree.errors import BackendError

_MODULES = ("transformers.models.qwen3_5.modeling_qwen3_5", "transformers.models.qwen3_next.modeling_qwen3_next")
_FUNCTION = "torch_recurrent_gated_delta_rule"


class TransformersBackend(WalkedBackend):
    """transformers' own one-token rule, without kernel dispatch. Raises BackendError when transformers is missing."""

    name = "transformers"
    contract = Contract(
        layout="KV", beta="bf16", norm="rsqrt", softplus="log1p", head_map="grouped", carry="fp32", claims="bitwise"
    )

    def __init__(self) -> None:
        peer_loading.require(self.name)
        self._rule = _recurrent_rule()

    def step(self, ops: GdnOps, states: Tensor) -> tuple[Tensor, Tensor]:
        """One call a row: torch's sigmoid and softplus give other bits at other places of a larger tensor."""
        outputs = torch.empty_like(ops.v)
        after = torch.empty_like(states)
        group = ops.v.shape[1] // ops.q.shape[1]
        for i in range(ops.v.shape[0]):
            # Versions before grouped heads want q and k repeated; newer ones leave equal head counts alone.
            q, k = (x[i].repeat_interleave(group, dim=0)[None, None] for x in (ops.q, ops.k))
            beta = ops.b[i].sigmoid()
            g = -ops.A_log.float().exp() * F.softplus(ops.a[i].float() + ops.dt_bias)
            o, state = self._rule(
                q, k, ops.v[i][None, None], g=g[None, None], beta=beta[None, None], initial_state=states[i][None],
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            outputs[i], after[i] = o[0, 0], state[0]
        return outputs, after


def _recurrent_rule() -> Any:
    """The undecorated rule of the newest family that this version has."""
    problems = []
    for name in _MODULES:
        try:
            module = peer_loading.import_peer("transformers", name)
            return inspect.unwrap(peer_loading.attribute("transformers", module, _FUNCTION))
        except BackendError as problem:
            problems.append(str(problem))
    raise BackendError("; ".join(problems))
