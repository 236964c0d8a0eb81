"""Tokenizers from GGUF metadata.

The reference is the tokenizer the model was trained with, which for the supported kinds is also what llama.cpp does:

- ``gpt2``, byte-level BPE: the pre-tokenizer that ``tokenizer.ggml.pre`` names, with its expressions as the models' own
  ``tokenizer.json`` has them. SmolLM splits numbers into digits; Qwen2 normalises to NFC, which llama.cpp leaves out.
- ``llama``, SentencePiece BPE: :class:`~freewheel.models.sentencepiece.SentencePieceBPE`. User-defined tokens (Gemma
  has some for runs of spaces and of line breaks, and for HTML tags) are found in the raw text first, the longest at
  each place, and never merge with their neighbours: 40 spaces before a word are the tokens of 31 and of 9 spaces, and
  the word has none of its own.

transformers (5.17) rebuilds a tokenizer from the same metadata and differs: it leaves out SmolLM's digits, and it ranks
Gemma's merges otherwise, so that ordinary words come in more pieces ("▁world" as "▁w", "or", "ld").
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from freewheel.models.errors import ModelError
from freewheel.models.sentencepiece import SPACE, SentencePieceBPE
from freewheel.models.tokenizer import Encoder, LibraryEncoder, Tokenizer, byte_level_bytes

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# Control tokens that end a turn or a text wherever they exist. A GGUF file has room for one end-of-text id, and the
# others of the model's generation configuration are lost in conversion.
_END_TEXTS = frozenset(
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "</s>"]
)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Expression of each kind of pre-tokenizer, None for GPT-2's, and the names that files give it.
_EXPRESSIONS = {"llama3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN, "gpt2": None, "digits": None}
_KINDS = {
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "smaug-bpe": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
    "gpt-2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
}

# Kinds whose models keep a word that is a token whole, even where no merges lead to it, and begin a text with a token.
_WHOLE_WORDS = ("llama3", "tekken")


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """See :meth:`Tokenizer.from_gguf`."""
    tokens = _texts(metadata, "tokens")
    ids = _ids_by_type(metadata, len(tokens))
    model = _text(metadata, "model")
    if model == "gpt2":
        kind = _pre_tokenizer_kind(metadata)
        encoder, begins = _byte_level(metadata, tokens, ids, kind), kind in _WHOLE_WORDS
        text_bytes, leading_spaces = byte_level_bytes, 0
    elif model == "llama":
        space_prefix = _flag(metadata, "add_space_prefix", True)
        encoder, begins = _sentencepiece(metadata, tokens, ids, space_prefix), True
        byte_texts = {tokens[id]: bytes([byte]) for byte, id in _byte_ids(tokens, ids).items()}
        leading_spaces = int(space_prefix)

        def text_bytes(text: str) -> bytes:
            return byte_texts.get(text) or text.replace(SPACE, " ").encode()
    else:
        raise ModelError(f"tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)")

    named = {
        name: _token_id(metadata, key, len(tokens))
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    bos, eos = named["bos"], named["eos"]
    special_ids = ids[_CONTROL] + ids[_UNKNOWN]
    ends = {eos, *(_token_id(metadata, key, len(tokens)) for key in ("eot", "eom"))} - {None}
    ends |= {id for id in special_ids if tokens[id] in _END_TEXTS}
    templates = {
        name: metadata[key]
        for name, key in {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}.items()
        if key in metadata
    }
    if not all(isinstance(template, str) for template in templates.values()):
        raise ModelError("tokenizer.chat_template is not text")
    return Tokenizer(
        encoder,
        token_text=lambda id: tokens[id],
        text_bytes=text_bytes,
        vocab_size=len(tokens),
        special_ids=special_ids,
        added_ids=ids[_CONTROL] + ids[_UNKNOWN] + ids[_USER_DEFINED],
        bos_token_id=bos,
        eos_token_ids=[id for id in ends if id is not None],
        prefix_ids=[bos] if bos is not None and _flag(metadata, "add_bos_token", begins) else [],
        suffix_ids=[eos] if eos is not None and _flag(metadata, "add_eos_token", False) else [],
        leading_spaces=leading_spaces,
        chat_templates=templates,
        named_tokens={f"{name}_token": tokens[id] for name, id in named.items() if id is not None},
    )


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise ModelError(f"the GGUF file has no tokenizer.ggml.{name}")
    return value


def _text(metadata: Mapping[str, Any], name: str) -> str:
    value = _required(metadata, name)
    if not isinstance(value, str):
        raise ModelError(f"tokenizer.ggml.{name} is not text")
    return value


def _texts(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    values = _required(metadata, name)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):  # GGUF's arrays have one type
        raise ModelError(f"tokenizer.ggml.{name} is not an array of texts, or an empty one")
    return values


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"tokenizer.ggml.{name} is neither true nor false")
    return value


def _numbers(metadata: Mapping[str, Any], name: str, count: int, kinds: str) -> NDArray[Any]:
    """An array with a number, of one of NumPy's ``kinds`` of types, for each token."""
    values = _required(metadata, name)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or values.ndim != 1:
        raise ModelError(f"tokenizer.ggml.{name} is not an array of such numbers as it should have")
    if len(values) != count:
        raise ModelError(f"the GGUF file has {count} tokens and {len(values)} {name.replace('_', ' ').rstrip('s')}s")
    return values


def _ids_by_type(metadata: Mapping[str, Any], count: int) -> dict[int, list[int]]:
    if "tokenizer.ggml.token_type" in metadata:
        types = _numbers(metadata, "token_type", count, "iu")
    else:
        types = np.full(count, _NORMAL)
    return {
        type: np.flatnonzero(types == type).tolist() for type in (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    }


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if id is None:
        return None
    if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < count:
        raise ModelError(f"tokenizer.ggml.{name}_token_id is {reprlib.repr(id)}, and the GGUF file has {count} tokens")
    return id


def _added_ids(tokens: Sequence[str], ids: Mapping[int, list[int]]) -> dict[str, int]:
    """Tokens that are found in the raw text."""
    return {tokens[id]: id for type in (_UNKNOWN, _CONTROL, _USER_DEFINED) for id in ids[type] if tokens[id]}


def _byte_ids(tokens: Sequence[str], ids: Mapping[int, list[int]]) -> dict[int, int]:
    spelt = {f"<0x{byte:02X}>": byte for byte in range(256)}
    try:
        return {spelt[tokens[id]]: id for id in ids[_BYTE]}
    except KeyError as error:
        raise ModelError(f"the GGUF file has a byte token that is not spelt <0x00> to <0xFF>: {error}") from error


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[int, list[int]], space_prefix: bool
) -> Encoder:
    scores = _numbers(metadata, "scores", len(tokens), "fiu")
    if np.isnan(scores).any():
        raise ModelError("tokenizer.ggml.scores holds NaN")
    return SentencePieceBPE(
        tokens,
        scores.tolist(),
        pieces=ids[_NORMAL],
        added=_added_ids(tokens, ids),
        byte_ids=_byte_ids(tokens, ids),
        unknown_id=_token_id(metadata, "unknown", len(tokens)),
        space_prefix=space_prefix,
    )


def _pre_tokenizer_kind(metadata: Mapping[str, Any]) -> str:
    # llama.cpp guesses here, and warns that the quality of what comes will be degraded.
    name = _text(metadata, "pre")
    kind = _KINDS.get(name)
    if kind is None:
        raise ModelError(f"tokenizer.ggml.pre {name!r} is not supported ({', '.join(sorted(_KINDS))} are)")
    return kind


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[int, list[int]], kind: str) -> Encoder:
    import tokenizers
    from tokenizers import AddedToken, models, normalizers

    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in _texts(metadata, "merges")]
    vocabulary = {text: id for id, text in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=kind in _WHOLE_WORDS)
    except Exception as error:  # the library raises plain Exception, for a merge that names no token
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(kind)
    backend.add_tokens([AddedToken(text, normalized=False) for text in _added_ids(tokens, ids)])
    return LibraryEncoder(backend)


def _pre_tokenizer(kind: str) -> "pre_tokenizers.PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    expression = _EXPRESSIONS[kind]
    if expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2
