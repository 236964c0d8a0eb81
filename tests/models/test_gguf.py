"""GGUF files: the gguf package and transformers' own loading are the oracles."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import FAMILIES, FLOAT16_AT, checkpoint, convert, random_blocks, tiny_model, write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from freewheel.models.errors import ModelError
from freewheel.models.gguf import GGUFWeights, gguf_config, read_gguf
from freewheel.models.spec import ModelSpec
from freewheel.models.store import resolve
from freewheel.ops.quantize import GroupQuantized

Family = tuple[str, PreTrainedModel, Path]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """An architecture, a transformers model of it, and the model's GGUF file."""
    model = tiny_model(request.param)
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return request.param, model, convert(path, request.param, model)


LLAMA = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def small_llama(path: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    """A file of a kilobyte or two with a layer's query and key, one of them quantised, and a few tokens."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(32, 32)).astype(np.float32)
    return write_gguf(
        path,
        "llama",
        LLAMA
        | {"tokenizer.ggml.tokens": ["a", "bc", "▁d"], "tokenizer.ggml.scores": [0.5, 1.5, 2.5]}
        | (metadata or {}),
        {
            "token_embd.weight": rng.normal(size=(3, 32)).astype(np.float32),
            "blk.0.attn_q.weight": ("Q4_1", random_blocks("Q4_1", rows=32, blocks=1)),
            "blk.0.attn_k.weight": matrix,
        }
        | (tensors or {}),
    )


class TestTensors:
    @pytest.mark.parametrize(("rows", "blocks"), [(40, 7), (40, 1), (1, 7), (1, 1)])
    @pytest.mark.parametrize("kind", FLOAT16_AT)
    def test_quantised_values_are_those_of_the_gguf_package_to_the_bit(
        self, kind: str, rows: int, blocks: int, tmp_path: Path
    ) -> None:
        data = random_blocks(kind, rows, blocks)
        file = read_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": (kind, data)}))
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
        for _ in range(2):  # the first reading leaves the mapped file as it is
            tensor = file.tensor("w")
            assert isinstance(tensor, GroupQuantized)
            assert tensor.shape == expected.shape
            assert int(tensor.values.max()) < 2**tensor.bits
            np.testing.assert_array_equal(tensor.dequantize().numpy(), expected)

    @pytest.mark.parametrize(
        ("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
    )
    def test_plain_values_keep_their_type(self, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
        values = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
        raw = values.view(torch.uint8).numpy()
        tensor = read_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": (kind, raw)})).tensor("w")
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, values)

    def test_stacks_of_quantised_matrices_are_refused(self, tmp_path: Path) -> None:
        data = random_blocks("Q8_0", rows=6, blocks=1).reshape(2, 3, 34)
        file = read_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": ("Q8_0", data)}))
        with pytest.raises(ModelError, match=r"a\.gguf: .*only matrices"):
            file.tensor("w")


class TestMetadata:
    def test_every_kind_of_value_comes_back(self, tmp_path: Path) -> None:
        kinds = gguf.GGUFValueType
        expected = {
            "uint8": (200, kinds.UINT8),
            "int8": (-3, kinds.INT8),
            "uint16": (60_000, kinds.UINT16),
            "int16": (-300, kinds.INT16),
            "uint32": (2**32 - 1, kinds.UINT32),
            "int32": (-(2**31), kinds.INT32),
            "uint64": (2**64 - 1, kinds.UINT64),
            "int64": (-(2**63), kinds.INT64),
            "float32": (0.5, kinds.FLOAT32),
            "float64": (0.1, kinds.FLOAT64),
            "bool": (True, kinds.BOOL),
            "text": ("naïve 🦙", kinds.STRING),
            "texts": (["▁a", "bc", "🦙"], kinds.ARRAY),
        }
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        for key, (value, kind) in expected.items():
            writer.add_key_value(key, value, kind)
        writer.add_array("floats", [0.5, -1.0])
        writer.add_array("integers", [1, -2, 3])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        metadata = read_gguf(tmp_path / "a.gguf").metadata
        for key, (value, _) in expected.items():
            assert metadata[key] == value
            assert type(metadata[key]) is type(value)
        np.testing.assert_array_equal(metadata["floats"], np.array([0.5, -1.0], np.float32))
        np.testing.assert_array_equal(metadata["integers"], np.array([1, -2, 3], np.int32))


class TestNamesAndConfiguration:
    def test_tensors_come_back_as_the_checkpoint_has_them(self, family: Family) -> None:
        architecture, model, path = family
        weights, expected = GGUFWeights(read_gguf(path)), checkpoint(model)
        assert weights.norm_offset_applied
        assert set(weights) == set(expected)
        for name, tensor in expected.items():
            assert name in weights
            offset = 1 if architecture == "gemma3" and name.endswith("norm.weight") else 0
            assert torch.equal(weights[name], tensor + offset), name  # type: ignore[arg-type]

    def test_transformers_reads_the_same_tensors(self, family: Family) -> None:
        architecture, _, path = family
        weights = GGUFWeights(read_gguf(path))
        oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        for name, tensor in checkpoint(oracle).items():
            offset = 1 if architecture == "gemma3" and name.endswith("norm.weight") else 0
            torch.testing.assert_close(weights[name], tensor + offset, rtol=1e-6, atol=1e-6)

    def test_the_configuration_means_to_transformers_what_the_model_has(self, family: Family) -> None:
        _, model, path = family
        config = gguf_config(read_gguf(path))
        assert config.pop("architectures") == [type(model).__name__]
        rebuilt = type(model.config).from_dict(config).to_dict()
        expected = model.config.to_dict()
        for key in config.keys() & expected.keys() | {"rope_parameters"}:
            if isinstance(expected[key], float):
                assert rebuilt[key] == pytest.approx(expected[key]), key
            else:
                assert rebuilt[key] == expected[key], key

    def test_quantised_query_rows_are_put_back_in_order(self, tmp_path: Path) -> None:
        file = read_gguf(small_llama(tmp_path / "a.gguf"))
        stored, restored = (
            file.tensor("blk.0.attn_q.weight"),
            GGUFWeights(file)["model.layers.0.self_attn.q_proj.weight"],
        )
        assert isinstance(stored, GroupQuantized)
        assert isinstance(restored, GroupQuantized)
        # Two heads of 16 rows: rows 0 and 8 of a head rotate together and are stored side by side.
        order = [head * 16 + pair * 2 + half for head in range(2) for half in range(2) for pair in range(8)]
        assert torch.equal(restored.dequantize(), stored.dequantize()[order])

    def test_linear_and_yarn_scaling(self, tmp_path: Path) -> None:
        linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
        yarn = {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 1024,
        }
        assert gguf_config(read_gguf(small_llama(tmp_path / "a.gguf", linear)))["rope_scaling"] == {
            "rope_type": "linear",
            "factor": 8.0,
        }
        assert gguf_config(read_gguf(small_llama(tmp_path / "b.gguf", yarn)))["rope_scaling"] == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }

    @pytest.mark.parametrize(
        ("metadata", "scaling"),
        [
            ({"rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
            ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
            ({"rope.scale_linear": 4.0, "rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
            ({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, None),
            ({"rope.scaling.type": "linear"}, None),
        ],
    )
    def test_scaling_without_a_type_is_linear_as_in_llama_cpp(
        self, metadata: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path
    ) -> None:
        path = small_llama(tmp_path / "a.gguf", {f"llama.{key}": value for key, value in metadata.items()})
        assert gguf_config(read_gguf(path))["rope_scaling"] == scaling

    def test_a_sliding_window_of_a_llama_is_in_all_layers(self, tmp_path: Path) -> None:
        file = read_gguf(small_llama(tmp_path / "a.gguf", {"llama.attention.sliding_window": 64}))
        spec = ModelSpec.from_config(gguf_config(file))
        assert set(spec.windows) == {64}

    def test_a_sliding_window_of_qwen_is_refused(self, tmp_path: Path) -> None:
        model = tiny_model("qwen2")
        path = convert(tmp_path / "a.gguf", "qwen2", model, {"qwen2.attention.sliding_window": 64})
        with pytest.raises(ModelError, match=r"qwen2\.attention\.sliding_window is 64, which is not supported"):
            gguf_config(read_gguf(path))

    def test_llama3_scaling_is_recovered_from_its_effect(self, tmp_path: Path) -> None:
        scaling = {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(
            hidden_size=128, num_attention_heads=2, rope_parameters={"rope_theta": 500_000.0, **scaling}
        )  # fmt: skip
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        divisors = 500_000.0 ** (-torch.arange(0, 64, 2) / 64) / scaled
        metadata = {
            "llama.rope.freq_base": 500_000.0,
            "llama.attention.key_length": 64,
            "llama.attention.value_length": 64,
        }
        path = small_llama(tmp_path / "a.gguf", metadata, {"rope_freqs.weight": divisors.numpy()})
        assert gguf_config(read_gguf(path))["rope_scaling"] == scaling
        path = small_llama(tmp_path / "b.gguf", metadata, {"rope_freqs.weight": divisors.sqrt().numpy()})
        with pytest.raises(ModelError, match=r"b\.gguf: rope_freqs\.weight"):
            gguf_config(read_gguf(path))

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"llama.block_count": "two"}, r"llama\.block_count is 'two'; an integer from 1 up"),
            ({"llama.block_count": 0}, r"llama\.block_count is 0"),
            ({"llama.block_count": 2**32 - 1}, "lacks tensors of some of its 4294967295 layers"),
            ({"llama.attention.head_count": [2, 2]}, "head_count is array.*; an integer from 1 up"),
            ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan"),
            ({"llama.attention.value_length": 8}, "value_length differs from the head size 16"),
            ({"llama.rope.dimension_count": 8}, "dimension_count differs from the head size 16"),
            ({"llama.embedding_length": 64}, "'token_embd.weight' with rows of 64"),
            ({"llama.expert_count": 8}, "experts"),
            ({"llama.expert_count": [8, 8]}, "expert_count is array"),
            (
                {"llama.rope.scaling.type": "longrope"},
                "rope.scaling.type is 'longrope'; none, linear and yarn are supported",
            ),
            ({"llama.rope.scaling.type": [1, 2]}, "rope.scaling.type is array"),
            (
                {
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 4.0,
                    "llama.rope.scaling.attn_factor": 0.5,
                },
                "attn_factor differs from 1",
            ),
        ],
    )
    def test_facts_that_are_wrong_or_not_supported(
        self, metadata: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ModelError, match=rf"a\.gguf: .*{message}"):
            gguf_config(read_gguf(small_llama(tmp_path / "a.gguf", metadata)))

    def test_a_missing_fact_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"a\.gguf: llama\.embedding_length is missing"):
            gguf_config(read_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {})))

    def test_other_architectures_are_refused(self, tmp_path: Path) -> None:
        file = read_gguf(write_gguf(tmp_path / "a.gguf", "falcon", {}, {}))
        for read in (gguf_config, GGUFWeights):
            with pytest.raises(ModelError, match=r"a\.gguf: .*'falcon' is not supported; supported are llama, qwen2"):
                read(file)

    def test_a_tensor_without_a_place_is_refused_and_a_missing_one_named(self, tmp_path: Path) -> None:
        path = small_llama(tmp_path / "a.gguf", tensors={"blk.0.attn_sub_norm.weight": np.ones(32, np.float32)})
        with pytest.raises(ModelError, match=r"a\.gguf: .*attn_sub_norm"):
            GGUFWeights(read_gguf(path))
        weights = GGUFWeights(read_gguf(small_llama(tmp_path / "b.gguf")))
        assert "lm_head.weight" not in weights
        with pytest.raises(ModelError, match=r"b\.gguf: .*lm_head\.weight"):
            weights["lm_head.weight"]

    def test_rows_that_do_not_split_into_heads_are_refused(self, tmp_path: Path) -> None:
        weights = GGUFWeights(read_gguf(small_llama(tmp_path / "a.gguf", {"llama.attention.head_count": 5})))
        with pytest.raises(ModelError, match=r"a\.gguf: the 32 rows"):
            weights["model.layers.0.self_attn.q_proj.weight"]


def read_everything(path: Path) -> None:
    file = read_gguf(path)
    gguf_config(file)
    weights = GGUFWeights(file)
    for name in weights:
        weights[name]


class TestDamagedFiles:
    """Whatever is in a file, reading it gives its content or a ModelError that names the file."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is not a GGUF file"),
            (b"GGU", "is not a GGUF file"),
            (b"PK\x03\x04" + bytes(60), "is not a GGUF file"),
            (b"GGUF", "truncated"),
            (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; versions 2 and 3"),
            (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
            (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), f"no room for {2**62} tensors"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), f"no room for {2**64 - 1} metadata entries"),
        ],
    )
    def test_headers(self, content: bytes, message: str, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=rf"a\.gguf: .*{message}"):
            read_gguf(tmp_path / "a.gguf")

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (struct.pack("<IQ", 8, 2**63), "a text of 9223372036854775808 bytes"),
            (struct.pack("<IQ", 8, 2) + b"\xff\xfe", "not UTF-8"),
            (struct.pack("<IIQ", 9, 8, 2**40), "an array of 1099511627776 texts"),
            (struct.pack("<IIQ", 9, 6, 2**61), "an array of 2305843009213693952 numbers"),
            (struct.pack("<IIQ", 9, 9, 1) * 9, "elements of type 9"),
            (struct.pack("<I", 99), "unknown value type 99"),
        ],
    )
    def test_metadata_values(self, value: bytes, message: str, tmp_path: Path) -> None:
        content = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + value + bytes(100)
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=rf"a\.gguf: .*{message}"):
            read_gguf(tmp_path / "a.gguf")

    @pytest.mark.parametrize(
        ("dimensions", "kind", "offset", "message"),
        [
            ((32,), 0, 64, r"'w' ends at \d+, the file at \d+"),
            ((32,), 0, 2**63, "'w' ends at"),
            ((2**63, 2**63), 0, 0, "'w' ends at"),
            ((32,), 0, 4, "not a multiple of the alignment"),
            ((31,), 8, 0, r"type Q8_0 has shape \(31,\)"),
            ((0, 32), 0, 0, "has shape"),
            ((), 0, 0, "has 0 dimensions"),
            ((1,) * 5, 0, 0, "has 5 dimensions"),
            ((256,), 10, 0, "of type Q2_K; supported are F32, F16"),
            ((256,), 77, 0, "of type number 77"),
        ],
    )
    def test_tensor_descriptions(
        self, dimensions: tuple[int, ...], kind: int, offset: int, message: str, tmp_path: Path
    ) -> None:
        header = b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"w" + struct.pack("<I", len(dimensions))
        header += struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset)
        (tmp_path / "a.gguf").write_bytes(header + bytes(-len(header) % 32 + 128))
        with pytest.raises(ModelError, match=rf"a\.gguf: .*{message}"):
            read_gguf(tmp_path / "a.gguf")

    def test_names_that_occur_twice(self, tmp_path: Path) -> None:
        pair = struct.pack("<Q", 1) + b"k" + struct.pack("<IB", 0, 7)
        tensor = struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 1, 0, 0)
        path = tmp_path / "a.gguf"
        for content, message in (
            (struct.pack("<IQQ", 3, 0, 2) + pair + pair, "metadata key 'k' twice"),
            (struct.pack("<IQQ", 3, 2, 0) + tensor + tensor, "tensor 'w' twice"),
        ):
            path.write_bytes(b"GGUF" + content + bytes(64))
            with pytest.raises(ModelError, match=rf"a\.gguf: has the {message}"):
                read_gguf(path)

    def test_an_alignment_that_is_none(self, tmp_path: Path) -> None:
        for alignment in (0, 12, "32"):
            path = write_gguf(tmp_path / "a.gguf", "llama", {}, {})
            key = b"general.alignment"
            value = struct.pack("<II", 4, alignment) if isinstance(alignment, int) else struct.pack("<IQ", 8, 2) + b"32"
            path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + value)
            with pytest.raises(ModelError, match=r"a\.gguf: has the alignment"):
                read_gguf(path)

    def test_big_endian_files_and_parts_of_several_are_refused(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": np.ones(32, np.float32)}, big_endian=True)
        with pytest.raises(ModelError, match=r"a\.gguf: is a big-endian"):
            read_gguf(path)
        with pytest.raises(ModelError, match=r"b\.gguf: is one part of 3"):
            read_gguf(small_llama(tmp_path / "b.gguf", {"split.count": 3}))
        with pytest.raises(ModelError, match=r"c\.gguf: is one part of"):
            read_gguf(small_llama(tmp_path / "c.gguf", {"split.count": [1, 2]}))

    def test_missing_files_and_folders(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"a\.gguf: cannot be read: No such file"):
            read_gguf(tmp_path / "a.gguf")
        with pytest.raises(ModelError, match="cannot be read"):
            read_gguf(tmp_path)

    def test_truncation_anywhere_is_noticed(self, tmp_path: Path) -> None:
        content = small_llama(tmp_path / "whole.gguf").read_bytes()
        last = read_gguf(tmp_path / "whole.gguf").tensors["blk.0.attn_k.weight"]
        path = tmp_path / "a.gguf"
        for length in range(0, last.offset + last.nbytes, 7):
            path.write_bytes(content[:length])
            with pytest.raises(ModelError, match=r"a\.gguf: "):
                read_everything(path)

    def test_damage_anywhere_in_the_header_never_ends_in_another_error_or_much_memory(self, tmp_path: Path) -> None:
        content = small_llama(tmp_path / "whole.gguf").read_bytes()
        start = min(info.offset for info in read_gguf(tmp_path / "whole.gguf").tensors.values())
        path = tmp_path / "a.gguf"
        rng = np.random.default_rng(0)
        refusals = []
        tracemalloc.start()
        try:
            for position in range(start):
                for damage in (b"\xff", rng.bytes(1), b"\xff" * 8):
                    path.write_bytes(content[:position] + damage + content[position + len(damage) :])
                    try:
                        read_everything(path)
                    except ModelError as error:
                        refusals.append(str(error))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert 0 < len(refusals) < 3 * start
        assert all(message.startswith(f"{path}: ") for message in refusals)
        assert peak < 2_000_000


@pytest.mark.real
class TestBuiltinFiles:
    def test_smollm2(self) -> None:
        file = read_gguf(resolve("smollm2"))
        assert len(file.metadata["tokenizer.ggml.tokens"]) == gguf_config(file)["vocab_size"] == 49_152
        assert len(file.metadata["tokenizer.ggml.merges"]) == 48_900
        assert len(list(GGUFWeights(file))) == 272

    def test_gemma(self) -> None:
        file = read_gguf(resolve("gemma3-270m"))
        config = gguf_config(file)
        assert len(file.metadata["tokenizer.ggml.tokens"]) == config["vocab_size"] == 262_144
        # The published configuration has all of these; the file lacks them.
        assert config["rope_local_base_freq"] == 10_000
        assert config["query_pre_attn_scalar"] == 256
        assert [layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
        assert config["tie_word_embeddings"]
        assert len(list(GGUFWeights(file))) == 236

    @pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
    def test_every_type_in_the_file_unpacks_to_the_gguf_packages_values(self, name: str) -> None:
        file = read_gguf(resolve(name))
        seen = set()
        raw = np.memmap(file.path, np.uint8, "r")
        for tensor_name, info in file.tensors.items():
            if info.type.name in seen or info.shape[0] > 10_000:
                continue
            seen.add(info.type.name)
            tensor = file.tensor(tensor_name)
            data = raw[info.offset : info.offset + info.nbytes].reshape(info.shape[0], -1)
            expected = gguf.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[info.type.name])
            values = tensor.dequantize() if isinstance(tensor, GroupQuantized) else tensor
            np.testing.assert_array_equal(values.numpy(), expected.reshape(info.shape))
        assert len(seen) >= 2
