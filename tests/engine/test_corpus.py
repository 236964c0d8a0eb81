"""Texts to draft from: what a file may hold, and what is said where it does not."""

from pathlib import Path
from typing import Any

import pytest
from bytes_tokenizer import BytesTokenizer

from freewheel.engine.corpus import load_corpus, read_documents

TOKENIZER: Any = BytesTokenizer()


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_is_one_document(tmp_path: Path) -> None:
    assert read_documents(write(tmp_path, "a.txt", "one\n\ntwo é\n")) == ["one\n\ntwo é\n"]


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = '"one"\n{"text": "two\\nlines", "id": 7}\n\n{"text": "€"}'
    assert read_documents(write(tmp_path, "a.jsonl", lines)) == ["one", "two\nlines", "€"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '"fine"\n{"text": 1}\n', 'a.jsonl, line 2: must be a string, or an object with a string "text"'),
        ("a.jsonl", '"fine"\n\n{"text": "open}\n', "a.jsonl, line 3: is not JSON"),
        ("a.jsonl", '["list"]', "a.jsonl, line 1: must be a string"),
        ("a.jsonl", '"\\ud800"', "a.jsonl, line 1: has half of a surrogate pair"),
        ("a.txt", b"fine\nfine\n\xff\n", "a.txt, line 3: is not UTF-8"),
        ("a.txt", "", "a.txt: holds no text"),
        ("a.jsonl", "\n\n", "a.jsonl: holds no text"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_documents(write(tmp_path, name, content))


@pytest.mark.parametrize(("path", "message"), [("none.txt", "No such file"), (".", "directory"), ("a\0b", "cannot be")])
def test_a_file_that_cannot_be_read(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"draft_corpus: .*{message}"):
        read_documents(f"{tmp_path}/{path}")


def test_documents_do_not_run_into_each_other(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, "a.jsonl", '"abcd"\n"efgh"'), TOKENIZER)
    [match] = corpus.matches(TOKENIZER.encode("bcd"))
    assert match.length == 3
    assert corpus.continuation(match.position, 4) == []
    [match] = corpus.matches(TOKENIZER.encode("abc"))
    assert TOKENIZER.decode(corpus.continuation(match.position, 4)) == "d"
