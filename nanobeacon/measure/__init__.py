"""What `bench.py` measures, on the engine's public API; one module a subcommand.

Each has `add_arguments(parser)`, `run(options) -> dict` that JSON can hold, `table(result) -> str` and, where
there is something to draw, `charts(result) -> list[str]` of SVG. None prints; the engine imports none of it.
"""

TABLE_4 = [  # the paper's, Qwen3-4B on an A100 80 GB: policy, budget, batch, tokens/s
    ("full", None, 14, 82.3),
    ("beacon", 2048, 14, 356.4),
    ("rpc", 2048, 192, 725.4),
    ("beacon", 2048, 192, 704.8),
    ("rpc", 1024, 320, 1380.8),
    ("snapkv", 1024, 320, 1380.7),
    ("beacon", 1024, 320, 1345.9),
]
GENERATED = 32768  # tokens of a request in Table 4
