"""Draft trees for tests."""

from random import Random

from hypothesis import strategies as st

from freewheel.speculative import DraftTree


@st.composite
def parent_lists(draw: st.DrawFn, max_nodes: int = 63) -> list[int]:
    """Parents of any tree."""
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, max_nodes)))]


def random_tree(random: Random, max_nodes: int, vocab: int) -> DraftTree:
    """A tree in which no two siblings have the same token."""
    tokens, parents, taken = [], [], set()
    for node in range(random.randint(0, max_nodes)):
        parent, token = random.randint(-1, node - 1), random.randrange(vocab)
        while (parent, token) in taken:
            parent, token = random.randint(-1, node - 1), random.randrange(vocab)
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


def path(tree: DraftTree, node: int) -> list[int]:
    """The tokens from the root's child to a node."""
    return [] if node < 0 else [*path(tree, tree.parents[node]), tree.tokens[node]]
