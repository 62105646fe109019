"""Exercise 3. Farthest point sampling by hand, on Python lists, for one head (METHOD.md, "Query buffer").

Write `fps(queries, m)`: the indices of m queries in pick order. Of values within 1e-5 of the minimum the
lowest index counts. Do not use torch.
"""

import random

import torch

from nanobeacon.kernels import reference


def fps(queries: list[list[float]], m: int) -> list[int]:
    raise NotImplementedError("yours to write")


def test_it_picks_what_the_kernel_picks():
    draw = random.Random(0)
    for _ in range(20):
        n = draw.randint(5, 30)
        m = draw.randint(1, n)
        queries = [[draw.gauss(0, 1) for _ in range(8)] for _ in range(n)]
        counts = torch.tensor([n], dtype=torch.int32)
        wanted = reference.fps(torch.tensor([queries]), counts, m)[0].tolist()
        assert fps(queries, m) == wanted
