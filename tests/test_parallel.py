"""The group of processes: what members exchange, how it splits, and that a dead member ends the others."""

import multiprocessing
import os
import socket
import time

import pytest
import torch

from nanobeacon.parallel import Group, join

TIMEOUT = 20.0
DIED = 7


def _member(rank: int, port: int, results) -> None:
    """One process as torchrun starts it: several exchanges, then rank 1 dies while rank 0 waits for it."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with join("cpu", TIMEOUT) as group:
        mine = torch.full((2, 1), float(rank + 1))
        found = {
            "rank": (group.rank, group.size),
            "sum": group.all_reduce(mine.clone()).tolist(),
            "rows": group.gather(mine).tolist(),
            "columns": group.gather(mine, dim=1).tolist(),
            "tokens": group.broadcast(torch.tensor([rank + 5])).tolist(),
            "seed": group.by_first(lambda: f"from {rank}"),
            "pages": min(group.collect(100 - rank)),
        }
        alone = group.split(1)
        found["alone"] = (alone.rank, alone.size, alone.gather(mine).tolist())
        found["whole"] = group.split(2).size
        results.put((rank, found))
        results.close()
        results.join_thread()
        if rank == 1:
            os._exit(DIED)
        group.all_reduce(mine)


@pytest.fixture(scope="module")
def two_members():
    """What each of two members found, their exit statuses, and the seconds that the survivor took to end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    members = [context.Process(target=_member, args=(rank, port, results)) for rank in range(2)]
    for member in members:
        member.start()
    found = dict(results.get(timeout=3 * TIMEOUT) for _ in members)
    start = time.monotonic()
    for member in members:
        member.join(2 * TIMEOUT)
    seconds = time.monotonic() - start
    statuses = [member.exitcode for member in members]
    for member in members:
        member.kill()
    return found, statuses, seconds


def test_members_exchange_in_the_order_of_rank(two_members):
    found, _, _ = two_members
    for rank in range(2):
        assert found[rank]["rank"] == (rank, 2)
        assert found[rank]["sum"] == [[3.0], [3.0]]
        assert found[rank]["rows"] == [[1.0], [1.0], [2.0], [2.0]]
        assert found[rank]["columns"] == [[1.0, 2.0], [1.0, 2.0]]


def test_what_could_part_the_members_comes_from_member_0(two_members):
    found, _, _ = two_members
    for rank in range(2):
        assert found[rank]["tokens"] == [5]
        assert found[rank]["seed"] == "from 0"
        assert found[rank]["pages"] == 99


def test_a_group_splits_into_groups_of_neighbours(two_members):
    found, _, _ = two_members
    for rank in range(2):
        assert found[rank]["alone"] == (0, 1, [[rank + 1.0], [rank + 1.0]])
        assert found[rank]["whole"] == 2


def test_a_dead_member_ends_the_others_with_an_error_and_no_hang(two_members):
    _, statuses, seconds = two_members
    assert statuses[1] == DIED
    assert statuses[0] not in (0, None)
    assert seconds < 2 * TIMEOUT


def test_one_process_is_a_group_of_its_own_where_all_is_the_identity(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tensor = torch.arange(3)
    with join() as group:
        assert group == Group(rank=0, size=1)
        assert group.all_reduce(tensor) is tensor
        assert group.gather(tensor) is tensor
        assert group.broadcast(tensor) is tensor
        assert group.by_first(lambda: "seed") == "seed"
        assert group.collect(4) == [4]
        assert group.split(1) == group


@pytest.mark.parametrize("size", [0, 2, 4])
def test_a_size_that_does_not_divide_the_group_is_refused_with_those_that_do(size):
    with pytest.raises(ValueError, match=rf"tensor_parallel is {size}; with 3 processes it can be \[1, 3\]"):
        Group(rank=0, size=3).split(size)
