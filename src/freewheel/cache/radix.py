"""The radix prefix tree: which pages already hold the keys and values of a given beginning.

After RadixAttention (Zheng et al., SGLang, arXiv 2312.07104), with edges of exactly one page: nodes never split, so a
sequence can remember its node and walk on from there, and matching costs one dictionary lookup per page.
"""

from collections.abc import Iterable, Iterator, Sequence

from freewheel.cache.pages import PageAllocator


class Node:
    """A page and the tokens that lead to it; the root stands for the empty beginning and has no page (-1)."""

    __slots__ = ("children", "depth", "key", "page", "parent")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth = parent.depth + 1 if parent else 0
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixCache:
    """Pages, and the tree over the full ones among them. All that hands out or takes back pages goes through here.

    Invariant: whoever holds a page of the tree holds the tree's pages of all its ancestors as well. References are the
    locks: a page in use is not idle, so neither it nor anything before it can be evicted, and every idle page can.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = PageAllocator(num_pages)
        self.root = Node(None, (), -1)
        self._nodes: dict[int, Node] = {}

    @property
    def available(self) -> int:
        """Pages that :meth:`allocate` can hand out."""
        return self.pages.free + self.pages.idle

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages, evicting the least recently used beginnings if need be."""
        for _ in range(count - self.pages.free):
            if not self.pages.idle:
                break
            page = self.pages.evict()
            node = self._nodes.pop(page)
            assert node.parent is not None
            del node.parent.children[node.key]
        return self.pages.allocate(count)

    def retain(self, pages: Iterable[int]) -> None:
        """Share pages; see :meth:`PageAllocator.retain`."""
        self.pages.retain(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Give back a sequence's pages, in position order; those in the tree stay until they are evicted."""
        self.pages.release(pages)

    def match(self, tokens: Sequence[int], limit: int) -> Node:
        """The deepest node whose path begins ``tokens[:limit]``; ``depth * page_size`` tokens are cached."""
        node = self.root
        size = self.page_size
        for end in range(size, limit + 1, size):
            child = node.children.get(tuple(tokens[end - size : end]))
            if child is None:
                break
            node = child
        return node

    def path(self, node: Node) -> list[int]:
        """Pages from the root to the node, in position order."""
        pages = []
        while node.parent:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def advance(
        self, node: Node, tokens: Sequence[int], pages: list[int], computed: int, limit: int
    ) -> tuple[Node, list[int]]:
        """Walk a running sequence down the tree, sharing in both directions.

        A full page that the sequence has computed (its first ``computed`` tokens) enters the tree. Where the tree has
        that page already, or has one that the sequence was still going to compute (within ``limit`` tokens), the
        sequence takes the tree's page and its own is freed: no page table is left pointing at a freed page.

        Args:
            node: where the sequence stands; ``pages[:node.depth]`` are the tree's.
            tokens: its tokens.
            pages: its pages, at least enough for ``limit`` tokens; changed in place.
            computed: tokens whose keys and values are in its pages.
            limit: tokens that it may have taken over.

        Returns:
            The new node, and the indices of ``pages`` that were replaced.
        """
        size = self.page_size
        replaced = []
        while (end := (node.depth + 1) * size) <= max(computed, limit):
            index = node.depth
            key = tuple(tokens[end - size : end])
            child = node.children.get(key)
            if child is None:
                if end > computed:
                    break
                child = node.children[key] = Node(node, key, pages[index])
                self._nodes[child.page] = child
                self.pages.keep(child.page)
            elif child.page != pages[index]:
                self.pages.retain([child.page])
                self.pages.release([pages[index]])
                pages[index] = child.page
                replaced.append(index)
            node = child
        return node, replaced

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Verify pages and tree against the page tables of all sequences that hold pages.

        Raises:
            AssertionError: saying what is wrong.
        """
        tables = [list(pages) for pages in holders]
        self.pages.check(tables)
        nodes = list(self._walk())
        assert {node.page: node for node in nodes} == self._nodes, "the tree's pages are not the listed ones"
        assert len(nodes) == len(self._nodes), "a page is in the tree twice"
        references = self.pages.references
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert len(node.key) == self.page_size
            assert parent.page < 0 or references[parent.page] >= references[node.page], "a beginning is not locked"
            assert references[node.page] or self.pages.is_idle(node.page), "a page of the tree is free"
        for pages in tables:
            for index, page in enumerate(pages):
                if page in self._nodes:
                    assert pages[: index + 1] == self.path(self._nodes[page]), "a page table strays from the tree"

    def _walk(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
