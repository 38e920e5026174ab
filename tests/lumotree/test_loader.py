"""Finding backends, and the message for everything that can be wrong with one."""

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lumotree.backends import loader
from lumotree.backends.bank import BankBackend
from lumotree.backends.loader import ARGUMENTS, BUILTIN, backend_maker, check_backend, known_backends, load_backend
from lumotree.backends.protocol import BackendBase
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import BackendError, ContractError

MODULE = """
from lumotree.backends.protocol import BackendBase
class Good(BackendBase):
    def conv_verify(self, ops, pool, batch, ws, out, layer): ...
    def conv_publish(self, pool, batch, accepted, ws, layers): ...
    def native_step(self, *arguments): ...
class Broken(Good):
    def __init__(self):
        raise RuntimeError("no GPU here")
class Holder:
    inner = Good
instance = Good()
def make():
    return Good()
def needs(argument):
    return Good()
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with modules in it; sys.path is put back afterwards."""
    (tmp_path / "my_kernel_module.py").write_text(MODULE)
    (tmp_path / "my_bad_module.py").write_text("raise OSError('libcuda.so not found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_kernel_module", raising=False)
    return tmp_path


class Methods(BackendBase):
    """A backend that fits."""

    def conv_verify(self, ops: Any, pool: Any, batch: Any, ws: Any, out: Any, layer: Any) -> None: ...
    def conv_publish(self, pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None: ...
    def native_step(self, ops: Any, pools: Any, batch: Any, out: Any, layer: Any) -> None: ...


@pytest.mark.parametrize("name", ["torch", "reference", "bank", "split_k", "sqrt_norm", "kv_layout", "wy"])
def test_builtin_names(name: str) -> None:
    backend = load_backend(name)
    assert backend.name == name
    assert isinstance(backend.contract, Contract)


def test_builtin_table_names_existing_modules() -> None:
    import importlib.util

    for target in BUILTIN.values():
        assert importlib.util.find_spec(target.partition(":")[0]) is not None, target
    assert set(BUILTIN) <= set(known_backends())


IN_TRITON = [
    name for name, target in BUILTIN.items()
    if "import triton\n" in Path(find_spec(target.partition(":")[0]).origin).read_text(encoding="utf-8")  # type: ignore[union-attr,arg-type]
]  # fmt: skip


@pytest.mark.parametrize("name", ["triton", *IN_TRITON])
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is interpreted")
def test_a_triton_backend_chooses_the_interpreter_by_itself(name: str) -> None:
    code = f"from lumotree.backends.loader import load_backend; print(load_backend({name!r}).interpreted)"
    free = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=free, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("path", ["Good", "instance", "make", "Holder.inner"])
def test_module_object_from_the_current_directory(here: Path, path: str) -> None:
    assert type(load_backend(f"my_kernel_module:{path}")).__name__ == "Good"


def test_a_maker_is_checked_once_and_makes_another_each_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = backend_maker("torch")
    monkeypatch.setattr(loader, "check_backend", lambda *args: pytest.fail("checked again"))
    one, two = make(), make()
    assert isinstance(one, TorchBackend) and type(two) is TorchBackend and one is not two
    monkeypatch.undo()
    with pytest.raises(BackendError, match="is unknown"):
        backend_maker("nope")


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", "lumotree.backends.bank:BankBackend", loader.ENTRY_POINTS)
    monkeypatch.setattr(loader, "entry_points", lambda group: [point])
    assert isinstance(load_backend("mine"), BankBackend)
    assert "mine" in known_backends()


def test_contract_fields_can_be_replaced() -> None:
    backend = load_backend("split_k", layout="KV")
    assert (backend.contract.layout, backend.contract.claims) == ("KV", "algebra")
    assert load_backend("torch", state_dtype=torch.bfloat16, carry="bf16").contract.carry == "bf16"
    with pytest.raises(ContractError, match="layout='VV'"):
        load_backend("torch", layout="VV")
    with pytest.raises(BackendError, match=r"not a field of the contract.*colour"):
        load_backend("torch", colour="red")


def test_contract_of_an_instance_or_a_plain_class_cannot_be_replaced(here: Path) -> None:
    with pytest.raises(BackendError, match="is an instance, whose contract cannot be replaced"):
        load_backend("my_kernel_module:instance", layout="KV")
    with pytest.raises(BackendError, match="Good takes no contract"):
        load_backend("my_kernel_module:Good", layout="KV")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tritno", "'tritno' is unknown; known: bank, bank_walk, cuda, fla, .*torch, .*; or give module:object"),
        ("", "'' is unknown"),
        (":x", "expected module:object, got ':x'"),
        ("os:", "expected module:object, got 'os:'"),
        ("no_such_module_at_all:X", "'no_such_module_at_all' cannot be imported: ModuleNotFoundError"),
        ("my_bad_module:X", "cannot be imported: OSError: libcuda.so not found"),
        ("my_kernel_module:Nothing", "module 'my_kernel_module' has no object 'Nothing'"),
        ("my_kernel_module:Holder.outer", "has no object 'Holder.outer'"),
        ("my_kernel_module:Broken", "Broken cannot be called: RuntimeError: no GPU here"),
        ("my_kernel_module:needs", "needs cannot be called: TypeError.*argument"),
        ("my_kernel_module:number", "expected an attribute contract of type .*, got None"),
    ],
)
def test_what_cannot_be_loaded(here: Path, spec: str, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        load_backend(spec)


class NoSurface(Methods):
    conv_verify = None  # type: ignore[assignment]
    conv_publish = None  # type: ignore[assignment]


class NoPublish(Methods):
    conv_publish = None  # type: ignore[assignment]


class NoVerify(Methods):
    conv_verify = None  # type: ignore[assignment]


class NoNative(Methods):
    native_step = None  # type: ignore[assignment]


class NoExport(Methods):
    export = None  # type: ignore[assignment]


class TooFew(Methods):
    def conv_publish(self, pool: Any, batch: Any) -> None: ...  # type: ignore[override]


class TooMany(Methods):
    def native_step(self, ops: Any, pools: Any, batch: Any, out: Any, layer: Any, more: Any) -> None: ...  # type: ignore[override]


class NoContract(Methods):
    contract = "fp32"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (NoSurface, "no surface; write at least one of gdn_verify, conv_verify, attention_verify"),
        (NoPublish, "it lacks conv_publish; see lumotree.backends.protocol"),
        (NoVerify, "it lacks conv_verify;"),
        (NoNative, "it lacks native_step;"),
        (NoExport, "it lacks export;"),
        (TooFew, r"conv_publish\(pool.*5 positional arguments \(pool, batch, accepted, ws, layers\): too many"),
        (TooMany, r"native_step\(ops.*5 positional arguments \(ops, pools, batch, out, layer\): missing .*'more'"),
        (NoContract, "got 'fp32'"),
    ],
)
def test_what_does_not_fit_the_protocol(backend: type[Any], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        check_backend(backend(), "mine")


def test_what_fits_passes() -> None:
    check_backend(Methods(), "mine")
    check_backend(TorchBackend(), "torch")
    assert {"gdn_verify", "kv_publish", "native_step", "export", "allocate"} <= set(ARGUMENTS)
