"""One thread for tiny models; slow processes of some test files run beside the others, on the second core."""

import os
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tiny products lose by threads

running: dict[str, Future] = {}


@pytest.hookimpl(trylast=True)  # what -m and -k leave
def pytest_collection_modifyitems(config, items):
    """Where test_second_core.py is collected, its files are its business, and it is waited for last."""
    files = {item.path.name: item for item in items}
    if "test_second_core.py" not in files:
        return
    theirs = files["test_second_core.py"].module.FILES
    config.hook.pytest_deselected(items=[item for item in items if item.path.name in theirs])
    items[:] = [item for item in items if item.path.name not in theirs]
    items.sort(key=lambda item: item.path.name == "test_second_core.py")


def pytest_collection_finish(session):
    """Start what modules declare, one after another: BACKGROUND = {name: (command, environment)}."""
    queue = ThreadPoolExecutor(1)
    for module in dict.fromkeys(getattr(item, "module", None) for item in session.items):
        for name, (command, environment) in getattr(module, "BACKGROUND", {}).items():
            running[name] = queue.submit(
                subprocess.run,
                command,
                env=environment,
                cwd=Path(__file__).parent.parent,
                capture_output=True,
                text=True,
                timeout=900,
            )


def pytest_sessionfinish(session):
    for future in running.values():
        future.cancel()


@pytest.fixture(scope="session")
def background():
    """The finished process of a name that a module declares."""
    return lambda name: running[name].result()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """family -> (folder, config values, state dict) of the tiny models that the oracle runs too."""
    import torch
    from tiny import FAMILIES, tiny_folder
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for family in FAMILIES:
        folder = tiny_folder(tmp_path_factory.mktemp(family), family)
        state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        found[family] = folder, AutoConfig.from_pretrained(folder).to_dict(), state
    return found
