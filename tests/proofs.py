"""What must hold between a scheduler, its pool and its requests after every step."""

from nanobeacon.scheduler import Scheduler


def prove(scheduler: Scheduler) -> None:
    """Prove the pool and the seats against the running requests."""
    scheduler.pool.check(r.pages for r in scheduler.running)
    if scheduler.prefix is not None:
        scheduler.prefix.check()
    rows = [*scheduler.free_rows, *(r.row for r in scheduler.running)]
    assert len(set(rows)) == len(rows), "a row has two owners"
    housed = all(r.cached_length <= len(r.pages) * scheduler.page_size for r in scheduler.running)
    assert housed, "slots without pages"
    assert not any(r.pages or r.row for r in scheduler.waiting), "a waiting request holds something"
