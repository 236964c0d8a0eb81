"""Small tokenizers of every supported kind, trained on the spot, and the same as GGUF metadata."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then the other dog jumps over the fox.",
    "def add(a, b):\n    return a + b\n\n\nclass Thing:\n\tpass\n",
    "In 1984 there were 365 days; 12 months; 3.14159 is near enough.",
    "Été à la plage: déjà vu, naïve café. Привет, мир! Ещё раз привет.",
    "你好，世界。你好吗？ 😀 😀😀 👩‍👩‍👧",
] * 4


@cache
def byte_level(digits: bool = False) -> Tokenizer:
    """GPT-2's kind: byte-level BPE; ``digits`` splits numbers as SmolLM does."""
    tokenizer = Tokenizer(models.BPE())
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True), gpt2]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if digits else gpt2
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|start|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


@cache
def sentencepiece(space_prefix: bool = True, words: bool = True, metaspace: bool = False) -> Tokenizer:
    """Llama 2's kind: BPE with byte fallback, spaces as U+2581.

    Args:
        space_prefix: a space goes before every text (Llama 2) or not (Gemma).
        words: pieces begin at spaces, as in practice; else they may span several words.
        metaspace: spaces are handled by the Metaspace pre-tokenizer and decoder.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    if words:
        trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted(model["vocab"], key=model["vocab"].get)
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        replace = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_prefix else replace
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * space_prefix)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **files: dict[str, Any]) -> Path:
    """``tokenizer.json`` and the named JSON files (``config=...`` becomes ``config.json``)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def gguf_metadata(tokenizer: Tokenizer, kind: str, user_defined: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """What a GGUF file of ``tokenizer`` holds: ``kind`` is gpt2 (with merges) or llama (with scores).

    ``user_defined`` tokens are appended; ``more`` sets further ``tokenizer.ggml`` keys.
    """
    model = json.loads(tokenizer.to_str())["model"]
    tokens: list[str] = [tokenizer.id_to_token(id) or "" for id in range(tokenizer.get_vocab_size())]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()} - special
    tokens += user_defined
    types = [
        3 if token in special else 4 if token in added or token in user_defined else 6 if token.startswith("<0x") else 1
        for token in tokens
    ]
    values: dict[str, Any] = {"model": kind, "tokens": tokens, "token_type": types}
    if kind == "gpt2":
        values |= {"merges": [" ".join(merge) for merge in model["merges"]], "pre": "gpt-2"}
    else:
        rank = {left + right: rank for rank, (left, right) in reversed(list(enumerate(model["merges"])))}
        values["scores"] = [-float(rank.get(token, 10_000 + id)) for id, token in enumerate(tokens)]
    return tokenizer_metadata(values | more)


def tokenizer_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.ggml`` keys, arrays of numbers as :func:`freewheel.models.gguf.read_gguf` gives them."""
    return {
        f"tokenizer.ggml.{key}": np.array(value) if key in ("scores", "token_type") and value else value
        for key, value in values.items()
    }
