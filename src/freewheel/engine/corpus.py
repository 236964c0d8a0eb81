"""Texts to draft from, as a file holds them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from freewheel.speculative import NgramIndex

if TYPE_CHECKING:
    from freewheel.models.tokenizer import Tokenizer


def load_corpus(path: str | Path, tokenizer: "Tokenizer") -> NgramIndex:
    """An index of the documents in a file; see :func:`read_documents`. It takes 28 to 40 bytes a token.

    Raises:
        ValueError: see :func:`read_documents`.
    """
    return NgramIndex.corpus([tokenizer.encode(document) for document in read_documents(path)])


def read_documents(path: str | Path) -> list[str]:
    """The texts of a file: of one that ends with ``.jsonl`` a document a line, else all that it holds.

    A line of JSON is a string, or an object with a string ``text``. Empty lines are left out.

    Raises:
        ValueError: the file can't be read, or a line is not as it should be; names file and line.
    """
    name = f"draft_corpus: {path}"
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    lines = [_decode(line, f"{name}, line {number}") for number, line in enumerate(data.split(b"\n"), 1)]
    if Path(path).suffix != ".jsonl":
        documents = ["\n".join(lines)]
    else:
        numbered = enumerate(lines, 1)
        documents = [_document(line, f"{name}, line {number}") for number, line in numbered if line.strip()]
    if not any(documents):
        raise ValueError(f"{name}: holds no text")
    return documents


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{place}: is not UTF-8") from None


def _document(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: is not JSON: {error}") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f'{place}: must be a string, or an object with a string "text"')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: has half of a surrogate pair") from None
    return text
