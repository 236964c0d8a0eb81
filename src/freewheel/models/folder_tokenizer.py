"""Tokenizers from folders in the Hugging Face layout: ``tokenizer.json`` and the small files beside it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from freewheel.models.errors import ModelError
from freewheel.models.tokenizer import LibraryEncoder, Tokenizer, byte_level_bytes


def folder_tokenizer(folder: Path) -> Tokenizer:
    """See :meth:`Tokenizer.from_folder`."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    text_bytes, leading_spaces = _decoder(backend, path)

    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(_read_json(folder / "special_tokens_map.json") | config)
    bos, eos = (_id_of(backend, named.get(name), path) for name in ("bos_token", "eos_token"))
    added = backend.get_added_tokens_decoder()
    model_config = _read_json(folder / "config.json")
    prefix_ids, suffix_ids = _begin_and_end(backend)
    return Tokenizer(
        LibraryEncoder(backend),
        token_text=backend.id_to_token,
        text_bytes=text_bytes,
        vocab_size=max(backend.get_vocab_size(), 1 + max(added, default=-1)),
        special_ids=[id for id, token in added.items() if token.special],
        bos_token_id=bos,
        eos_token_ids=_ids(eos)
        | _ids(model_config.get("eos_token_id"))
        | _ids((model_config.get("text_config") or {}).get("eos_token_id"))
        | _ids(_read_json(folder / "generation_config.json").get("eos_token_id")),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        leading_spaces=leading_spaces,
        chat_templates=_chat_templates(folder, config),
        named_tokens=named,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the tokens called "bos_token" and the like, which are written as text or as an added token."""
    texts = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, Mapping) else token
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _id_of(backend: Any, text: str | None, path: Path) -> int | None:
    if text is None:
        return None
    id = backend.token_to_id(text)
    if id is None:
        raise ModelError(f"tokenizer_config.json names {text!r}, which {path} does not have")
    return id


def _ids(value: Any) -> set[int]:
    """The ids of an ``eos_token_id`` entry: one, a list of them, or null."""
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def _begin_and_end(backend: Any) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text; it has the last word, whatever else a file says."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stored = config.get("chat_template") or {}
    if isinstance(stored, str):
        stored = {"default": stored}
    elif isinstance(stored, list):
        stored = {entry["name"]: entry["template"] for entry in stored}
    templates = dict(stored)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def _decoder(backend: Any, path: Path) -> tuple[Callable[[str], bytes], int]:
    """What a token's spelling stands for, and how many leading spaces of a text are dropped.

    Byte-level, Metaspace and SentencePiece-like decoders (replacements, byte fallback, a strip at the start) map each
    token to bytes on its own. Others (WordPiece, CTC, word suffixes) depend on neighbours; no supported model has one.
    """
    decoder: dict[str, Any] = (
        {"type": "none"} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    )
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replacements: list[tuple[str, str]] = []
    byte_fallback, byte_level, fused, leading_spaces = False, False, False, 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": content} if len(pattern) == 1:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": pattern, "prepend_scheme": scheme}:
                replacements.append((pattern, " "))
                fused, leading_spaces = True, int(scheme != "never")
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                leading_spaces = start
            case _:
                raise ModelError(f"{path}: the decoder {step['type']} is not supported")
    if byte_level and len(steps) == 1:
        return byte_level_bytes, 0
    if byte_level or not fused:
        raise ModelError(f"{path}: its decoder is not supported: {[step['type'] for step in steps]}")

    def text_bytes(text: str) -> bytes:
        if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        for pattern, content in replacements:
            text = text.replace(pattern, content)
        return text.encode()

    return text_bytes, leading_spaces
