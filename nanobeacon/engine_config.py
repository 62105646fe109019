"""Temporary."""
from dataclasses import dataclass
from .policies import EvictionSettings


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, checked option by option; what each means stands at `LLM`."""

    seed: int | None = None
    max_num_seqs: int = 16
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    gpu_memory: float = 0.9
    chunk: int = 512
    cuda_graphs: bool = True
    eviction: EvictionSettings | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        open_ones = ("seed", "max_model_len", "num_pages")
        for name in ("seed", "max_num_seqs", "max_model_len", "page_size", "num_pages", "chunk"):
            value = getattr(self, name)
            if value is None and name in open_ones:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or (name != "seed" and value < 1):
                least = "" if name == "seed" else " of at least 1"
                raise ValueError(f"{name}={value!r}: a whole number{least} is possible")
        memory = self.gpu_memory
        if not isinstance(memory, int | float) or isinstance(memory, bool) or not 0 < memory <= 1:
            raise ValueError(f"gpu_memory={memory!r}: a share above 0 and up to 1 is possible")
        for name in ("cuda_graphs", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: True or False is possible")

    def check_length(self, context: int) -> None:
        """max_model_len can only lower what the model's positions allow."""
        if self.max_model_len is not None and self.max_model_len > context:
            raise ValueError(
                f"max_model_len={self.max_model_len}: the model's positions allow {context}, RoPE scaling counted in"
            )
