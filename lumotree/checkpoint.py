"""Checkpoints of the family: a folder with config.json and safetensors files, read lazily, written all or nothing.

A folder as `transformers` saves it or as it is published loads as it is: one file or several with an index, Qwen3.5
names or Qwen3-Next's fused projections, a language model alone or as part of a larger one (whose vision tower is left
out). Names, shapes and dtypes are checked from the files' headers before any tensor is read; dtypes are kept.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lumotree.errors import InputError
from lumotree.model_config import LINEAR, ModelConfig, read_config

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

#: Safetensors' names of the dtypes that parameters may have.
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
#: Published multimodal files: where the language model's tensors are, and what is not part of it.
_NESTED, _OTHER = "model.language_model.", ("model.visual.", "visual.")


class CheckpointError(InputError):
    """A checkpoint that cannot be read or does not fit its configuration. Names the tensor, expected and found."""


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a stored tensor; dtype is safetensors' name when it is none of torch's three."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def check_tensors(config: ModelConfig, found: Mapping[str, Spec], where: str) -> None:
    """Raise CheckpointError for the first tensor that is missing, left over, misshapen or of another dtype."""
    expected = config.parameters()
    missing, extra = [n for n in expected if n not in found], [n for n in found if n not in expected]
    if missing:
        shape = list(expected[missing[0]].shape)
        remedy = "use the config.json that belongs to these tensors"
        if not any(name.startswith("mtp.") for name in found) and missing[0].startswith("mtp."):
            remedy = "set mtp_num_hidden_layers to 0 in config.json to load the model without its MTP head"
        raise CheckpointError(
            f"{where}: tensor {missing[0]} is missing{_and_more(missing)}; expected {shape}. Remedy: {remedy}"
        )
    if extra:
        raise CheckpointError(
            f"{where}: tensor {extra[0]} is not part of this model{_and_more(extra)}; expected {len(expected)} "
            f"tensors, found {len(found)}. Remedy: use the config.json that belongs to these tensors"
        )
    for name, parameter in expected.items():
        spec = found[name]
        if spec.shape != parameter.shape:
            raise CheckpointError(
                f"{where}: tensor {name}: expected shape {list(parameter.shape)}, found {list(spec.shape)}"
            )
        if spec.dtype not in parameter.dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in parameter.dtypes)
            raise CheckpointError(f"{where}: tensor {name}: expected {wanted}, found {spec}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Shapes and dtypes; those of a `Checkpoint` are known without reading it."""
    if isinstance(tensors, Checkpoint):
        return tensors.specs
    return {name: Spec(tuple(value.shape), value.dtype) for name, value in tensors.items()}


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder under the names of `ModelConfig.parameters`; each is read when it is asked for."""

    def __init__(self, specs: dict[str, Spec], read: Mapping[str, Callable[[], Tensor]]) -> None:
        self.specs, self._read = specs, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def read_checkpoint(folder: Path | str) -> tuple[ModelConfig, Checkpoint]:
    """Configuration and tensors of a local folder.

    Raises ConfigError for its config.json, CheckpointError for everything else.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint: expected a folder, got {folder}")
    config = read_config(folder / CONFIG)
    files = [_File(path) for path in _files(folder)]
    stored = _stored(folder, files)
    if any(name.startswith("mtp.") for name in stored):
        config = replace(config, mtp_layers=1)  # Qwen3-Next's config does not say
    checkpoint = _named(config, stored, str(folder))
    check_tensors(config, checkpoint.specs, str(folder))
    return config, checkpoint


def write_checkpoint(folder: Path | str, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors, checked before, each put in place in one step, the tensors first.

    Raises CheckpointError when the tensors do not fit the configuration or the folder cannot be written.
    """
    folder = Path(folder)
    check_tensors(config, specs_of(tensors), f"{folder} (nothing written)")
    data = {name: tensors[name].detach().cpu().contiguous() for name in config.parameters()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / SINGLE, lambda path: save_file(data, path, metadata={"format": "pt"}))
        text = json.dumps(config.to_json(), indent=2) + "\n"
        _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint: {folder} cannot be written: {error}") from error


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside `path` and rename over it, so that a reader sees the old file or the new one."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as scratch:
        made = Path(scratch) / path.name
        write(made)
        os.replace(made, path)


class _File:
    """One safetensors file, opened; its header is valid and its data complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            opened: Any = safe_open
            self._open = opened(path, framework="pt")
            self.specs = {name: self._spec(name) for name in list(self._open.keys())}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint: {path} is not a complete safetensors file: {error}") from error

    def _spec(self, name: str) -> Spec:
        view = self._open.get_slice(name)
        return Spec(tuple(view.get_shape()), _DTYPES.get(view.get_dtype(), view.get_dtype()))

    def read(self, name: str) -> Tensor:
        """A copy, so that nothing depends on the file or on its alignment afterwards."""
        tensor: Tensor = self._open.get_tensor(name)
        return tensor.clone()


def _files(folder: Path) -> list[Path]:
    """The files of a folder: those of its index, or the single one."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"checkpoint: expected {SINGLE} or {INDEX} in {folder}, found neither")
        return [folder / SINGLE]
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"checkpoint: {index} names the file {name!r}, which is not in {folder}")
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint: {index} cannot be read: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"checkpoint: {index}: expected weight_map to map tensor names to file names")
    return weight_map


@dataclass(frozen=True)
class _Stored:
    """A tensor under the name that it has in the family, before fused projections are split."""

    spec: Spec
    read: Callable[[], Tensor]


def _stored(folder: Path, files: Iterable[_File]) -> dict[str, _Stored]:
    """What the files hold of the language model, named as in a model that stands alone."""
    found: dict[str, _Stored] = {}
    index = folder / INDEX
    listed = _weight_map(index) if index.exists() else {}
    for file in files:
        for name, spec in file.specs.items():
            if listed and listed.get(name) != file.path.name:
                raise CheckpointError(
                    f"checkpoint: tensor {name} is in {file.path.name}; {INDEX} says {listed.get(name)!r}"
                )
            if not name.startswith(_OTHER):
                own = name.replace(_NESTED, "model.", 1) if name.startswith(_NESTED) else name
                found[own] = _Stored(spec, lambda file=file, name=name: file.read(name))  # type: ignore[misc]
    present = {name for file in files for name in file.specs}
    for name in listed.keys() - present:
        raise CheckpointError(f"checkpoint: tensor {name} is listed in {INDEX} and missing from {listed[name]}")
    return found


def _named(config: ModelConfig, stored: dict[str, _Stored], where: str) -> Checkpoint:
    """Native names: fused projections split, a stored copy of a tied head dropped."""
    rest = dict(stored)
    made: dict[str, _Stored] = {}
    for i, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{i}.linear_attn."
        for fused, split in _FUSED.items() if kind == LINEAR else ():
            if prefix + fused in rest:
                made |= _split(config, prefix, fused, rest.pop(prefix + fused), split, where)
    tied = rest.get("lm_head.weight") if config.tied else None
    embedding = rest.get("model.embed_tokens.weight")
    if tied and embedding:
        if tied.spec != embedding.spec or not torch.equal(tied.read(), embedding.read()):
            raise CheckpointError(
                f"{where}: tensor lm_head.weight differs from model.embed_tokens.weight, expected one tensor "
                "(tie_word_embeddings=true)"
            )
        del rest["lm_head.weight"]
    merged = {**rest, **made}
    return Checkpoint({n: s.spec for n, s in merged.items()}, {n: s.read for n, s in merged.items()})


def split_qkvz(config: ModelConfig, fused: Tensor) -> dict[str, Tensor]:
    """Qwen3-Next's `in_proj_qkvz`: for each key head its rows of q, k, and its value heads' rows of v and z."""
    group = config.hv // config.hk * config.dv
    heads = fused.view(config.hk, -1, fused.shape[-1])
    q, k, v, z = (part.flatten(0, 1) for part in torch.split(heads, [config.dk, config.dk, group, group], 1))
    return {"in_proj_qkv.weight": torch.cat([q, k, v]), "in_proj_z.weight": z}


def split_ba(config: ModelConfig, fused: Tensor) -> dict[str, Tensor]:
    """Qwen3-Next's `in_proj_ba`: for each key head its value heads' rows of b, then of a."""
    group = config.hv // config.hk
    b, a = (part.flatten(0, 1) for part in torch.split(fused.view(config.hk, 2 * group, -1), group, 1))
    return {"in_proj_b.weight": b, "in_proj_a.weight": a}


_FUSED = {"in_proj_qkvz.weight": split_qkvz, "in_proj_ba.weight": split_ba}


def _split(
    config: ModelConfig,
    prefix: str,
    fused: str,
    stored: _Stored,
    split: Callable[[ModelConfig, Tensor], dict[str, Tensor]],
    where: str,
) -> dict[str, _Stored]:
    rows = config.conv_channels + config.hv * config.dv if "qkvz" in fused else 2 * config.hv
    if stored.spec.shape != (rows, config.hidden):
        raise CheckpointError(
            f"{where}: tensor {prefix}{fused}: expected shape {[rows, config.hidden]}, found {list(stored.spec.shape)}"
        )
    meta = split(config, torch.empty(stored.spec.shape, device="meta"))
    return {
        prefix + name: _Stored(
            Spec(tuple(shape.shape), stored.spec.dtype),
            lambda name=name: split(config, stored.read())[name],  # type: ignore[misc]
        )
        for name, shape in meta.items()
    }
