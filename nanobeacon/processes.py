"""A program that torchrun runs several times: which process speaks, and who works with whom.

The programs' side of `parallel`: it turns words of the command line into groups. It knows nothing
about models, prompts or what the groups do, and imports torch only once groups are formed, so that
a program which has nothing to compute ends at once.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parallel import Group

LAST_WORDS = 5.0  # seconds that the first of several processes gets to say why it ends


def spoken_once(program: Callable[[], int]) -> int:
    """Run a program; its exit status. Of the processes that torchrun starts only the first prints.

    The others have the same to say, unless they crash: then each shows where. torchrun ends all
    processes as soon as one fails, so one that is silent lets the first speak out.
    """
    if os.environ.get("RANK", "0") == "0":
        return program()
    status = 1
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            status = program()
    except Exception:
        traceback.print_exc()
    finally:
        if status != 0:
            time.sleep(LAST_WORDS)
    return status


@contextmanager
def joined(
    device_name: str, tensor_parallel: int | None, data_parallel: bool
) -> "Iterator[tuple[Group, Group]]":
    """The group of all processes, and of those that compute one model together with this one.

    Without torchrun both are this process alone. tensor_parallel: the size of the second group;
    None: all of them, or each by itself with data_parallel. ValueError naming the option where the
    device or the size is not possible; ConnectionError where a process is gone.
    """
    from .llm import device_of
    from .parallel import join

    device = device_of(device_name)
    with join(device.type) as everyone:
        if everyone.size > 1 and device.index is not None:
            own_gpu = "each process has a GPU of its own; cuda is possible"
            raise ValueError(f"--device {device_name}: {own_gpu}")
        together = tensor_parallel
        if together is None:
            together = 1 if data_parallel else everyone.size
        yield everyone, everyone.split(together)
