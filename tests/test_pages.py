"""PagePool: a stateful test against plain sets of pages, and what its own proof catches.

The model is a list of owners, each a list of page numbers; it knows nothing of free runs.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanobeacon.pages import PagePool, one_run


def free_runs(pool: PagePool) -> list[range]:
    """The maximal runs of free pages, read from the reference counts alone."""
    runs, first = [], None
    for page in range(1, pool.num_pages + 1):
        free = page < pool.num_pages and pool.references[page] == 0
        if free and first is None:
            first = page
        elif not free and first is not None:
            runs.append(range(first, page))
            first = None
    return runs


class PoolMachine(RuleBasedStateMachine):
    """Owners come, grow, share and go; after every step the pool must prove itself."""

    @initialize(num_pages=st.integers(2, 40))
    def begin(self, num_pages):
        self.pool = PagePool(num_pages)
        self.owners: list[list[int]] = []

    def take(self, count, **how):
        """Allocate, and check what any allocation promises. Returns the pages or None."""
        free = {page for run in free_runs(self.pool) for page in run}
        pages = self.pool.allocate(count, **how)
        if count > len(free):
            assert pages is None and self.pool.free_count == len(free)
            return None
        assert len(pages) == len(set(pages)) == count and free.issuperset(pages)
        assert all(self.pool.references[page] == 1 for page in pages)
        return pages

    @rule(count=st.integers(0, 12))
    def allocate(self, count):
        sizes = sorted(len(run) for run in free_runs(self.pool))
        homes = {page: len(run) for run in free_runs(self.pool) for page in run}
        pages = self.take(count)
        if not pages:
            return
        fitting = [size for size in sizes if size >= count]
        if fitting:  # one run, and the smallest that fits
            assert one_run(pages) and homes[pages[0]] == fitting[0]
        else:  # no more pieces than the largest runs need
            pieces, missing = 0, count
            while missing > 0:
                missing -= sizes.pop()
                pieces += 1
            assert 1 + sum(b != a + 1 for a, b in zip(pages, pages[1:], strict=False)) == pieces
        self.owners.append(pages)

    @rule(count=st.integers(1, 12), at=st.integers(1, 40))
    def allocate_at(self, count, at):
        runs = free_runs(self.pool)
        pages = self.take(count, at=at)
        if pages is None:
            return
        if any(at in run and at + count - 1 in run for run in runs):
            assert pages == list(range(at, at + count)), "the pages asked for were free"
        elif any(len(run) >= count for run in runs):
            assert one_run(pages)
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data, count):
        owner = data.draw(st.sampled_from(self.owners))
        last = owner[-1]
        behind = next((run for run in free_runs(self.pool) if run[0] == last + 1), range(0))
        pages = self.take(count, at=last + 1)
        if pages is None:
            return
        if len(behind) >= count:
            assert pages == list(behind[:count]), "the pages behind the owner's last were free"
        owner += pages

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data):
        owner = data.draw(st.sampled_from(self.owners))
        shared = owner[: data.draw(st.integers(1, len(owner)))]
        before = self.pool.free_count
        self.pool.share(shared)
        assert self.pool.free_count == before
        self.owners.append(list(shared))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        still_held = {page for pages in self.owners for page in pages}
        self.pool.release(owner)
        assert all((self.pool.references[page] > 0) == (page in still_held) for page in owner)

    @precondition(lambda self: self.pool.free_count)
    @rule(data=st.data())
    def misuse_a_free_page(self, data):
        page = data.draw(st.sampled_from([p for run in free_runs(self.pool) for p in run]))
        with pytest.raises(AssertionError, match="released twice"):
            self.pool.release([page])
        with pytest.raises(AssertionError, match="cannot be shared"):
            self.pool.share([page])

    @rule()
    def misuse_the_scratch_page(self):
        with pytest.raises(AssertionError):
            self.pool.release([0])
        with pytest.raises(AssertionError):
            self.pool.share([0])

    @invariant()
    def proven(self):
        self.pool.check(self.owners)
        held = {page for pages in self.owners for page in pages}
        assert self.pool.used_count == len(held)
        assert self.pool.used_count + self.pool.free_count == self.pool.num_pages - 1

    def teardown(self):
        if hasattr(self, "pool"):
            for pages in self.owners:
                self.pool.release(pages)
            self.pool.check([])
            # Free pages have joined again: everything is one run.
            assert self.pool.allocate(self.pool.num_pages - 1) == list(range(1, self.pool.num_pages))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=250, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_smallest_pool_has_one_page_to_give():
    with pytest.raises(ValueError, match="num_pages=1: at least 2"):
        PagePool(1)
    pool = PagePool(2)
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [1]
    assert pool.allocate(1) is None and pool.allocate(0) == []


def test_two_that_grow_in_turn_each_stay_one_run():
    pool = PagePool(33)
    first, second = pool.allocate(2, at=1), pool.allocate(2, at=17)
    for _ in range(10):
        first += pool.allocate(1, at=first[-1] + 1)
        second += pool.allocate(1, at=second[-1] + 1)
    assert one_run(first) and one_run(second)
    pool.check([first, second])


def test_releasing_one_page_twice_in_one_call_asserts():
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([page, page])


def test_one_run():
    assert one_run([]) and one_run([7]) and one_run([3, 4, 5])
    assert not one_run([3, 5]) and not one_run([4, 3]) and not one_run([3, 3])


def taken() -> tuple[PagePool, list[list[int]]]:
    pool = PagePool(8)
    return pool, [pool.allocate(2), pool.allocate(3)]


WRONG_OWNERS = {
    "lost": lambda owners: owners[:1],
    "owned twice": lambda owners: [*owners, owners[0]],
    "owned while free": lambda owners: [*owners, [7]],
    "scratch": lambda owners: [*owners, [0]],
    "one page missing": lambda owners: [owners[0][:1], owners[1]],
}


@pytest.mark.parametrize("wrong", WRONG_OWNERS)
def test_check_catches_owners_that_do_not_match(wrong):
    pool, owners = taken()
    pool.check(owners)
    with pytest.raises(AssertionError):
        pool.check(WRONG_OWNERS[wrong](owners))


def damage_count(pool):
    pool.free_count += 1


def damage_reference(pool):
    pool.references[1] += 1


def damage_runs(pool):
    first, end = pool._runs[-1]
    pool._runs[-1:] = [(first, first + 1), (first + 1, end)]


def damage_lost_page(pool):
    first, end = pool._runs[-1]
    pool._runs[-1] = (first + 1, end)
    pool.free_count -= 1


@pytest.mark.parametrize("damage", [damage_count, damage_reference, damage_runs, damage_lost_page])
def test_check_catches_a_damaged_pool(damage):
    pool, owners = taken()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check(owners)
