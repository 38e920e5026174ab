"""Triton's CPU interpreter, made fit to judge bf16 kernels that other people wrote.

The interpreter keeps bf16 as uint16 bit patterns and gets two things wrong (seen in triton 3.6.0, 3.7.1 and 3.9.0):
a cast fp32 -> bf16 truncates where every GPU rounds to nearest even, and arithmetic on two bf16 tiles works on the
bit patterns (`1.0 * 1.0` is not 1.0). `prepare` repairs both by replacing the few methods of the interpreter's builder
through which all bf16 values pass, and lets triton 3.6 loop up to a scalar under numpy 2.4. A kernel's own arithmetic
in fp32 is left alone, also where it differs from a GPU's: `tl.fma` is two roundings, `tl.exp` is numpy's, a reduction
is numpy's sum.

Only for machines without a CUDA device: `prepare` does nothing when there is one.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lumotree.errors import BackendError

_MARK = "_lumotree_bf16_repair"
#: Builder methods that compute on the data of their operands; select and bitcast move bits and stay as they are.
_ARITHMETIC = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_dot", "create_fabs")


def wanted() -> bool:
    """Whether peers run in the interpreter here: there is no CUDA device."""
    return not torch.cuda.is_available()


def prepare() -> bool:
    """Select and repair the interpreter; returns whether it is in use. Idempotent; call before a kernel is loaded.

    Raises BackendError when triton is missing, or was already imported in compiling mode on a machine without a GPU
    (its own library is then compiled code, which cannot be changed afterwards).
    """
    if not wanted():
        return False
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    interpreter, language = _modules()
    if not isinstance(language.sum, interpreter.InterpretedFunction):
        raise BackendError(
            "triton was imported before its interpreter was selected, and there is no CUDA device. Remedy: set "
            "TRITON_INTERPRET=1 in the environment, or load this backend before anything that imports triton"
        )
    # Kernels are decorated when their module is loaded, which comes after this call: they must see the switch.
    os.environ["TRITON_INTERPRET"] = "1"
    repair(interpreter, language)
    return True


def _modules() -> tuple[Any, Any]:
    try:
        return importlib.import_module("triton.runtime.interpreter"), importlib.import_module("triton.language")
    except ImportError as cause:
        raise BackendError(
            "Triton kernels need the package triton, which cannot be imported. Install it with: "
            "pip install triton==3.7.1 (the version that goes with torch 2.13.0)"
        ) from cause


# The two conversions. Bits in, bits out.


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the bf16 nearest to each fp32 value, ties to even; any NaN becomes the quiet NaN 0x7FC0."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(np.shape(values))
    # uint64: adding to 0xFFFFFFFF must not wrap before NaNs are replaced below.
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def widen_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The fp32 value of each bf16; exact, NaN payloads and signed zeros kept."""
    wide = np.ascontiguousarray(bits).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(np.shape(bits))


# The repair of the builder


def repair(interpreter: Any, language: Any) -> None:
    """Replace the faulty methods of `triton.runtime.interpreter.InterpreterBuilder`; a second call does nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, _MARK, None) is not None:
        return
    originals: dict[str, Any] = {}
    for name in _ARITHMETIC:
        originals[name] = getattr(builder, name)
        setattr(builder, name, _in_fp32(originals[name], interpreter, language))
    originals["cast_impl"] = builder.cast_impl
    builder.cast_impl = _cast(builder.cast_impl, interpreter, language)
    originals["create_fp_to_fp"] = builder.create_fp_to_fp
    builder.create_fp_to_fp = _fp_to_fp(builder.create_fp_to_fp, interpreter, language)
    if not hasattr(builder, "get_bf16"):  # bf16 constants, which the interpreter cannot make at all

        def get_bf16(self: Any, value: float) -> Any:
            return interpreter.TensorHandle(round_to_bf16(np.array([value], np.float32)), language.bfloat16)

        originals["get_bf16"] = None
        builder.get_bf16 = get_bf16
    setattr(builder, _MARK, originals)
    if not getattr(interpreter._patch_lang_tensor, _MARK, False):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def undo_repair() -> None:
    """Put the interpreter's own methods back (for the test that shows the defect)."""
    builder = _modules()[0].InterpreterBuilder
    for name, original in (getattr(builder, _MARK, None) or {}).items():
        if original is None:
            delattr(builder, name)
        else:
            setattr(builder, name, original)
    setattr(builder, _MARK, None)


def _is_bf16(handle: Any, language: Any) -> bool:
    return bool(getattr(getattr(handle, "dtype", None), "scalar", None) == language.bfloat16)


def _widened(handle: Any, interpreter: Any, language: Any) -> Any:
    if not _is_bf16(handle, language):
        return handle
    return interpreter.TensorHandle(widen_bf16(handle.data), language.float32)


def _in_fp32(original: Callable[..., Any], interpreter: Any, language: Any) -> Callable[..., Any]:
    """Run a builder method with bf16 operands widened to fp32; the result is rounded back to bf16 once.

    fp32 carries more than twice the bits of bf16, so rounding twice equals rounding once for one operation
    (not for fma and dot, whose fp32 sum is rounded before). A dot with an fp32 accumulator stays fp32.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        operands = [a for a in args if _is_bf16(a, language)]
        # np.where only moves bits; it must keep NaN payloads.
        if not operands or np.where in args:
            return original(self, *args, **kwargs)
        wide = [_widened(a, interpreter, language) for a in args]
        result = original(self, *wide, **kwargs)
        accumulates = original.__name__ == "create_dot" and not _is_bf16(args[2], language)
        if accumulates or result.data.dtype != np.float32:
            return result
        return interpreter.TensorHandle(round_to_bf16(result.data), language.bfloat16)

    return method


def _cast(original: Callable[..., Any], interpreter: Any, language: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        to_bf16 = dst_type.scalar == language.bfloat16
        if to_bf16 and _is_bf16(src, language):
            return src
        src = _widened(src, interpreter, language)
        if not to_bf16:
            return original(self, src, dst_type)
        return interpreter.TensorHandle(round_to_bf16(src.data.astype(np.float32)), language.bfloat16)

    return cast_impl


def _fp_to_fp(original: Callable[..., Any], interpreter: Any, language: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        nearest = rounding_mode is None or "RTNE" in str(rounding_mode)
        pair = {src.dtype.scalar, dst_type.scalar}
        if pair == {language.float32, language.bfloat16} and nearest:
            return self.cast_impl(src, dst_type)
        return original(self, src, dst_type, rounding_mode)

    return create_fp_to_fp


def _with_index(original: Callable[..., None]) -> Callable[..., None]:
    """Let a scalar be a loop bound: triton 3.6 calls int() on an array of one element, which numpy 2.4 refuses."""

    @functools.wraps(original)
    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    setattr(patch_lang_tensor, _MARK, True)
    return patch_lang_tensor


# Aliases of builtins in a peer's module


def wrap_builtin_aliases(module: ModuleType) -> list[str]:
    """Make module-level aliases such as `exp = tl.exp` callable in the interpreter; returns the names wrapped.

    The interpreter replaces builtins only inside `triton.language`; an alias still holds the raw builtin, which
    refuses to run outside the compiler. Does nothing when the interpreter is not in use.
    """
    if not wanted():
        return []
    interpreter, language = _modules()
    names = [n for n, v in vars(module).items() if callable(v) and language.core.is_builtin(v)]
    for name in names:
        setattr(module, name, _with_semantic(getattr(module, name), interpreter.interpreter_semantic))
    return names


def _with_semantic(builtin: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    @functools.wraps(builtin)
    def call(*args: Any, **kwargs: Any) -> Any:
        return builtin(*args, **{**kwargs, "_semantic": semantic})

    # is_builtin looks for this mark; a wrapped alias is an ordinary function.
    call.__dict__.pop("__triton_builtin__", None)
    return call
