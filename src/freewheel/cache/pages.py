"""Who holds which page of the key-value cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Counts references to pages. A page is in exactly one of three states::

        free   nobody holds it, its content is worthless
        held   one or more sequences have it in their page table (``references[page] > 0``)
        idle   no sequence holds it, but the prefix tree keeps its content; ordered by last use, oldest first

    A page becomes *kept* when the prefix tree takes it in, and stays so until it is evicted. Only full pages are ever
    kept or shared, so nobody writes to a page that has a second reader.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: low pages first, so that memory is touched late
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can be taken at once."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that can be taken after eviction."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages, each with one reference.

        Raises:
            RuntimeError: fewer pages are free; nothing is taken.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked of the cache, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are held or idle."""
        for page in pages:
            if self.references[page] == 0:
                del self._idle[page]
            self.references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page of a prefix, given in position order.

        The last page goes first: among idle pages a continuation is therefore always older than what it continues,
        and evicting the oldest page never orphans another one.
        """
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def keep(self, page: int) -> None:
        """Preserve a held page's content beyond its last reference."""
        self._kept.add(page)

    def evict(self) -> int:
        """Free the least recently used idle page and return it."""
        page, _ = self._idle.popitem(last=False)
        self._kept.remove(page)
        self._free.append(page)
        return page

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Verify the state against the page tables of everyone who holds pages.

        Raises:
            AssertionError: a page is lost, in two states, or counted wrongly.
        """
        counted = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                counted[page] += 1
        _require(counted == self.references, "reference counts differ from the page tables")
        free, idle = set(self._free), set(self._idle)
        held = {page for page, count in enumerate(counted) if count}
        _require(len(free) == len(self._free), "a page is free twice")
        _require(not (free & held or free & idle or idle & held), "a page is in two states")
        _require(len(free) + len(idle) + len(held) == self.num_pages, "a page is lost")
        _require(idle <= self._kept and not free & self._kept, "the kept pages are wrong")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
