"""Files that run in a process of their own, beside the others, when the whole suite is asked for.

One process uses one core, since tiny models lose by threads; most of these files start processes anyway.
A file that is named on the command line runs as usual.
"""

import os
import sys
from pathlib import Path

FILES = (
    "test_bench_gpu.py",
    "test_generate.py",
    "test_hostile_files.py",
    "test_real.py",
    "test_retention.py",
    "test_soak.py",
    "test_torchrun.py",
)
HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / f) for f in FILES)]
BACKGROUND = {"second core": (COMMAND, dict(os.environ))}


def test_the_files_of_the_second_core_pass(background):
    done = background("second core")
    print(done.stdout[-20_000:])
    assert done.returncode == 0, done.stderr[-2_000:]
