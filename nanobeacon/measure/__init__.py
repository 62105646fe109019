"""What `bench.py` measures, on the engine's public API; one module a subcommand.

Each has `add_arguments(parser)`, `run(options) -> dict` that JSON can hold, `table(result) -> str` and, where
there is something to draw, `charts(result) -> list[str]` of SVG. None prints; the engine imports none of it.
"""
