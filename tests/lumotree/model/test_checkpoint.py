"""Folders in and out: layouts that exist, and a message with name, expected and found for every way to be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lumotree import checkpoint
from lumotree.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from lumotree.errors import InputError
from lumotree.invariant import same_bits
from lumotree.model import HybridModel, load_model
from lumotree.model_config import FULL, LINEAR, ConfigError, ModelConfig
from lumotree.random_weights import random_weights

TINY = ModelConfig(
    vocab=20, hidden=24, intermediate=32, layer_kinds=(LINEAR, FULL), hk=2, hv=4, dk=8, dv=12,
    q_heads=4, kv_heads=2, head_dim=8, rotary_dim=4, mtp_layers=1, tied=False, positions=32,
)  # fmt: skip
QKVZ, BA = "model.layers.0.linear_attn.in_proj_qkvz.weight", "model.layers.0.linear_attn.in_proj_ba.weight"


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return random_weights(TINY)


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    write_checkpoint(tmp_path / "model", TINY, weights)
    return tmp_path / "model"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / checkpoint.SINGLE)
    change(tensors)
    save_file(tensors, folder / checkpoint.SINGLE)


def assert_loads(folder: Path, expected: dict[str, Tensor], config: ModelConfig = TINY) -> None:
    found, tensors = read_checkpoint(folder)
    assert found == config
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype
        assert same_bits(tensors[name], value), name


def test_what_is_written_is_read_with_its_dtypes(folder: Path, weights: dict[str, Tensor]) -> None:
    assert weights["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert weights["model.norm.weight"].dtype == torch.bfloat16
    assert_loads(folder, weights)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert load_model(folder).config == TINY


def test_every_tensor_is_used(weights: dict[str, Tensor]) -> None:
    """Building a model and its head reads the whole table: nothing in a file is ignored."""
    asked: set[str] = set()

    class Watched(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.add(name)
            return super().__getitem__(name)

    HybridModel(TINY, Watched(weights)).draft_head()
    assert asked == set(TINY.parameters())


def sharded(folder: Path) -> dict[str, str]:
    """Split the single file into two with an index; returns the weight map."""
    tensors = load_file(folder / checkpoint.SINGLE)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    (folder / checkpoint.SINGLE).unlink()
    weight_map = {n: file for file, part in parts.items() for n in part}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_folder(folder: Path, weights: dict[str, Tensor]) -> None:
    sharded(folder)
    assert_loads(folder, weights)


def test_language_model_inside_a_larger_one(folder: Path, weights: dict[str, Tensor]) -> None:
    """Published multimodal files: nested names, a vision tower, the configuration's text part, fp32 gates in bf16."""

    def nest(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch.weight"] = torch.zeros(3)

    rewrite(folder, nest)
    config = {"model_type": "qwen3_5", "text_config": TINY.to_json(), "vision_config": {}}
    (folder / checkpoint.CONFIG).write_text(json.dumps(config))
    assert_loads(folder, weights)


def fuse(tensors: dict[str, Tensor]) -> None:
    """Qwen3-Next's fused projections, written out head by head."""
    prefix = "model.layers.0.linear_attn.in_proj_"
    qkv, z, b, a = (tensors.pop(f"{prefix}{n}.weight") for n in ("qkv", "z", "b", "a"))
    q, k, v = qkv[:16].view(2, 8, 24), qkv[16:32].view(2, 8, 24), qkv[32:].view(2, 24, 24)
    tensors[QKVZ] = torch.cat([torch.cat([q[h], k[h], v[h], z.view(2, 24, 24)[h]]) for h in range(2)])
    tensors[BA] = torch.cat([torch.cat([b[2 * h : 2 * h + 2], a[2 * h : 2 * h + 2]]) for h in range(2)])


def test_fused_projections_are_split(folder: Path, weights: dict[str, Tensor]) -> None:
    rewrite(folder, fuse)
    data = json.loads((folder / checkpoint.CONFIG).read_text())
    del data["mtp_num_hidden_layers"]  # as in Qwen3-Next's own configuration
    (folder / checkpoint.CONFIG).write_text(json.dumps(data | {"model_type": "qwen3_next"}))
    assert_loads(folder, weights)


def test_a_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    config = replace(TINY, tied=True)
    weights = random_weights(config)
    write_checkpoint(tmp_path, config, weights)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_loads(tmp_path, weights, config)
    rewrite(tmp_path, lambda t: t["lm_head.weight"].neg_())
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        read_checkpoint(tmp_path)


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(NORM), r"tensor model\.norm\.weight is missing; expected \[24\]"),
    "two missing": (lambda t: (t.pop(NORM), t.pop("mtp.fc.weight")), r"is missing \(and 1 more\)"),
    "extra": (
        lambda t: t.update({"model.layers.2.x": torch.zeros(1)}),
        r"tensor model\.layers\.2\.x is not part of this model; expected 43 tensors, found 44",
    ),
    "misshapen": (
        lambda t: t.update({NORM: torch.zeros(25, dtype=torch.bfloat16)}),
        r"tensor model\.norm\.weight: expected shape \[24\], found \[25\]",
    ),
    "other dtype": (
        lambda t: t.update({NORM: torch.zeros(24, dtype=torch.float32)}),
        r"tensor model\.norm\.weight: expected bfloat16, found float32 \[24\]",
    ),
    "unknown dtype": (
        lambda t: t.update({NORM: torch.zeros(24, dtype=torch.float16)}),
        r"tensor model\.norm\.weight: expected bfloat16, found F16 \[24\]",
    ),
    "other dtype of a gate": (
        lambda t: t.update({"model.layers.0.linear_attn.A_log": torch.zeros(4, dtype=torch.float64)}),
        r"tensor model\.layers\.0\.linear_attn\.A_log: expected float32 or bfloat16, found float64",
    ),
    "fused misshapen": (
        lambda t: (fuse(t), t.update({QKVZ: t[QKVZ][1:].clone()})),
        r"in_proj_qkvz\.weight: expected shape \[128, 24\], found \[127, 24\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors(folder: Path, case: str) -> None:
    change, message = BROKEN[case]
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / checkpoint.SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        load_model(folder)


def test_unsupported_layer_kind(folder: Path) -> None:
    data = json.loads((folder / checkpoint.CONFIG).read_text())
    data["layer_types"][1] = "mamba"
    (folder / checkpoint.CONFIG).write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"layer 1 has the unsupported kind 'mamba'.*config\.json"):
        load_model(folder)


def test_folders_that_hold_no_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a folder"):
        load_model(tmp_path / "none")
    (folder / checkpoint.SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*, found neither"):
        load_model(folder)
    (folder / checkpoint.CONFIG).unlink()
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        load_model(folder)


def test_broken_index(folder: Path) -> None:
    weight_map = sharded(folder)
    name = next(iter(weight_map))
    for broken, message in (
        ({**weight_map, name: "../c.safetensors"}, r"names the file '\.\./c\.safetensors'"),
        ({**weight_map, name: "c.safetensors"}, r"names the file 'c\.safetensors', which is not in"),
        ({**weight_map, name: "b.safetensors"}, "is in a.safetensors; .* says 'b.safetensors'"),
        ({**weight_map, "more": "a.safetensors"}, r"tensor more is listed in .* and missing from a\.safetensors"),
        ([], "expected weight_map to map"),
    ):
        write_index(folder, broken)
        with pytest.raises(CheckpointError, match=message):
            load_model(folder)
    (folder / checkpoint.INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(folder)


def test_nothing_is_half_written(
    folder: Path, weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**weights, NORM: torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"nothing written\): tensor model\.norm\.weight"):
        write_checkpoint(tmp_path / "new", TINY, wrong)
    assert not (tmp_path / "new").exists()

    def full(data: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        write_checkpoint(folder, TINY, random_weights(TINY, seed=1))
    monkeypatch.undo()
    assert_loads(folder, weights)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_saved_without_its_head(folder: Path) -> None:
    """As transformers saves it, which drops `mtp.*` and keeps the configuration."""
    rewrite(folder, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight is missing .*set mtp_num_hidden_layers to 0"):
        read_checkpoint(folder)
    data = json.loads((folder / checkpoint.CONFIG).read_text())
    (folder / checkpoint.CONFIG).write_text(json.dumps(data | {"mtp_num_hidden_layers": 0}))
    assert load_model(folder).config.mtp_layers == 0


def test_weights_in_memory_are_checked_too(weights: dict[str, Tensor]) -> None:
    del weights[NORM]
    with pytest.raises(CheckpointError, match=r"model: tensor model\.norm\.weight is missing"):
        HybridModel(TINY, weights)
