"""A tokenizer whose tokens are bytes, with a few special ids, for tests of text without a model."""

from collections.abc import Sequence

from mock_model import VOCAB

END, START = VOCAB - 1, VOCAB - 2


class BytesTokenizer:
    """Ids stand for printable characters and, so that characters can be split, the bytes of a few longer ones."""

    special_ids = frozenset({START, END})
    eos_token_ids = frozenset({END})
    leading_spaces = 0
    vocab_size = VOCAB
    _bytes = tuple(bytes([byte]) for byte in "abcdefghijklmnopqrstuvwxyz .,!?é€".encode())

    def token_bytes(self, id: int) -> bytes:
        if id in self.special_ids:
            return b"<end>" if id == END else b"<start>"
        return self._bytes[id] if id < len(self._bytes) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [self._bytes.index(bytes([byte])) for byte in text.encode()]

    def encode_within(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [id for id in ids if not (skip_special_tokens and id in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        return [self.encode(word) for word in words]
