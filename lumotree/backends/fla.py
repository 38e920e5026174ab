"""Adapter for flash-linear-attention's recurrent GDN kernel (read and tested: fla-core 0.6.0).

`fused_recurrent_gated_delta_rule` with its gates formed in the kernel. It knows chains only; over a tree the rows of
one depth are so many sequences of one token each, every one starting from its parent's state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.backends import interpreter, peer_loading
from lumotree.backends.peer_rows import WalkedBackend
from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract


class FlaBackend(WalkedBackend):
    """fla's one-token rule. Raises BackendError when fla-core or triton is missing."""

    name = "fla"
    contract = Contract(
        layout="KV", beta="fp32", norm="sqrt", softplus="log_exp", head_map="grouped", carry="fp32", claims="bitwise"
    )

    def __init__(self) -> None:
        peer_loading.require(self.name)
        self.interpreted = interpreter.prepare()
        module = peer_loading.import_peer(self.name, "fla.ops.gated_delta_rule.fused_recurrent")
        interpreter.wrap_builtin_aliases(module)
        # The function below the autograd wrapper: same kernel, no input guard that wants a CUDA context.
        self._rule = peer_loading.attribute(self.name, module, "fused_recurrent_gated_delta_rule_fwd")

    def step(self, ops: GdnOps, states: Tensor) -> tuple[Tensor, Tensor]:
        """n rows are a batch `[n, 1, ...]`; programs share nothing, so that n changes no bits."""
        outputs, after = self._rule(
            q=ops.q[:, None].contiguous(), k=ops.k[:, None].contiguous(), v=ops.v[:, None].contiguous(),
            g=ops.a[:, None].contiguous(), beta=ops.b[:, None].contiguous(), A_log=ops.A_log, dt_bias=ops.dt_bias,
            scale=ops.q.shape[-1] ** -0.5, initial_state=states.contiguous().to(torch.float32),
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return outputs[:, 0], after
