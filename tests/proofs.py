"""What must hold between a scheduler, its pool and its requests after every step."""

from nanobeacon.scheduler import Scheduler


def prove(scheduler: Scheduler) -> None:
    """Prove the pool, the prefix cache and the seats against the running requests."""
    scheduler.check()
