"""SentencePiece's BPE over the vocabulary and scores of a GGUF file, which stores no merges.

SentencePiece (Kudo and Richardson, arXiv:1808.06226) merges, again and again, the adjacent pair whose concatenation has
the highest score, leftmost first. That needs a dictionary of the pieces and their scores and nothing else. Handing the
same vocabulary to a rank-based BPE first means finding the half million pairs of pieces that form another piece; here
262,144 tokens are ready in the time it takes to fill the dictionary.
"""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

SPACE = "▁"  # U+2581: how pieces spell a space

# Longer stretches without a break are not worth keeping: they do not come again.
_CACHED_WORDS = 1 << 15
_CACHED_LENGTH = 64


class SentencePieceBPE:
    """Text to ids.

    Args:
        tokens: the text of every id.
        scores: of every id; only their order matters.
        pieces: ids that merging may produce: normal pieces, not control, byte, unknown or added ones.
        added: text of the tokens that are found in the raw text, longest first, before anything else; to their ids.
        byte_ids: id of each byte that has one, for characters without a piece.
        unknown_id: for characters that have neither; None drops them.
        space_prefix: a space is put before the text and after each added token, as Llama 2 was trained with.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        *,
        pieces: Sequence[int],
        added: Mapping[str, int],
        byte_ids: Mapping[int, int],
        unknown_id: int | None,
        space_prefix: bool,
    ) -> None:
        self._tokens = tokens
        self._scores = scores
        self._added = added
        self._byte_ids = byte_ids
        self._unknown = () if unknown_id is None else (unknown_id,)
        self._prefix = SPACE if space_prefix else ""
        texts = [tokens[id] for id in pieces]
        self._ids = dict(zip(texts, pieces, strict=True))
        # No piece spans a space that follows another character than these (">" alone in Gemma's vocabulary). So the
        # text can be cut at the others, and words repeat where texts do not.
        glue = set(re.findall(f"([^\0])(?={SPACE})", "\0".join(texts)))
        before = f"(?<=[^{re.escape(''.join(sorted(glue)))}])" if glue else "(?!^)"
        self._cut = re.compile(f"{before}(?={SPACE})")
        self._cached_word = lru_cache(_CACHED_WORDS)(self._word)
        self._added_lengths: dict[str, list[int]] = {}
        for text in sorted(added, key=len, reverse=True):
            lengths = self._added_lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        self._added_starts = re.compile(f"[{re.escape(''.join(sorted(self._added_lengths)))}]" if added else r"(?!)")

    def encode(self, text: str, ignored: str = "") -> list[int]:
        """Ids of ``text``. Characters in ``ignored`` keep added tokens from being found and are then left out."""
        ids: list[int] = []
        done = 0
        for start, end in self._find_added(text):
            self._encode_plain(text[done:start], ignored, ids)
            ids.append(self._added[text[start:end]])
            done = end
        self._encode_plain(text[done:], ignored, ids)
        return ids

    def _find_added(self, text: str) -> Iterator[tuple[int, int]]:
        done = 0
        for match in self._added_starts.finditer(text):
            start = match.start()
            if start < done:
                continue
            for length in self._added_lengths[text[start]]:
                if text[start : start + length] in self._added:
                    done = start + length
                    yield start, done
                    break

    def _encode_plain(self, text: str, ignored: str, ids: list[int]) -> None:
        for character in ignored:
            text = text.replace(character, "")
        if text:
            text = self._prefix + text.replace(" ", SPACE)
            for word in self._cut.split(text):
                ids.extend(self._cached_word(word) if len(word) <= _CACHED_LENGTH else self._word(word))

    def _word(self, word: str) -> tuple[int, ...]:
        symbols: list[str | None] = list(word)
        end = len(symbols)
        after = list(range(1, end + 1))
        before = list(range(-1, end))
        candidates: list[tuple[float, int, str]] = []  # of the best score, the leftmost

        def consider(left: int, right: int) -> None:
            if left >= 0 and right < end:
                merged = f"{symbols[left]}{symbols[right]}"
                id = self._ids.get(merged)
                if id is not None:
                    heapq.heappush(candidates, (-self._scores[id], left, merged))

        for left in range(end - 1):
            consider(left, left + 1)
        while candidates:
            _, left, merged = heapq.heappop(candidates)
            right = after[left]
            # Stale candidates stay in the heap: one of their symbols has been merged into something else since.
            if symbols[left] is None or right == end or f"{symbols[left]}{symbols[right]}" != merged:
                continue
            symbols[left], symbols[right] = merged, None
            after[left] = after[right]
            before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
        ids: list[int] = []
        for symbol in symbols:
            if symbol is not None:
                id = self._ids.get(symbol)
                ids.extend(self._character(symbol) if id is None else (id,))
        return tuple(ids)

    def _character(self, character: str) -> tuple[int, ...]:
        data = character.encode()
        if all(byte in self._byte_ids for byte in data):
            return tuple(self._byte_ids[byte] for byte in data)
        return self._unknown
