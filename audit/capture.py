"""A backend under captured CUDA graphs: captured once for each shape, replayed with other trees, slots and lengths.

Serving engines capture verification once and replay it every cycle. A kernel that allocates lazily, synchronises with
the host or bakes a cycle's metadata into the launch passes every eager test and fails here (design-failures 25).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from audit.guard import tensors_of
from lumotree.backends.protocol import Limits
from lumotree.contract import Dims
from lumotree.errors import BackendError

_METHODS = ("gdn_verify", "gdn_publish", "conv_verify", "conv_publish", "attention_verify", "kv_publish")
_WARMUPS = 2


def _static(nest: Any) -> Any:
    """A copy of an argument whose tensors have addresses of their own."""
    if isinstance(nest, Tensor):
        return nest.clone()
    if is_dataclass(nest) and not isinstance(nest, type):
        return replace(nest, **{k: _static(v) for k, v in vars(nest).items()})
    return nest


def _signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    shapes = [(name, tuple(t.shape), t.dtype) for name, t in tensors_of(list(args)).items()]
    plain = [tuple(a) if isinstance(a, list) else a for a in args if isinstance(a, int | list | tuple)]
    return (*shapes, *plain)


class Captured:
    """Wraps a graph-safe backend; every verify and publish call is a replay of a graph captured for its shapes.

    Arguments are copied into the graph's own tensors before a replay and back afterwards, so the caller sees the same
    in-place effects. `captures` and `replays` count what happened.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.captures = self.replays = 0
        self._workspaces: dict[tuple[Dims, Limits], Any] = {}
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, list[Any]]] = {}
        for name in _METHODS:
            if callable(getattr(inner, name, None)):
                setattr(self, name, self._replaying(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Any:
        """One workspace for all cases of a size: the graphs hold its addresses."""
        key = (dims, limits)
        if key not in self._workspaces:
            self._workspaces[key] = self.inner.allocate(dims, limits, device)
        return self._workspaces[key]

    def _replaying(self, name: str) -> Callable[..., None]:
        def method(*args: Any) -> None:
            ws = next(a for a in args if any(a is w for w in self._workspaces.values()))
            rest = tuple(a for a in args if a is not ws)
            key = (name, id(ws), *_signature(rest))
            if key not in self._graphs:
                self._graphs[key] = self._capture(name, args, ws)
                self.captures += 1
            graph, static = self._graphs[key]
            _copy(list(rest), static)
            graph.replay()
            self.replays += 1
            _copy(static, list(rest))

        return method

    def _capture(self, name: str, args: tuple[Any, ...], ws: Any) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        static_args = [a if a is ws else _static(a) for a in args]
        saved = {k: t.clone() for k, t in tensors_of(ws).items()}
        call = getattr(self.inner, name)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                call(*static_args)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call(*static_args)
        except RuntimeError as error:
            raise BackendError(
                f"{name}: cannot be captured in a CUDA graph although the contract says graph_safe=True: {error}"
            ) from error
        for key, tensor in tensors_of(ws).items():  # warm-up ran on arguments that are gone
            tensor.copy_(saved[key])
        return graph, [a for a in static_args if a is not ws]


def _copy(source: list[Any], target: list[Any]) -> None:
    to = tensors_of(target)
    for name, tensor in tensors_of(source).items():
        to[name].copy_(tensor)


def captured(backend: Any) -> Captured:
    """The backend under captured graphs. Raises BackendError without a GPU or when it does not declare graph_safe."""
    if not torch.cuda.is_available():
        raise BackendError("--graph: expected an NVIDIA GPU, found none")
    if not backend.contract.graph_safe:
        raise BackendError("--graph: the backend's contract says graph_safe=False; it does not claim to be capturable")
    return Captured(backend)
