"""The process in which math-verify and sympy read model text; `math_processes.py` starts, times and kills it.

It runs as a plain script, so that neither this package nor torch is imported. JSON lines come in and go out. Requests
are answered in a fork: one that exceeds its CPU seconds is killed by a signal, and the next fork has all imports.
"""

import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any, TextIO

MAX_DECIMAL_ERROR = 1e-4


@lru_cache(maxsize=2048)
def parse_expression(expression: str) -> tuple[Any, ...]:
    """Return an expression as parsed by math-verify's LaTeX grammar: one sympy object, or nothing."""
    from math_verify import LatexExtractionConfig, parse

    config = LatexExtractionConfig()
    return tuple(parse(f"${expression}$", [config], fallback_mode="no_fallback", parsing_timeout=None))


def are_equal(answer: str, reference: str) -> bool:
    """Return whether two expressions are mathematically equal: math-verify, or a decimal that rounds an irrational."""
    from math_verify import verify

    parsed_answer, parsed_reference = parse_expression(answer), parse_expression(reference)
    if not parsed_answer or not parsed_reference:
        return False
    if verify(list(parsed_reference), list(parsed_answer), timeout_seconds=None):
        return True
    return _is_rounded(parsed_answer[0], parsed_reference[0])


def _is_rounded(left: Any, right: Any) -> bool:
    """Return whether one side is a decimal within 1e-4 (relative) of the other, an irrational number."""
    from sympy import Expr, Float

    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    if isinstance(right, Float):
        left, right = right, left
    if not isinstance(left, Float) or right.is_rational is not False or not right.is_real:
        return False
    exact = float(right.evalf(20))
    return abs(float(left) - exact) <= MAX_DECIMAL_ERROR * abs(exact)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests ``{"answer", "reference", "cpu_seconds"}`` by ``{"equal"}`` until the pipe is closed."""
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        try:
            equal: bool | None = are_equal(request["answer"], request["reference"])
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError):
            equal = None
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(json.dumps({"equal": equal}) + "\n")
        answers.flush()


def serve_in_forks(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the pipe is closed; one that kills its fork is answered with null."""
    while True:
        fork = os.fork()
        if not fork:
            serve(requests, answers)
            os._exit(0)
        if os.waitpid(fork, 0)[1] == 0:
            return
        answers.write(json.dumps({"equal": None}) + "\n")
        answers.flush()


def main(max_memory_bytes: int) -> None:
    """Run the worker on its standard streams; what libraries print is dropped."""
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 1)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    try:
        are_equal("x+1", "1+x")
    except ImportError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        answers.flush()
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    serve_in_forks(sys.stdin, answers)


if __name__ == "__main__":
    main(int(sys.argv[1]))
