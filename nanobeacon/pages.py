"""`PagePool`: which pages are free, who shares one, and a proof that none is lost or owned twice.

A page is free, or held by owners, or idle: nobody holds it, but what it holds is worth keeping
until its room is needed. Pages are numbers here; it knows nothing of tensors, of requests or of
contents. Page 0 is scratch.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable


class PagePool:
    """`num_pages` pages, page 0 included, which is never given out. Free pages are kept as
    sorted runs."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: at least 2 are needed (page 0 is the scratch page)")
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self.free_count = num_pages - 1
        self.kept: set[int] = set()  # pages that become idle instead of free when nobody holds them
        # the kept ones that nobody holds, in the order they were let go
        self.idle: dict[int, None] = {}
        # [first, end), ascending, never adjacent
        self._runs: list[tuple[int, int]] = [(1, num_pages)]

    @property
    def used_count(self) -> int:
        """Pages that requests hold now."""
        return self.num_pages - 1 - self.available

    @property
    def available(self) -> int:
        """Pages that nobody holds: those free, and those that `forget` would free."""
        return self.free_count + len(self.idle)

    def allocate(self, count: int, at: int | None = None) -> list[int] | None:
        """`count` pages, each with one owner, or None when fewer are free.

        From page `at` on where these are free; else out of the smallest free run that holds them
        all; where none does, pieces of the largest. One run of pages can be read without a copy."""
        if count > self.free_count:
            return None
        # 1. The place that was asked for, where it is free.
        if at is not None and count and self._is_free(at, count):
            return self._cut(at, count)
        # 2. Else the smallest run that holds what is still wanted; where there is none, all of
        #    the largest.
        pages: list[int] = []
        while len(pages) < count:
            wanted = count - len(pages)
            by_size = sorted(self._runs, key=_length)
            enough = [run for run in by_size if _length(run) >= wanted]
            run = enough[0] if enough else by_size[-1]
            first, _ = run
            pages += self._cut(first, min(wanted, _length(run)))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Another owner for pages that have one or are idle."""
        for page in pages:
            in_use = self.references[page] > 0 or page in self.idle
            assert in_use, f"page {page} is free and cannot be shared"
            self.idle.pop(page, None)
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; a page without owners is free again, or idle if
        it is kept."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} was released twice"
            self.references[page] -= 1
            if self.references[page] > 0:
                continue
            if page in self.kept:
                self.idle[page] = None
            else:
                self._give_back(page)

    def keep(self, page: int) -> None:
        """From now on a page that is held is worth keeping when it is let go."""
        assert self.references[page] > 0, f"page {page} is free and cannot be kept"
        self.kept.add(page)

    def forget(self, page: int) -> None:
        """A kept page is not worth keeping any more; it is free if nobody holds it."""
        self.kept.remove(page)
        if page in self.idle:
            del self.idle[page]
            self._give_back(page)

    def restore(self, owners: Iterable[list[int]], kept: Iterable[int]) -> None:
        """Begin again from who holds what and which pages are kept, whatever was left half done."""
        # 1. How often each page is held, and which are kept without being held: in the order in
        #    which they were let go, as far as that was noted.
        held = Counter(page for pages in owners for page in pages)
        self.kept = set(kept)
        not_noted = self.kept - self.idle.keys()
        let_go = [*self.idle, *sorted(not_noted)]
        self.idle = {page: None for page in let_go if page in self.kept and not held[page]}
        self.references = [held[page] for page in range(self.num_pages)]
        # 2. All else is free.
        self.free_count = 0
        self._runs = []
        for page in range(1, self.num_pages):
            if not held[page] and page not in self.idle:
                self._give_back(page)

    def check(self, owners: Iterable[list[int]]) -> None:
        """Prove that each page is free, or idle, or referenced exactly as often as the owners hold
        it; AssertionError where that is not so."""
        held = Counter(page for pages in owners for page in pages)
        assert held[0] == 0, "the scratch page is owned"
        assert self.references[0] == 0, "the scratch page is owned"
        # 1. The free runs: ascending, apart, and as many pages as were counted.
        free = [page for first, end in self._runs for page in range(first, end)]
        assert free == sorted(set(free)), "the free runs overlap"
        assert len(free) == self.free_count, "the free runs miscount"
        pairs = zip(self._runs, self._runs[1:], strict=False)
        apart = all(run[1] < behind[0] for run, behind in pairs)
        assert apart, "adjacent free runs"
        # 2. A page is in one of the three states.
        assert not held.keys() & set(free), "a page is both free and owned"
        assert not self.idle.keys() & (held.keys() | set(free)), "an idle page is free or owned"
        assert self.idle.keys() <= self.kept, "a page is idle that nobody keeps"
        assert self.kept <= self.idle.keys() | held.keys(), "a page is kept that is free"
        # 3. Nothing is counted wrongly, nothing is missing.
        for page, count in enumerate(self.references):
            assert count == held[page], f"page {page} counts {count} owners and has {held[page]}"
        assert len(free) + len(self.idle) + len(held) == self.num_pages - 1, "a page is lost"

    def _is_free(self, first: int, count: int) -> bool:
        """Whether one free run holds [first, first + count)."""
        at = self._run_at(first)
        if at < 0:
            return False
        _, end = self._runs[at]
        return first + count <= end

    def _run_at(self, page: int) -> int:
        """Where among the free runs the last one stands that begins at a page or before it; -1 for
        none."""
        return bisect_right(self._runs, (page, self.num_pages)) - 1

    def _cut(self, first: int, count: int) -> list[int]:
        """Take [first, first + count) out of the free run that holds it."""
        # 1. What lies on both sides stays free.
        at = self._run_at(first)
        start, end = self._runs[at]
        rest = [(start, first), (first + count, end)]
        self._runs[at : at + 1] = [run for run in rest if _length(run) > 0]
        # 2. Each page has one owner now.
        pages = list(range(first, first + count))
        for page in pages:
            self.references[page] = 1
        self.free_count -= count
        return pages

    def _give_back(self, page: int) -> None:
        """Add a page to the free runs, joined with the runs it touches."""
        at = bisect_left(self._runs, (page, 0))
        first = page
        end = page + 1
        # 1. The run behind it.
        if at < len(self._runs) and self._runs[at][0] == end:
            _, end = self._runs.pop(at)
        # 2. The run before it.
        if at > 0 and self._runs[at - 1][1] == first:
            first, _ = self._runs.pop(at - 1)
        insort(self._runs, (first, end))
        self.free_count += 1


def _length(run: tuple[int, int]) -> int:
    """Pages of a run [first, end)."""
    first, end = run
    return end - first


def one_run(pages: list[int]) -> bool:
    """Whether the pages lie behind each other, in order."""
    return all(b == a + 1 for a, b in zip(pages, pages[1:], strict=False))
