"""Peers that are missing, too old or broken give one clear message; stand-ins leave no trace. No peer needed."""

import importlib
import importlib.util
import sys

import pytest

from lumotree.backends import peer_loading
from lumotree.errors import BackendError

ADAPTERS = {
    "sglang": ("lumotree.backends.sglang", "SglangBackend", r"pip install --no-deps sglang==0\.5\.23"),
    "tokenspeed": (
        "lumotree.backends.tokenspeed", "TokenspeedBackend", r"pip install --no-deps tokenspeed-kernel==0\.1\.4"
    ),
    "transformers": (
        "lumotree.backends.transformers_native", "TransformersBackend", r"pip install transformers==5\.24\.0"
    ),
    "fla": ("lumotree.backends.fla", "FlaBackend", r"pip install fla-core==0\.6\.0"),
}  # fmt: skip


@pytest.fixture
def no_peers(monkeypatch):
    real = importlib.util.find_spec
    hidden = {module for module, _ in peer_loading.INSTALL.values()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in hidden else real(name, *a))


@pytest.fixture
def fake_sglang(monkeypatch, tmp_path):
    """An installed `sglang` whose files the test writes; returns its directory."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the package root must not be imported')")
    spec = importlib.util.spec_from_file_location(
        "sglang", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: spec if name == "sglang" else real(name, *a))
    yield package
    for name in [n for n in sys.modules if n.startswith("_lumotree_peer_sglang_kernel")]:
        del sys.modules[name]


@pytest.mark.parametrize("peer", ADAPTERS)
def test_a_missing_peer_says_how_to_install_it(no_peers, peer):
    module, name, line = ADAPTERS[peer]
    adapter = getattr(importlib.import_module(module), name)  # importing the adapter needs no peer
    with pytest.raises(BackendError, match=f"backend '{peer}' needs the package .* not installed.*{line}"):
        adapter()


def test_adapters_are_named_as_they_are_looked_up():
    for peer, (module, name, _) in ADAPTERS.items():
        assert getattr(importlib.import_module(module), name).name == peer


def test_a_kernel_is_loaded_by_file_with_stand_ins_that_go_again(fake_sglang):
    (fake_sglang / "kernel.py").write_text(
        "from sglang.kernels.jit.utils import is_arch_support_pdl as pdl\nimport sglang.srt.utils as u\nPDL = pdl()"
    )
    before = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "sglang"}
    module = peer_loading.load_kernel_module("sglang", "kernel.py", peer_loading.sglang_stand_ins())
    assert module.PDL is False
    assert module.u.is_hip() is False
    assert {n: m for n, m in sys.modules.items() if n.split(".")[0] == "sglang"} == before
    assert peer_loading.load_kernel_module("sglang", "kernel.py", {}) is module


def test_a_module_that_was_there_is_there_again(monkeypatch):
    real = object()
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", real)
    with peer_loading._in_sys_modules(peer_loading.sglang_stand_ins()):
        assert sys.modules["sglang.srt.utils"] is not real
    assert sys.modules["sglang.srt.utils"] is real


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"kernel\.py is missing; installed: .*; tested: 0\.5\.23 \(pip install"),
        ("from sglang.kernels.jit.utils import something_new", r"cannot load .*something_new.*tested: 0\.5\.23"),
        ("1 / 0", "cannot load .*ZeroDivisionError"),
    ],
)
def test_another_version_of_a_peer_is_reported_with_the_tested_one(fake_sglang, source, message):
    if source is not None:
        (fake_sglang / "kernel.py").write_text(source)
    with pytest.raises(BackendError, match=message):
        peer_loading.load_kernel_module("sglang", "kernel.py", peer_loading.sglang_stand_ins())
    assert "_lumotree_peer_sglang_kernel" not in sys.modules


def test_a_missing_function_and_a_broken_import_are_reported(fake_sglang):
    (fake_sglang / "kernel.py").write_text("")
    module = peer_loading.load_kernel_module("sglang", "kernel.py", {})
    with pytest.raises(BackendError, match="has no renamed; installed"):
        peer_loading.attribute("sglang", module, "renamed")
    with pytest.raises(BackendError, match=r"cannot import sglang\.nowhere"):
        peer_loading.import_peer("sglang", "sglang.nowhere")
