"""The repair of Triton's interpreter: the defect is there without it, and bits equal torch's with it."""

import sys
import types

import numpy as np
import pytest
import torch

from lumotree.backends import interpreter
from lumotree.errors import BackendError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is used on machines without a GPU only"),
]
triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language")


@triton.jit
def to_bf16(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16))


@triton.jit
def arithmetic(a, b, product, total, quotient, smaller, less, chosen, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(product + at, x * y)
    tl.store(total + at, x + y)
    tl.store(quotient + at, (x.to(tl.float32) / y.to(tl.float32)).to(tl.bfloat16))
    tl.store(smaller + at, tl.minimum(x, y))
    tl.store(less + at, (x < y).to(tl.int32))
    tl.store(chosen + at, tl.where(at % 2 == 0, x, y))


@triton.jit
def widen_and_constant(a, wide, shifted, whole, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(a + at)
    tl.store(wide + at, x.to(tl.float32))
    tl.store(shifted + at, x + tl.full((N,), 1.5, tl.bfloat16))
    tl.store(whole + at, x.to(tl.int32))


@triton.jit
def dot(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def count_to(n, y):
    steps = 0
    for _ in range(tl.load(n)):
        steps += 1
    tl.store(y, steps)


@pytest.fixture
def repaired():
    assert interpreter.prepare()


@pytest.fixture
def unrepaired():
    interpreter.prepare()
    interpreter.undo_repair()
    yield
    interpreter.prepare()


def fp32_samples():
    """Every bf16 pattern (subnormals, infinities, NaNs, both zeros) under low halves around zero, tie and carry."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x4000, 0xC000], np.uint32)
    bits = (np.arange(2**16, dtype=np.uint32)[:, None] << 16) | low
    return torch.from_numpy(bits.reshape(-1).view(np.float32).copy())


def bf16_pairs(n=4096):
    g = torch.Generator().manual_seed(7)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, -2.5, 2.0**-126, 0.1])
    table = torch.cartesian_prod(special, special).bfloat16()
    rest = torch.randn(n - len(table), 2, generator=g) * 10 ** torch.randint(-6, 7, (n - len(table), 1), generator=g)
    a, b = torch.cat([table, rest.bfloat16()]).unbind(1)
    return a.contiguous(), b.contiguous()


def same_bits(x, y):
    """Equal bits; NaNs count as equal whatever their payload (torch's own casts do not agree on it)."""
    nan = x.isnan() & y.isnan()
    return bool((nan | (x.view(torch.int16) == y.view(torch.int16))).all())


def run_cast(x):
    y = torch.zeros(len(x), dtype=torch.bfloat16)
    to_bf16[(1,)](x, y, N=len(x))
    return y


def run_arithmetic(a, b):
    outs = {k: torch.zeros_like(a) for k in ("product", "total", "quotient", "smaller", "chosen")}
    less = torch.zeros(len(a), dtype=torch.int32)
    arithmetic[(1,)](a, b, outs["product"], outs["total"], outs["quotient"], outs["smaller"], less, outs["chosen"],
                     N=len(a))  # fmt: skip
    return outs | {"less": less}


def test_the_interpreter_truncates_without_the_repair(unrepaired):
    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-20, 1.0 + 3 * 2.0**-8])  # above a tie; a tie that goes up to even
    assert x.bfloat16().tolist() == [1.0078125, 1.015625]
    assert run_cast(x).tolist() == [1.0, 1.0078125]


def test_the_interpreter_multiplies_bit_patterns_without_the_repair(unrepaired):
    a = torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16()
    assert run_arithmetic(a, a)["product"].tolist() != [1.0, 4.0, 9.0, 16.0]


def test_cast_to_bf16_equals_torch(repaired):
    x = fp32_samples()
    got, want = run_cast(x), x.bfloat16()
    assert same_bits(got, want)
    assert got.isnan().sum() == x.isnan().sum() > 0
    assert (want != 0).logical_and(want.abs() < 2.0**-126).sum() > 0  # subnormal results were among them


def test_arithmetic_equals_torch(repaired):
    a, b = bf16_pairs()
    got = run_arithmetic(a, b)
    assert same_bits(got["product"], a * b)
    assert same_bits(got["total"], a + b)
    assert same_bits(got["quotient"], a / b)
    finite = ~(a.isnan() | b.isnan())
    assert torch.equal(got["smaller"][finite].float(), torch.minimum(a, b)[finite].float())
    assert torch.equal(got["less"].bool()[finite], (a < b)[finite])


def test_select_moves_bits_and_keeps_nan_payloads(repaired):
    a = torch.arange(0x7F80, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(run_arithmetic(a, a)["chosen"].view(torch.int16), a.view(torch.int16))


def test_widening_constants_and_integers(repaired):
    a = torch.tensor([-3.75, 0.5, 100.0, 2.0**-130]).bfloat16()
    wide, shifted, whole = torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int32)
    widen_and_constant[(1,)](a, wide, shifted, whole, N=4)
    assert torch.equal(wide, a.float())
    assert torch.equal(shifted, a + 1.5)
    assert whole.tolist() == [-3, 0, 100, 0]


def test_dot_of_bf16_accumulates_in_fp32(repaired):
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randint(-8, 9, (16, 16), generator=g).bfloat16() for _ in range(2))
    c = torch.zeros(16, 16)
    dot[(1,)](a, b, c, N=16)
    assert torch.equal(c, a.float() @ b.float())


def test_a_loaded_scalar_bounds_a_loop(repaired):
    y = torch.zeros(1, dtype=torch.int32)
    count_to[(1,)](torch.tensor([5], dtype=torch.int32), y)
    assert y.item() == 5


def test_prepare_is_idempotent(repaired):
    from triton.runtime.interpreter import InterpreterBuilder

    before = dict(vars(InterpreterBuilder))
    interpreter.prepare()
    assert dict(vars(InterpreterBuilder)) == before


def test_an_alias_of_a_builtin_works_once_wrapped(repaired):
    module = types.ModuleType("peer_with_alias")
    module.exp, module.other = tl.exp, 3
    one = tl.tensor(sys.modules["triton.runtime.interpreter"].TensorHandle(np.ones(4, np.float32), tl.float32),
                    tl.block_type(tl.float32, [4]))  # fmt: skip
    with pytest.raises(ValueError, match="_semantic"):
        module.exp(one)
    assert interpreter.wrap_builtin_aliases(module) == ["exp"]
    assert np.allclose(module.exp(one).handle.data, np.e)
    assert interpreter.wrap_builtin_aliases(module) == []


def test_compiling_triton_without_a_gpu_is_refused(monkeypatch):
    compiled = types.SimpleNamespace(sum=object())
    monkeypatch.setattr(interpreter, "_modules", lambda: (sys.modules["triton.runtime.interpreter"], compiled))
    with pytest.raises(BackendError, match=r"TRITON_INTERPRET=1.*before anything that imports triton"):
        interpreter.prepare()


def test_missing_triton_names_the_install_line(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(interpreter.importlib, "import_module", refuse)
    with pytest.raises(BackendError, match=r"pip install triton==3\.7\.1"):
        interpreter.prepare()


def test_nothing_happens_with_a_gpu(monkeypatch):
    monkeypatch.setattr(interpreter, "wanted", lambda: False)
    assert interpreter.prepare() is False
    module = types.ModuleType("peer")
    module.exp = tl.exp
    assert interpreter.wrap_builtin_aliases(module) == []
    assert module.exp is tl.exp
