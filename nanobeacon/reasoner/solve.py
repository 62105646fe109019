"""The reasoner at work on the engine: an LLM solves problems, freely or with the trace fed, and is graded.

Knows the engine's public API and the task; nothing of policies, of budgets or of how results are shown.
"""

from collections.abc import Callable, Sequence

from .. import LLM, SamplingParams
from .task import Grade, Problem, grade


def solve(
    llm: LLM, problems: Sequence[Problem], solved: Callable[[], object] = int
) -> tuple[list[Grade], list[float]]:
    """The model writes each trace, greedily; `solved` is called after each. Returns (grades, [])."""
    params = SamplingParams(temperature=0.0, max_tokens=max(len(problem.trace) for problem in problems))
    requests = llm.submit([list(problem.prompt) for problem in problems], params)
    for request, _ in llm.run(requests):
        if request.error:
            raise ValueError(request.error)
        if request.finish_reason:
            solved()
    return [grade(p, r.output_token_ids) for p, r in zip(problems, requests, strict=True)], []


def solve_forced(
    llm: LLM, problems: Sequence[Problem], solved: Callable[[], object] = int
) -> tuple[list[Grade], list[float]]:
    """The true trace is fed and what would have been said is graded, so that no slip leads to another.

    Returns the grades, and of each problem the share right of the other tokens, the local work.
    """
    right = [[False] * len(problem.trace) for problem in problems]

    def compare(i: int, index: int, logits) -> None:
        right[i][index] = int(logits.argmax()) == problems[i].trace[index]
        if index + 1 == len(right[i]):
            solved()

    llm.score([list(p.prompt) for p in problems], [list(p.trace) for p in problems], compare)
    grades, local = [], []
    for problem, tokens in zip(problems, right, strict=True):
        look_backs, looked = len(problem.look_backs), sum(tokens[place] for place in problem.look_backs)
        grades.append(Grade(look_backs, looked, all(tokens)))
        local.append((sum(tokens) - looked) / (len(tokens) - look_backs))
    return grades, local
