"""Loading by name: a folder against transformers, the built-in models by their loss, and what load() imports."""

import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import convert
from gguf_files import tiny_model as tiny_gguf_model
from torch import Tensor

from freewheel.models import ModelError
from freewheel.models.decoder import Decoder, kv_cache_shape
from freewheel.models.load import DType, LoadedModel, _natural_dtype, load
from freewheel.ops.rows import RowBatch

PAGE = 16
TEXT = (
    "The old lighthouse stood at the edge of the cliff, where the wind never seemed to rest. Every evening the keeper "
    "climbed the narrow stairs to light the lamp, and every morning he came down again to write a few lines in his "
    "book about the weather, the ships and the birds. He had lived there for so many years that he no longer noticed "
    "the sound of the waves, but he always noticed when they stopped."
)


def prefill(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """float32 logits after each token."""
    count, pages = len(tokens), -(-len(tokens) // PAGE)
    shape = kv_cache_shape(decoder.spec, pages, PAGE)
    kv = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(decoder.spec.num_layers)]
    rows = torch.arange(count)
    batch = RowBatch(torch.tensor(tokens), rows, rows, [range(pages)], rows, (count,), (count,))
    with torch.inference_mode():
        return decoder.forward(batch, kv).float()


def loss(model: LoadedModel) -> float:
    tokens = model.tokenizer.encode(TEXT)
    logits = prefill(model.decoder, tokens)[:-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item()


def test_a_folder_runs_like_transformers(tiny_model: Path) -> None:
    model = load(tiny_model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = model.tokenizer.encode("the other theme")
    with torch.inference_mode():
        right = reference(torch.tensor([tokens])).logits[0]
    assert model.decoder.dtype == torch.float32, "the type of the checkpoint"
    torch.testing.assert_close(prefill(model.decoder, tokens), right, rtol=1e-4, atol=1e-4)


def test_the_text_part_of_a_multimodal_folder(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    text = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28})  # pyright: ignore
    reference = transformers.Gemma3ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = model.tokenizer.encode("the other theme")
    with torch.inference_mode():
        right = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(prefill(model.decoder, tokens), right, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_close(tiny_model: Path) -> None:
    tokens = list(range(40))
    exact, rounded = (prefill(load(tiny_model, dtype=dtype).decoder, tokens) for dtype in ("float32", "bfloat16"))
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()


def test_refuses_unknown_types_and_models(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of auto, int8, float32, bfloat16, float16, not 'int4'"):
        load(tiny_model, dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="unknown model"):
        load("no-such-model")
    with pytest.raises(ModelError, match="model must be a name or a path, not list"):
        load(["smollm2"])  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["", "foo", "meta", "CPU", "cpu:1", "cuda:-1", "cuda:99999999999", 5, None])
def test_refuses_a_device_that_does_not_exist(device: Any) -> None:
    with pytest.raises(ValueError, match=f"device must be 'cpu', 'cuda' or 'cuda:N', not '{device}'"):
        load("no-such-model", device=device)


@pytest.mark.parametrize(
    ("found", "device"), [(0, "cuda"), (0, "cuda:0"), (2, torch.device("cuda:2")), (1, "cuda:256")]
)
def test_refuses_a_cuda_device_that_torch_does_not_see(
    found: int, device: torch.device | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with pytest.raises(ValueError, match=f"device is '{device}', but the number of CUDA devices .* is {found}"):
        load("no-such-model", device=device)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_quantised_weights_become_bfloat16_on_cuda_devices(device: str, dtype: torch.dtype) -> None:
    assert _natural_dtype({"model.layers.0.mlp.down_proj.weight": "quantised"}, torch.device(device)) is dtype  # pyright: ignore[reportArgumentType]


def test_an_unsupported_config_is_named_with_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().replace("silu", "relu")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=rf"{tmp_path}.*activation 'relu' is not supported"):
        load(tmp_path)


def test_a_gguf_file_with_an_unusable_tokenizer_is_named(tmp_path: Path) -> None:
    path = convert(tmp_path / "model.gguf", "llama", tiny_gguf_model("llama"))
    with pytest.raises(ModelError, match=rf"^{path}: the GGUF file has no tokenizer\.ggml\.pre"):
        load(path)


def test_imports_only_what_it_needs(tiny_model: Path) -> None:
    heavy = ["transformers", "huggingface_hub", "jinja2", "gguf", "freewheel.models.gguf", "freewheel.engine"]
    code = f"""
import sys
from freewheel.models.load import load
load({str(tiny_model)!r})
print([name for name in {heavy} if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "exact"),
    # Llama's queries and keys left in GGUF's order would give 4.3, Gemma without its first token 5 and more.
    [("smollm2", 2.905), ("gemma3-270m", 2.897)],
)
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 0.002), ("bfloat16", 0.02), ("auto", 0.05)])
def test_loss_of_the_builtin_models(name: str, exact: float, dtype: DType, allowed: float) -> None:
    assert math.isclose(loss(load(name, dtype=dtype)), exact, abs_tol=allowed)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_decode_step_gives_the_same_logits_in_any_batch(name: str, dtype: DType) -> None:
    decoder = load(name, dtype=dtype).decoder
    lengths = torch.tensor([5, 64, 256, 130, 700, 31, 1, 513])
    table = torch.randperm(8 * 44, generator=torch.Generator().manual_seed(0)).view(8, 44)
    torch.manual_seed(0)
    shape = kv_cache_shape(decoder.spec, table.numel(), PAGE)
    kv = [torch.randn(shape, dtype=decoder.dtype) for _ in range(decoder.spec.num_layers)]

    def step(*sequences: int) -> Tensor:
        chosen = list(sequences)
        pages, positions = table[chosen], lengths[chosen] - 1
        slots = pages.gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE
        rows = torch.arange(len(chosen))
        kv_lengths = tuple((positions + 1).tolist())
        tokens, counts = 100 + torch.tensor(chosen), (1,) * len(chosen)
        batch = RowBatch(tokens, positions, slots, pages.tolist(), rows, counts, kv_lengths)
        with torch.inference_mode():
            return decoder.forward(batch, kv)

    together = step(*range(8))
    for sequence in range(8):
        # Equal bits where MKL and oneDNN sum in one order (see ops), else equal up to the number format's rounding.
        allowed = (1e-5 if dtype == "float32" else 1e-2) * together[sequence].norm()
        assert (step(sequence)[0] - together[sequence]).norm() <= allowed
        assert (step((sequence + 3) % 8, sequence)[1] - together[sequence]).norm() <= allowed
