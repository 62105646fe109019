"""The numbers people decide by: each measurement prints a table for people and, for programs, JSON.

The JSON object is the last line where standard output is no terminal, or with --json; --output FILE
writes it in any case. Parses and prints; what is measured lies in `nanobeacon/measure/`, one module
a subcommand. Exit status: 0, 1 for a measurement that failed, 2 for a user's mistake (one line),
130 for Ctrl-C.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanobeacon.options import Parser
from nanobeacon.processes import spoken_once

COMMANDS = {
    "throughput": "tokens/s, time per step and memory; --vs transformers, --table4, --max-batch",
    "crossover": "from which output length and batch a budget pays, and what it costs before",
    "prefix": "what the prefix cache saves: turns of a conversation, requests under one header",
    "fidelity": "how close each policy stays to the full cache on text of the model's own",
    "accuracy": "how often a model is right under each policy and budget",
    "kernels": "the kernels' times and floors",
    "gpu": "all that only a GPU can show, within 12 minutes; one table, one JSON",
    "host": "the host's own time in a decode step, with a stand-in for the model",
    "revisit": "which tokens of a text go back, in which layers and heads; one report with figures",
    "soak": "random traffic for as long as one likes: nothing lost, memory flat, answers as alone",
    "tour": "two minutes on the embedded reasoner, offline (what runs without a subcommand)",
}
TOUR = (
    "throughput --model {reasoner} --batch 8 --output-length 384 --budgets 96 --repeats 2",
    "accuracy --n 16 --policies full,beacon,recent,random --budgets 96 --protect prompt",
)
# Shapes to run with random weights, where a checkpoint would be a download: the fields of CONFIG
CONFIG = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rope_theta",
)
PRESETS = {
    "smollm2-135m": ("llama", 30, 576, 1536, 9, 3, 64, 49152, True, 8192, 1e5),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True, 40960, 1e6),
    "qwen3-4b": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True, 40960, 1e6),
    "qwen3-14b": ("qwen3", 40, 5120, 17408, 40, 8, 128, 151936, False, 40960, 1e6),
    "r1-qwen-7b": ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False, 131072, 1e4),
    "r1-llama-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 131072, 5e5),
}
LLAMA3 = {  # how r1-llama-8b stretches RoPE
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SECTIONS = ("times", "floors", "table4", "expected", "launches", "kernels")  # tables of `kernels`
TIMED = ("throughput", "crossover", "prefix", "gpu")  # those that run any model's shape
PRESET = "smollm2-135m"  # of those that have none of their own


def command_of(arguments: Sequence[str]) -> str:
    """The subcommand; without any, the tour."""
    commands = "\n".join(f"  {name:11}{text}" for name, text in COMMANDS.items())
    top = Parser(
        "bench.py",
        usage="bench.py [SUBCOMMAND] [--help] ...",
        description=__doc__.splitlines()[0],
        epilog=f"subcommands:\n{commands}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    top.add_argument("command", nargs="?", default="tour", choices=COMMANDS, help=argparse.SUPPRESS)
    return top.parse_args(arguments[:1]).command


def parse(command: str, module: Any, arguments: Sequence[str]) -> Namespace:
    """A subcommand's options: the module's own, and those that several of them have.

    ValueError for what cannot be; whatever depends on the model is checked later.
    """
    import torch

    # 1. The module may change what the shared options say, as it comes after them
    p = Parser(prog=f"bench.py {command}", description=COMMANDS[command], conflict_handler="resolve")
    if command in TIMED:
        add_model_arguments(p, getattr(module, "PRESET", PRESET))
        if command != "gpu":  # it has lengths of its own
            add_job_arguments(p)
    module.add_arguments(p)
    p.add_argument("--threads", type=int, help="of the CPU (default: torch's own; 1 for a tiny model)")
    if hasattr(module, "charts"):
        p.add_argument("--plot", type=Path, metavar="FILE", help="charts, as .svg or .html")
    add_output_arguments(p)

    # 2. What was given
    options = parsed(p, arguments)
    most = max(os.cpu_count() or 1, torch.get_num_threads())
    if options.threads is not None and not 1 <= options.threads <= most:
        raise ValueError(f"--threads {options.threads}: 1 to {most} are possible on this machine")
    return options


def add_output_arguments(p: argparse.ArgumentParser) -> None:
    """Where the numbers go; all subcommands have these."""
    p.add_argument("--json", action="store_true", help="the JSON object as last line on a terminal too")
    p.add_argument("--output", type=Path, metavar="FILE", help="the JSON object into a file")
    p.set_defaults(plot=None)


def parsed(p: argparse.ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """The options, with files that can be written as far as that can be known before."""
    options = p.parse_args(arguments)
    for name, file in (("--plot", options.plot), ("--output", options.output)):
        if file and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"{name} {file}: a file in an existing folder is possible")
    if options.plot and options.plot.suffix not in (".svg", ".html"):
        raise ValueError(f"--plot {options.plot}: a .svg or .html file is possible")
    return options


def add_model_arguments(p: argparse.ArgumentParser, preset: str) -> None:
    """Which model runs, and where; `preset` is the one that runs where none is named."""
    which = p.add_mutually_exclusive_group()
    which.add_argument("--model", help="folder or hub id")
    which.add_argument("--preset", choices=PRESETS, help=f"its shape, random weights (default: {preset})")
    p.add_argument("--load", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    p.add_argument("--seed", type=int, default=0, help="of the prompts' token ids")


def add_job_arguments(p: argparse.ArgumentParser) -> None:
    """How much is timed. The modules set the defaults of the lengths."""
    p.add_argument("--prompt-length", type=int, help="tokens (default: %(default)s)")
    p.add_argument("--output-length", type=int, help="tokens (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    p.add_argument("--no-cuda-graphs", action="store_true")
    late = "read each step's tokens before the next one is launched"
    p.add_argument("--no-overlap", action="store_true", help=late)


@contextmanager
def settled(options: Namespace) -> Iterator[Namespace]:
    """The options with model, load, device and dtype decided; a preset is a folder as long as
    this lasts."""
    from nanobeacon.config import read_config
    from nanobeacon.hub import resolve
    from nanobeacon.llm import device_of

    for name, least in (("prompt_length", 1), ("output_length", 2), ("repeats", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: at least {least} is possible")
    job = Namespace(**vars(options))
    with tempfile.TemporaryDirectory() as scratch:
        # 1. The model's folder
        if job.model is None:
            job.model = scratch
            job.load = "dummy"
            Path(scratch, "config.json").write_text(json.dumps(preset_config(job.preset)))
        job.model = str(resolve(job.model, config_only=job.load == "dummy"))

        # 2. Where it runs, and in which dtype: its own, as far as a CPU computes in it
        job.device = str(device_of(job.device))
        if job.no_cuda_graphs and job.device == "cpu":
            raise ValueError("--no-cuda-graphs: a CPU has none to leave out")
        if job.no_overlap and job.device == "cpu":
            raise ValueError("--no-overlap: on a CPU no steps overlap")
        if job.dtype == "auto":
            job.dtype = read_config(job.model).dtype or "bfloat16"
        if (job.device, job.dtype) == ("cpu", "float16"):
            if options.dtype != "auto":
                raise ValueError("--dtype float16: a CPU computes that in bfloat16, which can be asked for")
            job.dtype = "bfloat16"
        yield job


def preset_config(name: str) -> dict[str, Any]:
    """A preset as the config.json of a checkpoint."""
    return {
        **dict(zip(CONFIG, PRESETS[name], strict=True)),
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "rope_scaling": LLAMA3 if name == "r1-llama-8b" else None,
    }


class Kernels:
    """The functions of `measure/kernels.py`, which give rows, as a subcommand."""

    @staticmethod
    def add_arguments(p: argparse.ArgumentParser) -> None:
        p.add_argument("--device", help="auto, cpu, cuda: each kernel's time there")
        p.add_argument("--aot", action="store_true", help="compile for sm_80, sm_90, gfx942; needs no GPU")
        p.add_argument("--roofline", action="store_true", help="bytes, operations and floors, from shapes")
        p.add_argument("--launches", action="store_true", help="count a pass's launches; needs no GPU")

    @staticmethod
    def run(options: Namespace) -> dict[str, Any]:
        from nanobeacon.llm import device_of
        from nanobeacon.measure import common, kernels, launches

        if not (options.roofline or options.aot or options.launches):
            device = device_of(options.device or "auto")
            return {"times": kernels.timings(str(device))}
        from_shapes = "what --roofline, --aot and --launches say comes from shapes"
        common.refuse(options, ("device",), from_shapes)
        found: dict[str, Any] = {}
        if options.roofline:
            found.update(kernels.roofline())
            found["expected"] = launches.expected()
        if options.launches:
            found["launches"] = launches.passes()
        if options.aot:
            found["kernels"] = kernels.aot()
        return found

    @staticmethod
    def table(result: dict[str, Any]) -> str:
        from nanobeacon.measure.common import columns

        parts = []
        for name in SECTIONS:
            if name not in result:
                continue
            rows = result[name]
            cells = [list(row.values()) for row in rows]
            parts.append(f"{name}\n{columns(list(rows[0]), cells)}")
        return "\n\n".join(parts)


def record(options: Namespace) -> dict[str, Any]:
    """What it takes to run a measurement again, beside its command: versions, machine,
    threads, date."""
    import torch

    from nanobeacon import __version__
    from nanobeacon.measure.common import proc, proc_bytes
    from nanobeacon.parallel import launched

    versions = {
        "nanobeacon": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("triton", "safetensors", "transformers", "kvpress"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    machine = {
        "system": platform.platform(),
        "cpu": proc("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_bytes": proc_bytes("/proc/meminfo", "MemTotal"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {
        "versions": versions,
        "machine": machine,
        "threads": options.threads,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processes": launched(),
    }


def heading(result: dict[str, Any]) -> str:
    """The line above the tables: what was measured, of which model, where, with what, and when."""
    from nanobeacon.measure.common import model_name

    # 1. Where: the GPU, or the CPU with its threads
    machine = result["machine"]
    if machine["gpu"] and result.get("device") != "cpu":
        place = machine["gpu"]
    else:
        threads = "1 thread" if result["threads"] == 1 else f"{result['threads']} threads"
        place = f"{machine['cpu']} ({machine['cpu_capability']}), {threads}"
    if result.get("processes", 1) > 1:
        place = f"{result['processes']} processes on {place}, bytes of the first"

    # 2. With what
    versions = result["versions"]
    packages = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    packages = ", ".join(packages)

    model = f"{model_name(result['model'])} " if result.get("model") else ""
    return f"{result['bench']}: {model}on {place}; {packages}; {result['date'][:10]}"


@dataclass(frozen=True)
class Report:
    """What a run has found: the JSON object, the tables for people, the charts where some
    were asked for."""

    result: dict[str, Any]
    text: str
    charts: Sequence[Any] = ()


def measure(command: str, arguments: Sequence[str]) -> tuple[Namespace, Report]:
    """Run one subcommand; its options, and what it has found."""
    from nanobeacon.measure.common import fitted

    module = Kernels if command == "kernels" else importlib.import_module(f"nanobeacon.measure.{command}")
    options = parse(command, module, arguments)

    # 1. Measure. The timed ones get a folder, device and dtype that are decided, and tell which
    if command in TIMED:
        if options.model is None and options.preset is None:
            options.preset = getattr(module, "PRESET", PRESET)
        with settled(options) as job:
            job.threads = set_threads(job)
            options.threads = job.threads
            decided = {"load": job.load, "device": job.device, "dtype": job.dtype}
            found = decided | module.run(job)
    else:
        options.threads = set_threads(options)
        found = module.run(options)

    # 2. Put what it takes to run this again in front of what was found
    result = {
        "bench": command,
        "command": ["bench.py", command, *arguments],
        "model": getattr(options, "model", None) or getattr(options, "preset", None),
        **record(options),
        **found,
    }
    text = fitted(f"{heading(result)}\n\n{module.table(result)}\n")
    charts = module.charts(result) if options.plot else ()
    return options, Report(result, text, charts)


def set_threads(options: Namespace) -> int:
    """Let torch have one thread where model and batch are tiny, unless the user says otherwise.

    Returns how many it has now.
    """
    import torch

    from nanobeacon.config import read_config
    from nanobeacon.hub import resolve
    from nanobeacon.reasoner import folder
    from nanobeacon.threads import threads_for

    wanted = options.threads
    if hasattr(options, "model"):  # `kernels` has none
        shape = read_config(resolve(options.model or str(folder()), config_only=True))
        batch = getattr(options, "batch", None) or getattr(options, "group", 1)
        largest = max(batch) if isinstance(batch, list) else batch
        wanted = threads_for(shape, largest, wanted)
    if wanted is not None:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def tour(arguments: Sequence[str]) -> tuple[Namespace, Report]:
    """A small throughput and a small accuracy on the embedded reasoner, and what else there is."""
    from nanobeacon.reasoner import folder

    p = Parser(prog="bench.py tour", description=COMMANDS["tour"])
    add_output_arguments(p)
    options = parsed(p, arguments)
    parts = []
    for line in TOUR:
        words = [word.format(reasoner=os.path.relpath(folder())) for word in line.split()]
        say(f"$ python bench.py {' '.join(words)}")
        _, part = measure(words[0], words[1:])
        say(part.text)
        parts.append(part.result)
    others = [f"  {name:11}{text}" for name, text in COMMANDS.items() if name != "tour"]
    text = "\n".join(["There is more (bench.py SUBCOMMAND --help):", *others])
    result = {"bench": "tour", "command": ["bench.py", *arguments], "parts": parts}
    return options, Report(result, text)


def publish(options: Namespace, report: Report) -> None:
    """Write the files that were asked for, then print. A file that cannot be written costs
    no numbers."""
    try:
        if options.output:
            options.output.write_text(f"{json.dumps(report.result)}\n", encoding="utf-8")
        if options.plot:
            from nanobeacon.measure.plots import figure

            drawn = figure(report.charts, html=options.plot.suffix == ".html")
            options.plot.write_text(drawn, encoding="utf-8")
    finally:
        say(report.text)
        if options.json or not sys.stdout.isatty():
            say(json.dumps(report.result))


def say(text: str) -> None:
    """Print. That nobody reads any more is no reason to stop: files may be wanted."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Write whatever comes to nowhere, so that Python's last flush does not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: list[str] | None = None) -> int:
    return spoken_once(lambda: run(sys.argv[1:] if arguments is None else arguments))


def check_processes(command: str) -> None:
    """Most measurements are one process's."""
    from nanobeacon.parallel import launched

    if launched() > 1 and command != "throughput":
        raise ValueError(f"{command} needs one process; under torchrun throughput is possible")


def run(arguments: list[str]) -> int:
    """The program; returns its exit status."""
    try:
        command = command_of(arguments)
        check_processes(command)
        if command == "tour":
            options, report = tour(arguments[1:])
        else:
            options, report = measure(command, arguments[1:])
        publish(options, report)
        # The numbers are out; a run that went wrong in part still says so
        error = report.result.get("first_error")
        if error:
            raise RuntimeError(f"some requests failed: {error}")
        wrong = report.result.get("wrong")
        if wrong:
            raise RuntimeError(wrong)
        return 0
    # a mistake; a worker or an output that failed
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, OSError):
            discard_output()
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
