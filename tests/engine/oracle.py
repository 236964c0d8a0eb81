"""Drafts that know what comes: part of it is right, beside branches that are not."""

import random
from collections.abc import Mapping

from mock_model import VOCAB, Eager

from freewheel.engine.drafting import Drafting, Pace
from freewheel.engine.engine import Engine
from freewheel.request import Sequence
from freewheel.speculative import DraftTree


class Oracle(Drafting):
    """Draws trees at random.

    Args:
        engine: takes these drafts from now on, of the size that its configuration allows.
        texts: what each choice gets, by request and index; perhaps more than it takes.
    """

    def __init__(self, engine: Engine, texts: Mapping[tuple[str, int], list[int]], rng: random.Random) -> None:
        super().__init__(engine.config, Pace())
        assert engine._drafting is not None
        engine._drafting = self
        self._texts = texts
        self._rng = rng

    def draft(self, sequence: Sequence, most: int) -> DraftTree | None:
        depth = min(self._depth, sequence.max_length - len(sequence.tokens) - 1)
        text = self._texts[sequence.request.request_id, sequence.index]
        right = text[len(sequence.output_ids) :]
        if depth < 1 or self._rng.random() < 0.2:
            return None
        guesses = [right[: self._rng.randint(0, depth)] + self._noise() for _ in range(self._width)]
        self._rng.shuffle(guesses)
        tree = DraftTree.merge(guesses, min(most, self._nodes), depth, self._width)
        sequence.budget = sequence.budget or Eager(1)
        return tree if tree.tokens else None

    def _noise(self) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(self._rng.randint(0, 3))]
