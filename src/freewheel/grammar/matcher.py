"""A sequence's place in its grammar."""

from collections.abc import Iterable, Iterator
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from freewheel.speculative import DraftTree

if TYPE_CHECKING:
    from freewheel.grammar.compiler import CompiledGrammar

# Seconds of a processor. The library's limits bound a step, but an ambiguous grammar may take long at every one, for
# which all neighbours wait. A matcher may take EARNED for each mask, for all that it is asked, and DEBT more in all.
EARNED, DEBT = 0.005, 1.0

MAX_MESSAGE = 300

ROOT = DraftTree()


class _State:
    """A copy of the library's matcher, in which a panic, which is no ``Exception``, is an error like any other."""

    def __init__(self, start: Any) -> None:
        self._panic: str | None = None
        self._made: Any = start
        self._made = self._call(None, "deep_copy")

    def _call(self, broken: Any, name: str, *arguments: Any) -> Any:
        """What the library answers, or ``broken``."""
        if self._panic is None:
            try:
                return getattr(self._made, name)(*arguments)
            except (Exception, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as panic:
                self._panic = str(panic)
        return broken

    def is_error(self) -> bool:
        return self._call(True, "is_error")

    def error(self) -> str:
        return self._call(None, "get_error") or self._panic or ""

    def is_stopped(self) -> bool:
        return self._call(False, "is_stopped")

    def takes(self, token: int) -> bool:
        """Whether it may come next; then it is taken in."""
        return self._call(0, "try_consume_tokens", [token]) == 1

    def follow(self, tokens: list[int]) -> None:
        self._call(False, "consume_tokens", tokens)

    def rollback(self, count: int) -> None:
        self._call(False, "rollback", count)

    def forced(self) -> bytes:
        return self._call(b"", "compute_ff_bytes")

    def mask(self, words: NDArray[np.uint32]) -> None:
        self._call(None, "unsafe_compute_mask_ptr", words.ctypes.data, words.nbytes)


class Matcher:
    """Where a sequence is, by the tokens that :meth:`advance` was told; for one thread.

    Attributes:
        ended: an end came, and whatever follows is free.
        error: what went wrong, from when on no token is legal.
    """

    def __init__(self, grammar: "CompiledGrammar", end_ids: Iterable[int]) -> None:
        """See :meth:`CompiledGrammar.matcher`."""
        self._grammar = grammar
        self._tokens: list[int] = []
        self._end_ids = frozenset(end_ids)
        self._ends = _bits(self._end_ids, grammar.words)
        self._others = ~_bits([*self._end_ids, *grammar.past], grammar.words)
        self._found = np.empty(grammar.vocab_size // 32 + 1, np.uint32)  # with the library's end, past the vocabulary
        self._debt = 0.0
        self.ended = False
        self.error: str | None = None
        self._state = _State(grammar.start)
        if self._state.is_error():
            self._fail()

    @property
    def complete(self) -> bool:
        """Whether the grammar is satisfied, and nothing can follow."""
        return not self.ended and self.error is None and self._state.is_stopped()

    def advance(self, token: int) -> bool:
        """Take in the next token; an end from which the sequence goes on frees it. Returns :attr:`complete`."""
        if self.ended or self.error is not None:
            return False
        if token in self._end_ids:
            self.ended = True
            return False
        began = thread_time()
        legal = self._state.takes(token)
        self._tokens.append(token)
        self._charge(began, 0)
        if not legal:
            self._fail()
        return self.complete

    def forced(self, most: int) -> list[int]:
        """Tokens that are likely to follow, as the grammar leaves no other text, up to so many.

        They are the tokenizer's. The last is left out, as it may become one with what comes after it.
        """
        if most < 1 or self.ended or self.error is not None or self._state.is_stopped():
            return []
        began = thread_time()
        data = self._state.forced()
        self._charge(began, 0)
        text = data.decode("utf-8", "ignore")  # it may end within a character
        return self._grammar.encode(text)[:-1][:most] if data.startswith(text.encode()) else []

    def prune(self, tree: DraftTree) -> DraftTree:
        """A draft without the nodes that the grammar forbids, and without ends: nothing needs to follow them."""
        if self.ended or self.error is not None:
            return tree
        began = thread_time()
        legal = sorted(row for row in self._visit(tree) if row)
        self._charge(began, 0)
        if len(legal) == len(tree.tokens):
            return tree
        place = {row: node for node, row in enumerate([0, *legal], -1)}
        return DraftTree(
            tuple(tree.tokens[row - 1] for row in legal), tuple(place[tree.parents[row - 1] + 1] for row in legal)
        )

    def fill(self, masks: NDArray[np.int32], tree: DraftTree = ROOT) -> None:
        """Set the bits of the ids that may follow each row of a draft that :meth:`prune` has seen.

        A draft that it has not seen may have more: after an end anything may follow, and after what is forbidden
        nothing. Where something goes wrong no bit is set: at the root that is the :attr:`error`.

        Args:
            masks: int32 [rows, words], contiguous rows, any content.
            tree: the draft; without nodes its root is the last token that is known.
        """
        if self.ended:
            masks.fill(-1)
            return
        masks.fill(0)
        if self.error is not None:
            return
        began = thread_time()
        for row in self._visit(tree):
            if not self._fill(masks[row]) and not row:
                self._fail()
        free = set[int]()
        for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents), 1):
            if token in self._end_ids or parent + 1 in free:
                free.add(row)
                masks[row] = -1
        self._charge(began, tree.rows)

    def _fill(self, mask: NDArray[np.int32]) -> bool:
        """The mask where the state stands, which must be zero; False if there is none."""
        self._state.mask(self._found)
        if self._state.is_error():
            return False
        end = self._grammar.vocab_size
        words = mask.view(np.uint32)
        np.bitwise_and(self._found[: len(words)], self._others, out=words)
        if self._found[end >> 5] >> np.uint32(end & 31) & 1:
            words |= self._ends
        return True

    def _visit(self, tree: DraftTree) -> Iterator[int]:
        """The rows whose path is legal, depth first, while the state stands there. Then it is back at the root."""
        state, at = self._state, 0
        yield 0
        first_child, next_sibling, depths = tree.links
        pending = [] if state.is_error() else [first_child[0]]
        while pending:
            row = pending.pop()
            if row < 0:
                continue
            pending.append(next_sibling[row])
            above = depths[row] - 1
            if at > above:
                state.rollback(at - above)
            elif at < above:  # the state was made anew
                state.follow(_path(tree, tree.parents[row - 1]))
            at = above
            token = tree.tokens[row - 1]
            if token not in self._end_ids and state.takes(token):
                at += 1
                yield row
                pending.append(first_child[row])
            if state.is_error():  # for good
                state, at = self._renewed(), 0
        if at:
            state.rollback(at)
            if state.is_error():
                self._renewed()

    def _renewed(self) -> _State:
        """What was there before a draft, made again."""
        self._state = _State(self._grammar.start)
        self._state.follow(self._tokens)
        return self._state

    def _charge(self, began: float, masks: int) -> None:
        """Count what it took since then to make so many masks."""
        self._debt = max(self._debt + thread_time() - began - EARNED * masks, 0.0)
        if self._debt > DEBT and self.error is None:
            self.error = "the grammar takes too long: it is too ambiguous"

    def _fail(self) -> None:
        said = (self._state.error().strip().splitlines() or ["the token does not belong there"])[0]
        self.error = f"the grammar cannot go on: {said[:MAX_MESSAGE]}"
        self._grammar.worn = True


def _path(tree: DraftTree, node: int) -> list[int]:
    """The tokens from the root's child to a node."""
    tokens = []
    while node >= 0:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


def _bits(ids: Iterable[int], words: int) -> NDArray[np.uint32]:
    bits = np.zeros(words, np.uint32)
    for id in ids:
        bits[id >> 5] |= np.uint32(1 << (id & 31))
    return bits
