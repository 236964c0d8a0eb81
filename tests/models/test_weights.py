"""Safetensors folders as a source of weights, and what is wrong with damaged ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from freewheel.models.errors import ModelError
from freewheel.models.weights import SafetensorsWeights, folder_config

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.float32).view(4, 3),
    "model.layers.0.self_attn.q_proj.weight": torch.arange(6, dtype=torch.float32).to(torch.bfloat16).view(2, 3),
    "model.norm.weight": torch.tensor([0.5, 1.0, 1.5], dtype=torch.float16),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def save_sharded(folder: Path) -> Path:
    names = list(TENSORS)
    save_file({name: TENSORS[name] for name in names[:1]}, folder / SHARDS[0])
    save_file({name: TENSORS[name] for name in names[1:]}, folder / SHARDS[1])
    weight_map = {names[0]: SHARDS[0]} | dict.fromkeys(names[1:], SHARDS[1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def save_single(folder: Path, extra: dict[str, Tensor] | None = None) -> Path:
    save_file(TENSORS | (extra or {}), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_a_folder_gives_its_tensors_by_name_in_their_own_type(save, tmp_path: Path) -> None:
    weights = SafetensorsWeights(save(tmp_path))
    assert not weights.norm_offset_applied
    assert set(weights) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)


def test_extra_tensors_are_there_too(tmp_path: Path) -> None:
    weights = SafetensorsWeights(save_single(tmp_path, {"model.rotary_emb.inv_freq": torch.ones(2)}))
    assert set(weights) == {*TENSORS, "model.rotary_emb.inv_freq"}


def test_the_index_decides_between_two_shards_with_the_same_name(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    name = "model.embed_tokens.weight"
    rest = {other: tensor for other, tensor in TENSORS.items() if other != name}
    save_file(rest | {name: torch.zeros(4, 3)}, tmp_path / SHARDS[1])
    assert torch.equal(SafetensorsWeights(tmp_path)[name], TENSORS[name])


def test_a_missing_tensor_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    weights = SafetensorsWeights(save_single(tmp_path))
    with pytest.raises(ModelError, match=rf"{tmp_path}: has no tensor 'lm_head.weight'"):
        weights["lm_head.weight"]


def test_a_type_that_is_not_supported(tmp_path: Path) -> None:
    weights = SafetensorsWeights(save_single(tmp_path, {"packed": torch.ones(2, dtype=torch.int32)}))
    with pytest.raises(ModelError, match=r"model\.safetensors: 'packed' is of type I32; supported are F32, F16, BF16"):
        weights["packed"]


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path}: holds neither model.safetensors nor"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_truncation_anywhere_names_the_file(save, tmp_path: Path) -> None:
    save(tmp_path)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=rf"{path.name}: is truncated or damaged"):
            SafetensorsWeights(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (save_sharded(tmp_path) / SHARDS[1]).unlink()
    with pytest.raises(ModelError, match=rf"{SHARDS[1]}: no such file"):
        SafetensorsWeights(tmp_path)


def test_a_tensor_that_the_index_misplaces(tmp_path: Path) -> None:
    index = save_sharded(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, SHARDS[0])}))
    with pytest.raises(ModelError, match=rf"{SHARDS[0]}: lacks the tensor"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: (is not|has no)"):
        SafetensorsWeights(tmp_path)


def test_the_configuration_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        folder_config(tmp_path)
    (tmp_path / "config.json").write_text("{'single': 1}")
    with pytest.raises(ModelError, match=r"config\.json: is not valid JSON"):
        folder_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert folder_config(tmp_path) == {"model_type": "llama"}
