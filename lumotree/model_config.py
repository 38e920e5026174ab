"""The shape of a hybrid model of the Qwen3-Next / Qwen3.5 family and the table of its parameters.

Names are those of the `transformers` class `Qwen3_5ForCausalLM` and of the published checkpoints (`mtp.*` for the
multi-token-prediction head). Qwen3-Next stores the GDN projections fused; `lumotree.checkpoint` splits them on loading,
so that everything behind it knows one naming.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lumotree.contract import Dims
from lumotree.errors import InputError

LINEAR, FULL = "linear_attention", "full_attention"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

#: `model_type` of a config.json -> the family it belongs to.
_FAMILIES = {"qwen3_5_text": "qwen3_5", "qwen3_5": "qwen3_5", "qwen3_next": "qwen3_next"}

#: Field of ModelConfig -> key of config.json, for the values taken over as they are.
_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "hk": "linear_num_key_heads",
    "hv": "linear_num_value_heads",
    "dk": "linear_key_head_dim",
    "dv": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


class ConfigError(InputError):
    """A model configuration that cannot be run. The message names the key, the value and what is allowed."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of a model. shape; dtypes: those a checkpoint may hold it in, the one that we write first."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a hybrid model; `layer_kinds` has "linear_attention" (GDN) or "full_attention" a layer.

    hk, hv, dk, dv, conv_width: GDN. q_heads, kv_heads, head_dim, rotary_dim (channels that rotate), rope_theta:
    attention. tied: the head is the embedding. mtp_layers: 0 or 1. dtype: of weights and activations; kernels take
    bf16, the wider ones are for comparisons. eos: end-of-sequence tokens, may be empty. positions: most tokens of a
    request.

    Raises ConfigError for a layer kind, a size or a combination that is not supported.
    """

    vocab: int
    hidden: int
    intermediate: int
    layer_kinds: tuple[str, ...]
    hk: int
    hv: int
    dk: int
    dv: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    conv_width: int = 4
    rope_theta: float = 1e7
    rms_eps: float = 1e-6
    tied: bool = True
    mtp_layers: int = 0
    dtype: torch.dtype = torch.bfloat16
    eos: tuple[int, ...] = ()
    positions: int = 32768

    def __post_init__(self) -> None:
        for name in (*_KEYS, "rotary_dim", "positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model config: expected a positive integer, got {_KEYS.get(name, name)}={value!r}")
        for i, kind in enumerate(self.layer_kinds):
            if kind not in (LINEAR, FULL):
                raise ConfigError(
                    f"model config: layer {i} has the unsupported kind {kind!r}; supported: {LINEAR!r}, {FULL!r}"
                )
        if not self.gdn_layers or not self.attention_layers:
            raise ConfigError(
                f"model config: expected layers of both kinds, got {self.gdn_layers} of {LINEAR} and "
                f"{self.attention_layers} of {FULL}"
            )
        if self.mtp_layers not in (0, 1):
            raise ConfigError(f"model config: expected 0 or 1 MTP layers, got mtp_layers={self.mtp_layers!r}")
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"model config: expected dtype of {', '.join(DTYPES)}, got dtype={self.dtype}")
        if not self.rms_eps > 0 or not self.rope_theta > 0:
            raise ConfigError(
                f"model config: expected positive numbers, got rms_norm_eps={self.rms_eps!r}, "
                f"rope_theta={self.rope_theta!r}"
            )
        _ = self.dims  # its own checks: head counts that divide, an even rotary_dim within the head

    @property
    def gdn_layers(self) -> int:
        """How many layers are GDN."""
        return self.layer_kinds.count(LINEAR)

    @property
    def attention_layers(self) -> int:
        """How many layers are full attention."""
        return self.layer_kinds.count(FULL)

    @property
    def conv_channels(self) -> int:
        """D: the concatenated q, k and v channels."""
        return 2 * self.hk * self.dk + self.hv * self.dv

    @property
    def dims(self) -> Dims:
        """The shapes that a backend is asked for; `layers` is the larger count of the two kinds."""
        return Dims(
            hk=self.hk,
            hv=self.hv,
            dk=self.dk,
            dv=self.dv,
            conv_channels=self.conv_channels,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            conv_width=self.conv_width,
            layers=max(self.gdn_layers, self.attention_layers),
        )

    def parameters(self) -> dict[str, Parameter]:
        """Name -> shape and dtypes of every tensor of the model, MTP head included, in file order."""
        return _parameters(self)

    def to_json(self) -> dict[str, Any]:
        """A config.json that `transformers` and `read_config` understand (model type "qwen3_5_text")."""
        values: dict[str, Any] = {key: getattr(self, name) for name, key in _KEYS.items()}
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        rope = {
            "rope_type": "default",
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **values,
            "num_hidden_layers": len(self.layer_kinds),
            "layer_types": list(self.layer_kinds),
            "rope_parameters": rope,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tied,
            "mtp_num_hidden_layers": self.mtp_layers,
            "max_position_embeddings": self.positions,
            "hidden_act": "silu",
            "attention_bias": False,
            "eos_token_id": list(self.eos) or None,
            "dtype": dtype,
        }


def read_config(path: Path | str) -> ModelConfig:
    """The configuration in a config.json of the family (a language model, or the text part of a larger one).

    Raises ConfigError when the file cannot be read, is of another family or asks for what is not supported.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model config: {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"model config: expected an object in {path}, got {type(data).__name__}")
    try:
        return parse_config(data)
    except InputError as error:
        raise ConfigError(f"{error} (in {path})") from error


def parse_config(data: Mapping[str, Any]) -> ModelConfig:
    """`read_config` of parsed data."""
    if data.get("model_type") not in _FAMILIES:
        raise ConfigError(
            f"model config: expected model_type to be one of {', '.join(_FAMILIES)} (dense layers), "
            f"got model_type={data.get('model_type')!r}"
        )
    text = data.get("text_config", {})
    merged = {**data, **text} if isinstance(text, Mapping) else dict(data)
    _refuse_unsupported(merged)
    missing = sorted({*_KEYS.values(), "num_hidden_layers"} - merged.keys())
    if missing:
        raise ConfigError(f"model config: missing {', '.join(missing)}")
    rope = merged.get("rope_parameters") or merged.get("rope_scaling") or {}
    return ModelConfig(
        **{name: merged[key] for name, key in _KEYS.items()},
        layer_kinds=_layer_kinds(merged),
        rotary_dim=int(merged["head_dim"] * _either("partial_rotary_factor", rope, merged, 0.25)),
        rope_theta=float(_either("rope_theta", rope, merged, 1e4)),
        rms_eps=merged.get("rms_norm_eps", 1e-6),
        tied=bool(merged.get("tie_word_embeddings", False)),
        mtp_layers=merged.get("mtp_num_hidden_layers", merged.get("num_nextn_predict_layers", 0)),
        dtype=_dtype(merged),
        eos=_eos(merged.get("eos_token_id")),
        positions=merged.get("max_position_embeddings", 32768),
    )


def _either(key: str, first: Mapping[str, Any], second: Mapping[str, Any], default: float) -> float:
    value = first.get(key, second.get(key, default))
    if not isinstance(value, int | float):
        raise ConfigError(f"model config: expected a number, got {key}={value!r}")
    return value


def _layer_kinds(merged: Mapping[str, Any]) -> tuple[str, ...]:
    count, kinds = merged["num_hidden_layers"], merged.get("layer_types")
    if kinds is None:
        interval = merged.get("full_attention_interval", 4)
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    if len(kinds) != count:
        raise ConfigError(f"model config: expected {count} layer_types (num_hidden_layers), got {len(kinds)}")
    return tuple(kinds)


def _dtype(merged: Mapping[str, Any]) -> torch.dtype:
    name = merged.get("dtype") or merged.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise ConfigError(f"model config: expected dtype of {', '.join(DTYPES)}, got dtype={name!r}")
    return DTYPES[name]


def _eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _refuse_unsupported(merged: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that change the arithmetic in a way that is not built here."""
    count = merged.get("num_hidden_layers", 0)
    sparse, dense = merged.get("decoder_sparse_step", 1), merged.get("mlp_only_layers") or ()
    if merged.get("num_experts", 0):
        for i in range(count):
            if i not in dense and (i + 1) % sparse == 0:
                raise ConfigError(
                    f"model config: layer {i} has the unsupported kind 'mixture of experts' (num_experts="
                    f"{merged['num_experts']}); supported: dense MLP"
                )
    rope = merged.get("rope_parameters") or merged.get("rope_scaling") or {}
    fixed = {
        "hidden_act": (merged.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(merged.get("attention_bias", False)), False),
        "attn_output_gate": (bool(merged.get("attn_output_gate", True)), True),
        "mtp_use_dedicated_embeddings": (bool(merged.get("mtp_use_dedicated_embeddings", False)), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for key, (value, wanted) in fixed.items():
        if value != wanted:
            raise ConfigError(f"model config: expected {key}={wanted!r}, got {key}={value!r}")


def _parameters(c: ModelConfig) -> dict[str, Parameter]:
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, c.hidden)}
    for i, kind in enumerate(c.layer_kinds):
        table |= _layer(c, f"model.layers.{i}.", kind)
    table["model.norm.weight"] = (c.hidden,)
    if not c.tied:
        table["lm_head.weight"] = (c.vocab, c.hidden)
    if c.mtp_layers:
        table |= {
            "mtp.fc.weight": (c.hidden, 2 * c.hidden),
            "mtp.pre_fc_norm_embedding.weight": (c.hidden,),
            "mtp.pre_fc_norm_hidden.weight": (c.hidden,),
            **_layer(c, "mtp.layers.0.", FULL),
            "mtp.norm.weight": (c.hidden,),
        }
    return {name: Parameter(shape, _dtypes(c, name)) for name, shape in table.items()}


def _dtypes(c: ModelConfig, name: str) -> tuple[torch.dtype, ...]:
    """The gate's parameters are fp32 in the kernels; published files hold them in fp32 or in the model's dtype."""
    if name.endswith(("linear_attn.A_log", "linear_attn.dt_bias")):
        return tuple(dict.fromkeys((torch.float32, c.dtype)))
    if name.endswith("linear_attn.norm.weight"):
        return tuple(dict.fromkeys((c.dtype, torch.float32)))
    return (c.dtype,)


def _layer(c: ModelConfig, prefix: str, kind: str) -> dict[str, tuple[int, ...]]:
    mixer = _gdn(c) if kind == LINEAR else _attention(c)
    table: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden,),
        **mixer,
        "post_attention_layernorm.weight": (c.hidden,),
        "mlp.gate_proj.weight": (c.intermediate, c.hidden),
        "mlp.up_proj.weight": (c.intermediate, c.hidden),
        "mlp.down_proj.weight": (c.hidden, c.intermediate),
    }
    return {prefix + name: shape for name, shape in table.items()}


def _gdn(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        "linear_attn.in_proj_qkv.weight": (c.conv_channels, c.hidden),
        "linear_attn.in_proj_z.weight": (c.hv * c.dv, c.hidden),
        "linear_attn.in_proj_b.weight": (c.hv, c.hidden),
        "linear_attn.in_proj_a.weight": (c.hv, c.hidden),
        "linear_attn.conv1d.weight": (c.conv_channels, 1, c.conv_width),
        "linear_attn.A_log": (c.hv,),
        "linear_attn.dt_bias": (c.hv,),
        "linear_attn.norm.weight": (c.dv,),
        "linear_attn.out_proj.weight": (c.hidden, c.hv * c.dv),
    }


def _attention(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """`q_proj` holds, head by head, `head_dim` rows of the query and `head_dim` rows of the output gate."""
    return {
        "self_attn.q_proj.weight": (2 * c.q_heads * c.head_dim, c.hidden),
        "self_attn.k_proj.weight": (c.kv_heads * c.head_dim, c.hidden),
        "self_attn.v_proj.weight": (c.kv_heads * c.head_dim, c.hidden),
        "self_attn.o_proj.weight": (c.hidden, c.q_heads * c.head_dim),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
    }
