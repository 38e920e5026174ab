"""Reading and writing configurations: what is taken over, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lumotree.model_config import FULL, LINEAR, ConfigError, ModelConfig, parse_config, read_config

TINY = ModelConfig(
    vocab=50, hidden=24, intermediate=40, layer_kinds=(LINEAR, FULL), hk=2, hv=4, dk=8, dv=12,
    q_heads=4, kv_heads=2, head_dim=16, rotary_dim=4, mtp_layers=1, eos=(3,),
)  # fmt: skip


def data(**changes: Any) -> dict[str, Any]:
    return {**TINY.to_json(), **changes}


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY.to_json()))
    assert read_config(path) == TINY


def test_older_spellings_and_text_part() -> None:
    plain = data(rope_theta=1e7, partial_rotary_factor=0.25, torch_dtype="bfloat16", full_attention_interval=2)
    for key in ("rope_parameters", "dtype", "layer_types"):
        del plain[key]
    assert parse_config(plain) == TINY
    wrapped = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": data()}
    assert parse_config(wrapped) == TINY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"layer_types": [LINEAR, "sliding_attention"]}, "layer 1 has the unsupported kind 'sliding_attention'"),
        ({"layer_types": [LINEAR, LINEAR]}, "layers of both kinds, got 2 of"),
        ({"layer_types": [LINEAR]}, "expected 2 layer_types"),
        ({"num_experts": 4}, "layer 0 has the unsupported kind 'mixture of experts'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": "24"}, "hidden_size='24'"),
        ({"linear_num_value_heads": 3}, "got hv=3, hk=2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"mtp_num_hidden_layers": 2}, "mtp_layers=2"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta=None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "rotary_dim=3"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(data(**changes))


def test_missing_key_and_unreadable_file(tmp_path: Path) -> None:
    incomplete = data()
    del incomplete["head_dim"]
    with pytest.raises(ConfigError, match="missing head_dim"):
        parse_config(incomplete)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected an object"):
        read_config(tmp_path / "list.json")


def test_parameter_table() -> None:
    table = TINY.parameters()
    assert table["model.layers.0.linear_attn.in_proj_qkv.weight"].shape == (2 * 16 + 48, 24)
    assert table["model.layers.1.self_attn.q_proj.weight"].shape == (2 * 64, 24)
    assert table["mtp.fc.weight"].shape == (24, 48)
    assert table["model.layers.0.linear_attn.A_log"].dtypes == (torch.float32, torch.bfloat16)
    assert "lm_head.weight" not in table
