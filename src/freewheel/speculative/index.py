"""Where the end of a token sequence occurred before.

Drafts by n-gram lookup ("prompt lookup decoding", Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). Scanning
the sequence would take time in proportion to its length at every step. Here hash chains find the candidates, as in
LZ77 compressors (RFC 1951, section 4): a table leads from the hash of an n-gram to the latest place where one ended,
and each place to the one before it.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, TypeVar

import numpy as np

Ints = TypeVar("Ints", int, np.ndarray)

SEPARATOR = -1
"""Stands between documents. No negative token ever matches, or is drafted."""

MULTIPLIER = 0x9E3779B1  # a prime near 2**32 / golden ratio: upper bits of its multiples are well spread

_FEW = 24  # tokens that are quicker to insert one by one


class Match(NamedTuple):
    """An earlier occurrence of the last ``length`` tokens, ending at ``position``."""

    length: int
    position: int


class NgramIndex:
    """Finds earlier occurrences of a sequence's last tokens, in a time that does not depend on its length.

    Token ids are int32, and so is all else, in arrays that are never moved:

        tokens [max_length].
        heads [orders, buckets]: the latest position where an n-gram of the bucket ended; -1 for none. The buckets are
            the first power of two from max_length on.
        previous [orders, max_length]: the position before that in the same bucket; -1 for none.

    An n-gram's bucket are the top bits of the sum of ``token * MULTIPLIER ** (distance + 1)`` modulo 2**32, where
    distance counts back from its last token, which has 0.
    """

    def __init__(self, max_length: int, *, orders: Sequence[int] = (8, 4, 2), chain: int = 16, cap: int = 32) -> None:
        """Make room; 28 to 40 bytes a token with three orders.

        Args:
            max_length: most tokens.
            orders: lengths of the n-grams that are looked up, falling. A match has the last of them at least.
            chain: entries that are looked at for each order, the latest.
            cap: longest match that is told from longer ones.

        Raises:
            ValueError: naming the argument that is out of range.
        """
        if not 1 <= max_length < 2**31:
            raise ValueError(f"max_length must be from 1 to 2**31 - 1, not {max_length}")
        if not orders or orders[-1] < 1 or any(a <= b for a, b in pairwise(orders)):
            raise ValueError(f"orders must fall and end with at least 1, not {orders}")
        if chain < 1:
            raise ValueError(f"chain must be at least 1, not {chain}")
        if cap < orders[0]:
            raise ValueError(f"cap must be at least the longest order, {orders[0]}, not {cap}")
        self.max_length, self.orders, self.chain, self.cap = max_length, tuple(orders), chain, cap
        bits = (max_length - 1).bit_length()
        self._shift = 32 - bits
        self.powers = [pow(MULTIPLIER, distance + 1, 2**32) for distance in range(orders[0])]
        self._length = 0
        self.tokens = np.zeros(max_length, np.int32)
        self.heads = np.full((len(orders), 1 << bits), -1, np.int32)
        self.previous = np.full((len(orders), max_length), -1, np.int32)
        # Through these a number is read or written in a third of the time.
        self._tokens: Any = self.tokens.data
        self._heads: Any = [row.data for row in self.heads]
        self._previous: Any = [row.data for row in self.previous]

    @classmethod
    def corpus(cls, documents: Sequence[Sequence[int]], **options: Any) -> "NgramIndex":
        """An index of documents, with separators between them; ``options`` are those of the constructor."""
        joined = [token for document in documents for token in (*document, SEPARATOR)]
        index = cls(max(len(joined), 1), **options)
        index.extend(joined)
        return index

    def __len__(self) -> int:
        return self._length

    def tail(self, count: int) -> list[int]:
        """The last ``count`` tokens, or all if there are fewer."""
        return self.tokens[max(self._length - count, 0) : self._length].tolist()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Add tokens at the end.

        Raises:
            ValueError: more than ``max_length`` tokens; nothing is added.
        """
        start, end = self._length, self._length + len(tokens)
        if end > self.max_length:
            raise ValueError(f"the index holds {self.max_length} tokens, not {end}")
        self.tokens[start:end] = tokens
        self._length = end
        if len(tokens) > _FEW:
            self._insert(start, end)
            return
        for position in range(start, end):
            window = self._tokens[max(position + 1 - self.orders[0], 0) : position + 1].tolist()
            for level, bucket in self._buckets(window[::-1]):
                heads = self._heads[level]
                self._previous[level][position] = heads[bucket]
                heads[bucket] = position

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens. The index is then as if it had never held the others.

        Takes time in proportion to what is dropped: whatever ends there is the latest of its bucket.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"length must be from 0 to {self._length}, not {length}")
        for level, positions, buckets in self._ends(length, self._length):
            # Backwards, so that of several in one bucket the first has the last word.
            self.heads[level, buckets[::-1]] = self.previous[level, positions[::-1]]
        self._length = length

    def matches(self, suffix: Sequence[int] | None = None, limit: int | None = None) -> list[Match]:
        """Earlier occurrences of a suffix: the longest first, and of equally long ones the latest.

        Each order's chain gives those of its ``chain`` latest entries that are as long as the order, but shorter than
        the next longer order: longer ones are found there.

        Args:
            suffix: tokens that need not be in the index. None: its own last tokens, which do not match themselves.
            limit: most matches; None: all.
        """
        own, found = suffix is None, []
        tail = self.tail(self.cap) if suffix is None else list(suffix[-self.cap :])
        tail = list(takewhile(lambda token: token >= 0, reversed(tail)))
        if own:  # the chains go on from the last token
            starts = {level: chain[self._length - 1] for level, chain in enumerate(self._previous) if tail}
        else:
            starts = {level: self._heads[level][bucket] for level, bucket in self._buckets(tail)}
        longer = self.cap + 1
        for level, order in enumerate(self.orders):
            position, ranked = starts.get(level, -1) if order <= len(tail) else -1, []
            for _ in range(self.chain):
                if position < 0:
                    break
                length = self._common(tail, position)
                if order <= length < longer:
                    ranked.append(Match(length, position))
                position = self._previous[level][position]
            found += sorted(ranked, key=lambda match: -match.length)  # stable: later ones stay first
            if limit is not None and len(found) >= limit:
                return found[:limit]
            longer = order
        return found

    def continuation(self, position: int, count: int, *, overlap: bool = False) -> list[int]:
        """Up to ``count`` tokens that follow a position, as far as the end or a separator.

        Args:
            position: of a match.
            count: most tokens.
            overlap: go on beyond the end with the same tokens again. That is what follows if the match is one with the
                index's own end: LZ77 copies in this way where a length exceeds the distance (RFC 1951, section 3.2.3).
        """
        found = self.tokens[position + 1 : min(position + 1 + count, self._length)].tolist()
        if overlap and found:
            found = [found[i % len(found)] for i in range(count)]
        return list(takewhile(lambda token: token >= 0, found))

    def _common(self, tail: Sequence[int], position: int) -> int:
        """How many tokens, backwards from ``position``, equal those of the tail, which begins with its last."""
        tokens = self._tokens
        for distance, token in enumerate(tail):
            if distance > position or tokens[position - distance] != token:
                return distance
        return len(tail)

    def _buckets(self, tail: Sequence[Ints]) -> list[tuple[int, Ints]]:
        """The level of each order that is not longer than the tail, which begins with its last token; its bucket."""
        # Python's integers never overflow, and NumPy's wrap at 2**64, which leaves the lower 32 bits right.
        total: Any = 0
        buckets, level = [], len(self.orders) - 1
        for count, (token, power) in enumerate(zip(tail, self.powers), 1):
            total = total + token * power
            if count == self.orders[level]:
                buckets.append((level, (total & 0xFFFFFFFF) >> self._shift))
                level -= 1
        return buckets

    def _ends(self, start: int, end: int) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
        """For each level, the positions from ``start`` to before ``end`` where n-grams end, and their buckets."""
        longest = self.orders[0]
        padding = np.zeros(max(longest - 1 - start, 0), np.int64)  # in n-grams that do not exist
        window = np.concatenate([padding, self.tokens[max(start - longest + 1, 0) : end]])
        count = end - start
        tail = [window[longest - 1 - distance : longest - 1 - distance + count] for distance in range(longest)]
        for level, buckets in self._buckets(tail):
            first = max(self.orders[level] - 1, start)
            yield level, np.arange(first, end), buckets[first - start :]

    def _insert(self, start: int, end: int) -> None:
        """Insert many n-grams at once: sorted by bucket, each follows its predecessor."""
        for level, positions, buckets in self._ends(start, end):
            if not len(positions):
                continue
            keys = np.sort(buckets << 32 | positions)
            buckets, positions = keys >> 32, keys & 0xFFFFFFFF
            # Whether one's bucket is another than that of the one before; beyond both ends it is.
            borders = np.ones(len(keys) + 1, bool)
            np.not_equal(buckets[1:], buckets[:-1], out=borders[1:-1])
            first, last = borders[:-1], borders[1:]
            heads, previous = self.heads[level], self.previous[level]
            before = heads[buckets]
            np.copyto(before[1:], positions[:-1], where=~first[1:], casting="same_kind")
            previous[positions] = before
            heads[buckets[last]] = positions[last]
