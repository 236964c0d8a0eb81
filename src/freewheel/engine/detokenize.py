"""From token ids to text that can be sent: whole characters, and never the first part of a stop string."""

import codecs
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Self

from freewheel.models.tokenizer import strip_spaces

if TYPE_CHECKING:
    from freewheel.models.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoding: what :meth:`push` and :meth:`finish` return adds up to ``tokenizer.decode`` of all tokens.

    Its state is at most three bytes of an unfinished character, so that a token costs the same wherever it comes.

    Args:
        skip_special_tokens: leave out control tokens.
        prompt_ids: what the text continues. Then a space that begins the first token is kept, and a character that the
            prompt left unfinished can be completed; if it is not, its U+FFFD is the prompt's and not repeated. Without
            it the text is decoded as one of its own.
    """

    def __init__(
        self, tokenizer: "Tokenizer", *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = tokenizer.leading_spaces
        self._unfinished = False  # the prompt's last character, until there is text
        tail: list[int] = []
        length = 0
        for id in reversed(prompt_ids):  # the last four bytes say all about an unfinished character
            tail.append(id)
            length += 0 if id in self._skipped else len(tokenizer.token_bytes(id))
            if length >= 4:
                break
        for id in reversed(tail):
            self.push(id)
        self._unfinished = bool(self._decoder.getstate()[0])

    def copy(self) -> Self:
        """One for another text that goes on from the same place."""
        other = copy(self)
        other._decoder = copy(self._decoder)
        return other

    def push(self, token_id: int) -> str:
        """Characters that ``token_id`` completes."""
        if token_id in self._skipped:
            return ""
        return self._trimmed(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if a character was left unfinished."""
        return self._trimmed(self._decoder.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        if text and self._unfinished:
            self._unfinished = False
            text = text.removeprefix("\ufffd")
        if not self._leading_spaces or not text:
            return text
        stripped = strip_spaces(text, self._leading_spaces)
        self._leading_spaces = 0 if stripped else self._leading_spaces - len(text)
        return stripped


class StopStrings:
    """Cuts a stream of text at the first stop string, holding back whatever may still become one.

    A match is the one that ends first, as it is known first; of stops that end at the same character, the one that
    begins first (the longest) counts. So the result does not depend on how the text is divided into pushes, and what
    was sent never needs to be taken back.

    A character costs a constant time on average (Aho and Corasick, 1975), whatever the number and lengths of the stops.

    Args:
        stops: none of them empty.
        include: emit the stop string itself as well.

    Raises:
        ValueError: a stop is empty.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError("stop must not hold an empty string")
        self._include = include
        # A node is a prefix of a stop: its children, its length, its longest proper suffix that is a node as well, and
        # the longest stop that it ends with.
        self._children: list[dict[str, int]] = [{}]
        self._length = [0]
        self._suffix = [0]
        self._stop: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link_suffixes()
        self._node = 0
        self._held = ""

    def copy(self) -> Self:
        """One for another text that goes on from the same place. What is built from the stops is shared."""
        return copy(self)

    def push(self, text: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """What can be sent, and the stop string once one is complete; nothing may be pushed after that.

        With ``ignore`` a stop that is complete within ``text`` is text like any other. One that it begins still counts.
        """
        if len(self._children) == 1:
            return text, None
        held = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            self._node = self._next(self._node, character)
            stop = self._stop[self._node]
            if stop is not None and not ignore:
                self._held = ""
                return held[: end if self._include else end - len(stop)], stop
        sent = len(held) - self._length[self._node]
        self._held = held[sent:]
        return held[:sent], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _next(self, node: int, character: str) -> int:
        while character not in self._children[node]:
            if node == 0:
                return 0
            node = self._suffix[node]
        return self._children[node][character]

    def _insert(self, stop: str) -> None:
        node = 0
        for length, character in enumerate(stop, 1):
            child = self._children[node].get(character)
            if child is None:
                child = self._children[node][character] = len(self._children)
                self._children.append({})
                self._length.append(length)
                self._suffix.append(0)
                self._stop.append(None)
            node = child
        self._stop[node] = stop

    def _link_suffixes(self) -> None:
        queue = list(self._children[0].values())
        for node in queue:
            for character, child in self._children[node].items():
                self._suffix[child] = self._next(self._suffix[node], character)
                self._stop[child] = self._stop[child] or self._stop[self._suffix[child]]
                queue.append(child)
