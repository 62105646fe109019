"""How many threads of the CPU the programs use: one where a model is too small for sharing
its work to pay.

Knows a model's shape and the environment. Only the programs call it; `LLM` leaves torch's
setting alone.
"""

import os
from collections.abc import Mapping

from .config import ModelConfig

# Elements of the largest weight of a layer up to which one thread is used. Threads wait for each
# other at the end of every product; below this size one product takes less time than such a wait on
# a busy machine.
SMALL_WEIGHT = 1 << 18
# multiplications; many rows make the product of a small weight large again
SMALL_PRODUCT = SMALL_WEIGHT * 32
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # what torch itself reads: the user's word


def threads_for(
    shape: ModelConfig, batch: int, wanted: int | None, environment: Mapping[str, str] = os.environ
) -> int | None:
    """Threads to set, None to leave torch's own number.

    wanted: what the user asked for, which always wins, as does a setting of the environment. batch:
    rows of one product, the requests of a decode step.
    """
    if wanted is not None:
        return wanted
    if any(environment.get(name) for name in SETTINGS):
        return None
    weight = shape.hidden_size * max(shape.intermediate_size, shape.num_heads * shape.head_dim)
    small = weight <= SMALL_WEIGHT and weight * batch <= SMALL_PRODUCT
    return 1 if small else None
