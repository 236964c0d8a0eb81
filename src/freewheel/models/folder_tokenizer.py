"""Tokenizers from folders in the Hugging Face layout: ``tokenizer.json`` and the small files beside it."""

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from freewheel.models.errors import ModelError
from freewheel.models.files import read_json, read_text
from freewheel.models.tokenizer import LibraryEncoder, Tokenizer, byte_level_bytes

_CONFIG = "tokenizer_config.json"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def folder_tokenizer(folder: Path) -> Tokenizer:
    """See :meth:`Tokenizer.from_folder`."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder}: has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
        prefix_ids, suffix_ids = _begin_and_end(backend)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: cannot be read: {error}") from error
    text_bytes, leading_spaces = _decoder(backend, path)

    config = _read_json_if_any(folder / _CONFIG)
    named = _named_tokens(_read_json_if_any(folder / "special_tokens_map.json") | config)
    bos, eos = (_id_of(backend, named.get(name), path) for name in ("bos_token", "eos_token"))
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        LibraryEncoder(backend),
        token_text=backend.id_to_token,
        text_bytes=text_bytes,
        vocab_size=max(backend.get_vocab_size(), 1 + max(added, default=-1)),
        special_ids=[id for id, token in added.items() if token.special],
        added_ids=added,
        bos_token_id=bos,
        eos_token_ids=_end_ids(folder / "config.json")
        | _end_ids(folder / "generation_config.json")
        | ({eos} if eos is not None else set()),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        leading_spaces=leading_spaces,
        chat_templates=_chat_templates(folder, config),
        named_tokens=named,
    )


def _read_json_if_any(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    return read_json(path) if path.exists() else {}


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
    try:
        id = backend.token_to_id(text)
    except UnicodeEncodeError:  # a lone surrogate
        id = None
    if id is None:
        raise ModelError(f"{path.with_name(_CONFIG)}: names {text!r}, which {path.name} does not have")
    return id


def _end_ids(path: Path) -> set[int]:
    """What a configuration says of ``eos_token_id``, for the whole model or its text part: an id, several, or null."""
    config = _read_json_if_any(path)
    text_config = config.get("text_config") or {}
    if not isinstance(text_config, dict):
        raise ModelError(f"{path}: text_config is not an object")
    ids: set[int] = set()
    for value in (config.get("eos_token_id"), text_config.get("eos_token_id")):
        for id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(id, int) or isinstance(id, bool) or id < 0:
                raise ModelError(f"{path}: eos_token_id must hold token ids, not {reprlib.repr(id)}")
            ids.add(id)
    return ids


def _begin_and_end(backend: Any) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text; it has the last word, whatever else a file says."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    match config.get("chat_template"):
        case None:
            pass
        case str(template):
            templates["default"] = template
        case list(entries):
            for entry in entries:
                match entry:
                    case {"name": str(name), "template": str(template)}:
                        templates[name] = template
                    case _:
                        raise ModelError(f"{folder / _CONFIG}: chat_template has an entry without name and template")
        case other:
            raise ModelError(f"{folder / _CONFIG}: chat_template must be text, not {reprlib.repr(other)}")
    if (folder / "chat_template.jinja").exists():
        templates["default"] = read_text(folder / "chat_template.jinja")
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        templates[path.stem] = read_text(path)
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
        if byte_fallback and (byte := _BYTE.fullmatch(text)):
            return bytes.fromhex(byte[1])
        for pattern, content in replacements:
            text = text.replace(pattern, content)
        return text.encode()

    return text_bytes, leading_spaces
