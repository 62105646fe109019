"""`PrefixCache`: which pages hold which tokens, so that a prompt's beginning is not computed twice.

Pages form a tree: a page's place in it is the chain of all tokens before it. What may be shared
is a function of the tokens alone: every page under the full cache, the protected ones under a
budget, which no eviction touches. Policies that ask queries also need those of the tokens before,
which a row of the query buffer holds at a border, a multiple of `chunk`. Pure Python: knows page
and row numbers, never what they hold; who runs, and when rows are copied, is the business of
scheduler and engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm

from .pages import PagePool
from .request import Request


@dataclass(eq=False)
class Node:
    """A page in the tree. Its key in `parent.children` is its tokens: a dict compares them after
    their hash, and the chain of parents is compared with it, so that no collision can give another
    text's page."""

    page: int
    key: tuple[int, ...]
    parent: "Node | None"
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    row: int = 0  # row of the query buffer kept for the border behind this page; 0: none
    row_count: int = 0  # queries in that row
    forgotten: bool = False


@dataclass(frozen=True)
class Found:
    """What is known of a prompt's beginning: whole pages, and the row of the query buffer that
    belongs behind them (0: none) with the number of queries in it. Empty: nothing is known."""

    pages: list[int] = field(default_factory=list)
    row: int = 0
    row_count: int = 0


class PrefixCache:
    """The tree over the pages of a pool.

    rows: rows of the query buffer that may be kept at borders; None for policies that ask no
    queries, whose borders are those of pages. shared_context: None, or for dynamic RoPE the
    prompt length up to which keys do not depend on it; longer prompts share with those of their
    own length only.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        chunk: int,
        rows: Iterable[int] | None = None,
        shared_context: int | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.keeps_rows = rows is not None
        self.border = lcm(page_size, chunk) if self.keeps_rows else page_size  # in tokens
        self.shared_context = shared_context
        self._rows = tuple(rows or ())
        self.free_rows = list(self._rows)
        self.kept_rows: dict[Node, None] = {}  # borders with a row, the least recently used first
        self._root = Node(0, (), None)
        self._nodes: dict[int, Node] = {}  # by page

    def find(self, request: Request) -> Found:
        """The longest beginning that can be taken over; at least one token is left to compute."""
        return self._found(self._walk(request))

    def find_among(self, request: Request, pages: list[int]) -> Found:
        """The same, of pages that the request holds already, in order."""
        own = []
        for node, page in zip(self._walk(request), pages, strict=False):
            if node.page != page:
                break
            own.append(node)
        return self._found(own)

    def insert(self, request: Request) -> None:
        """Make the whole pages that a request has computed known. Called after each of
        its steps."""
        # 1. Which of them are new?
        known = request.pages_inserted
        whole = self._whole_pages(request, request.num_computed)
        if whole <= known:
            return
        # 2. They hang below the last page that was made known.
        node = request.prefix_node or self._root
        keys = self._keys(request, known, whole)
        for page, key in zip(request.pages[known:whole], keys, strict=True):
            if node.forgotten:
                return
            child = node.children.get(key)
            if child is None:
                child = Node(page, key, node)
                node.children[key] = child
                self._nodes[page] = child
                self.pool.keep(page)
            # Else the same tokens were computed twice, side by side: this copy stays its
            # owner's alone.
            node = child
        request.prefix_node = node
        request.pages_inserted = whole

    def row_for(self, request: Request) -> int:
        """The row that shall keep the request's queries, where it stands at a border that has none;
        else 0.

        The least recently used border gives up its own when all are in use. Once the queries are
        there, `keep_row` makes them known: a row that nothing was copied to is never found."""
        node = request.prefix_node
        if not self.keeps_rows or node is None:
            return 0
        at_border = request.pages_inserted * self.page_size == request.num_computed
        has_row = node.row != 0
        if not at_border or has_row or node.forgotten:
            return 0
        if not self.free_rows:
            least_recent = next(iter(self.kept_rows))
            self._drop_row(least_recent)
        return self.free_rows[-1]

    def keep_row(self, request: Request) -> None:
        """Make known what `row_for` gave a row to."""
        node = request.prefix_node
        node.row_count = request.buffer_count
        node.row = self.free_rows.pop()
        self.kept_rows[node] = None

    def make_room(self, count: int) -> None:
        """Forget idle pages until `count` are free, or none is left: the least recently used first,
        and since a request lets go of its last page first, leaves before their parents."""
        while self.pool.free_count < count and self.pool.idle:
            least_recent = next(iter(self.pool.idle))
            self._forget(self._nodes[least_recent])

    def _walk(self, request: Request) -> list[Node]:
        """The nodes of a request's tokens from the first page on, as far as they are known."""
        path = []
        node = self._root
        whole = self._whole_pages(request, request.num_tokens - 1)
        for key in self._keys(request, 0, whole):
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def _found(self, path: list[Node]) -> Found:
        """Where computing can begin: the last border of a path that has its row, if rows
        are needed."""
        # 1. Back to the last border, and on to one with a row.
        pages_apart = self.border // self.page_size
        count = len(path) - len(path) % pages_apart
        while self.keeps_rows and count and not path[count - 1].row:
            count -= pages_apart
        if not count:
            return Found()
        # 2. Its row is now the most recently used: last in the dict.
        last = path[count - 1]
        if last.row:
            del self.kept_rows[last]
            self.kept_rows[last] = None
        pages = [node.page for node in path[:count]]
        return Found(pages, last.row, last.row_count)

    def _whole_pages(self, request: Request, tokens: int) -> int:
        """Pages of its first `tokens` that are full, end at a border and are never evicted from."""
        if request.budgeted:
            tokens = min(tokens, request.protected)
        return (tokens - tokens % self.border) // self.page_size

    def _keys(self, request: Request, first: int, end: int) -> list[tuple[int, ...]]:
        """The tokens of the pages [first, end), each page's as a tuple."""
        size = self.page_size
        tokens = tuple(request.tokens(first * size, end * size))
        keys = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        if self.shared_context is not None and first == 0 and keys:
            # Dynamic RoPE: the base, and with it every key, follows the length of a prompt beyond
            # the context. As part of the first page's key it tells whole chains apart.
            rope_length = max(len(request.prompt_token_ids), self.shared_context)
            keys[0] = (rope_length, *keys[0])
        return keys

    def _forget(self, node: Node) -> None:
        """Forget a page and whatever hangs below it. Pages below that are still held belong to a
        request that computed the same beginning beside another; they stay with it and are only not
        found any more."""
        del node.parent.children[node.key]
        below = [node]
        while below:
            node = below.pop()
            below += node.children.values()
            node.forgotten = True
            del self._nodes[node.page]
            self.pool.forget(node.page)
            if node.row:
                self._drop_row(node)

    def _drop_row(self, node: Node) -> None:
        """Forget the queries kept at a border; its pages stay."""
        del self.kept_rows[node]
        self.free_rows.append(node.row)
        node.row = 0

    def restore(self) -> Iterable[int]:
        """Begin again from the tree, whatever was left half done; the pages that are kept."""
        # 1. What hangs in the tree is known, all else forgotten.
        nodes = self._reachable()
        for node in set(self._nodes.values()).difference(nodes):
            node.forgotten = True
        self._nodes = {node.page: node for node in nodes}
        # 2. Rows belong to the nodes that name them, in the order of use as far as that was noted.
        with_row = [node for node in nodes if node.row]
        used = {node.row for node in with_row}
        recent_last = [*self.kept_rows, *with_row]
        self.kept_rows = {node: None for node in recent_last if node.row and not node.forgotten}
        self.free_rows = [row for row in self._rows if row not in used]
        return self._nodes.keys()

    def _reachable(self) -> list[Node]:
        """Every page of the tree."""
        found: list[Node] = []
        below = list(self._root.children.values())
        while below:
            node = below.pop()
            found.append(node)
            below += node.children.values()
        return found

    def check(self) -> None:
        """Prove that tree, pool and rows agree; AssertionError where they do not."""
        # 1. Tree and pool keep the same pages.
        seen = self._reachable()
        for node in seen:
            assert node.parent.children[node.key] is node
            assert not node.forgotten
        assert len(seen) == len(self._nodes)
        assert {node.page: node for node in seen} == self._nodes
        assert self.pool.kept == self._nodes.keys(), "pool and tree keep different pages"
        # 2. Every row is free or kept at one border.
        with_row = {node for node in seen if node.row}
        assert with_row == self.kept_rows.keys(), "a row is kept for a page that is forgotten"
        rows = [*self.free_rows, *(node.row for node in with_row)]
        assert sorted(rows) == sorted(self._rows), "a row is kept twice or lost"
