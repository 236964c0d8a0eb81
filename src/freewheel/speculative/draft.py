"""Drafts by n-gram lookup."""

from collections.abc import Sequence
from itertools import chain

from freewheel.speculative.index import NgramIndex
from freewheel.speculative.tree import DraftTree

GUESSES = 4  # matches for each leaf, as several often go on in the same way


def draft(
    index: NgramIndex,
    *,
    width: int,
    depth: int,
    nodes: int,
    corpus: NgramIndex | None = None,
    first: Sequence[int] = (),
) -> DraftTree | None:
    """What may follow the end of a sequence, by what followed the same tokens before.

    The ``GUESSES * width`` best matches are merged: longer ones first, of equally long ones the sequence's own before
    those of the corpus, then the latest.

    Args:
        index: of the request's own tokens.
        width: most leaves.
        depth: longest path.
        nodes: most nodes, at most 63.
        corpus: other tokens, shared by requests and only read.
        first: a guess that is better than any of these.

    Returns:
        a tree with nodes, or None if nothing is found.
    """
    if nodes < 1:
        return None
    limit = GUESSES * width
    found = [(match, index) for match in index.matches(limit=limit)]
    if corpus is not None:
        found += [(match, corpus) for match in corpus.matches(index.tail(corpus.cap), limit)]
        found.sort(key=lambda guess: -guess[0].length)  # stable
    guesses = (where.continuation(match.position, depth, overlap=where is index) for match, where in found[:limit])
    tree = DraftTree.merge(chain([first], guesses), nodes, depth, width)
    return tree if tree.tokens else None
