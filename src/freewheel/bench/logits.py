"""Logits for the sampler's benchmark: random ones, and a model's own, recorded while it writes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from freewheel.engine.runner import Decoder
    from freewheel.ops.rows import RowBatch

# What a model with a chat template is asked, and what one without continues.
PROMPTS = {
    "Tell me a story about a man who waits for a ferry.": "The ferry was late again, and the old man on the pier had",
    "How is glass made?": "Glass is made by heating sand until it melts. Once it has cooled,",
    "Write a Python function that merges sorted lists.": "def merge(left: list[int], right: list[int]) -> list[int]:",
    "Count each customer's orders in SQL.": "SELECT customers.name, count(*) AS orders\nFROM customers\n",
    "My bicycle squeaks when it rains. What can I do?": "Customer: My bicycle squeaks when it rains.\nMechanic:",
    "Hi! Are you free on Saturday?": "Anna: Are you coming on Saturday?\nBen: I'm not sure yet.\nAnna:",
    "Write a shopping list for a picnic.": "Shopping list:\n- 1 kg of potatoes\n- a dozen eggs\n-",
    "List the ten largest cities of Europe.": "The largest cities of Europe:\n1. Istanbul\n2. Moscow\n3.",
}
TEMPERATURE = 1.0
MIN_VOCAB = 256  # the cases name ids up to here
CACHE_BYTES = 60 << 20  # the largest cache of a GPU


@dataclass(frozen=True)
class Recording:
    """A model's logits: bfloat16 [positions, vocab]; at position i of prompt p in row ``i * len(PROMPTS) + p``."""

    model: str
    rows: "Tensor"


class _Listener:
    """A decoder that keeps the logits of its last step."""

    def __init__(self, decoder: "Decoder") -> None:
        self.decoder = decoder
        self.logits: Tensor | None = None

    def forward(self, batch: "RowBatch", kv: Sequence["Tensor"]) -> "Tensor":
        self.logits = self.decoder.forward(batch, kv)
        return self.logits


def record(path: Path, name: str, positions: int) -> list[str]:
    """Let a model answer or continue ``PROMPTS``, all at once, and write the logits from which it draws, unchanged.

    The file is safetensors: "logits" as in :class:`Recording`, and in its metadata the model, the temperature, and the
    texts, prompts included, as a JSON list. End-of-sequence ids are held back, so that the text goes on.

    Returns:
        The texts.

    Raises:
        ValueError: the folder does not exist, or the positions exceed the model's context.
        ModelError: the model cannot be found, read or run.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"record: {str(path)!r} is not a file in a folder that exists")
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    from freewheel.cache.pool import KVPool
    from freewheel.engine.runner import Runner, Span
    from freewheel.models.decoder import kv_cache_shape
    from freewheel.models.load import load
    from freewheel.sampling import Sampler, SamplingParams, SamplingState

    model = load(name)
    tokenizer, steps = model.tokenizer, -(-positions // len(PROMPTS))
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": request}])[0]
        if tokenizer.chat_template
        else tokenizer.encode(text)
        for request, text in PROMPTS.items()
    ]
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths) + steps
    if longest > model.spec.max_positions:
        most = (model.spec.max_positions - max(lengths)) * len(PROMPTS)
        raise ValueError(f"positions must be at most {most} for this model, not {positions}")
    state = SamplingState(len(prompts), model.spec.vocab_size, longest, valid_vocab_size=tokenizer.vocab_size)
    params = SamplingParams(temperature=TEMPERATURE, min_tokens=steps, max_tokens=steps)
    storage = torch.zeros(
        model.spec.num_layers, *kv_cache_shape(model.spec, len(prompts), longest), dtype=model.decoder.dtype
    )
    pool, listener = KVPool(storage, slots=len(prompts)), _Listener(model.decoder)
    for slot, prompt in enumerate(prompts):
        state.join(slot, params, prompt, seed=slot, end_ids=tokenizer.eos_token_ids)
        pool.set_pages(slot, 0, [slot])
    runner, rows = Runner(listener, pool, Sampler(state)), []
    spans = [Span(slot, 0, length, sample=True) for slot, length in enumerate(lengths)]
    with tqdm(total=positions, desc=f"recording {name}", unit="position", disable=None) as bar:
        for step in range(steps):
            runner.launch(spans)
            assert listener.logits is not None
            rows.append(listener.logits.bfloat16())
            spans = [Span(slot, length + step, 1, sample=True) for slot, length in enumerate(lengths)]
            bar.update(min(len(prompts), positions - bar.n))
    texts = [
        tokenizer.decode(state.history[slot, : length + steps].tolist(), skip_special_tokens=False)
        for slot, length in enumerate(lengths)
    ]
    metadata = {"model": name, "temperature": str(TEMPERATURE), "texts": json.dumps(texts)}
    save_file({"logits": torch.cat(rows)[:positions].contiguous()}, path, metadata)
    return texts


def read_recording(path: Path) -> Recording:
    """What :func:`record` wrote.

    Raises:
        ValueError: the file cannot be read, or is none of these.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            rows, metadata = file.get_tensor("logits"), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"logits: cannot read {str(path)!r}: {error}") from error
    if rows.dim() != 2 or not len(rows) or rows.shape[1] < MIN_VOCAB or not rows.is_floating_point():
        raise ValueError(f"logits: {str(path)!r} has no rows of at least {MIN_VOCAB} logits")
    return Recording(metadata.get("model", "unknown"), rows)


def recorded_logits(rows: "Tensor", batch: int, dtype: str, device: str) -> "Tensor":
    """Recorded rows as logits [buffers, batch, vocab].

    Each buffer begins at another row, as long as there are rows; after the last one the first follows.
    """
    import torch

    count = _buffers(batch, rows.shape[1], dtype, device)
    starts = torch.arange(count) * len(rows) // count
    index = (starts[:, None] + torch.arange(batch)) % len(rows)
    return rows.to(device, getattr(torch, dtype))[index.to(device)]


def random_logits(batch: int, vocab: int, dtype: str, device: str) -> "Tensor":
    """Logits [buffers, batch, vocab]: normal, three wide, with a few peaks."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    shape = _buffers(batch, vocab, dtype, device), batch, vocab
    logits = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    for one in logits:
        values = torch.randn(batch, vocab, generator=generator, device=device) * 3
        peaks = torch.randint(vocab, (batch, 5), generator=generator, device=device)
        one.copy_(values.scatter_add_(1, peaks, torch.full((batch, 5), 12.0, device=device)))
    return logits


def _buffers(batch: int, vocab: int, dtype: str, device: str) -> int:
    """As many as a GPU's cache can't hold; four on a CPU."""
    import torch

    return 4 if device == "cpu" else max(4, -(-CACHE_BYTES // (batch * vocab * getattr(torch, dtype).itemsize)))
