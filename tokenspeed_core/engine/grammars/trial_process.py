"""The subprocess for trial compilations of grammars. It ends if a compilation takes too long or too much memory.

It reads lines of JSON: first its settings, then one grammar per line. It answers each line with null or the error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed_core.api.grammars import GrammarCompiler, GrammarError, GrammarSpec
from tokenspeed_core.engine.grammars.backend import read_vocabulary
from tokenspeed_core.engine.parent_death import end_with_parent
from tokenspeed_core.targets import load_target
from tokenspeed_core.text.tokenizer import load_tokenizer


def main() -> None:
    """Serve until the parent closes the pipe."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # output of libraries is not an answer
    settings = json.loads(sys.stdin.readline())
    spec: GrammarSpec = load_target(settings["spec"])
    tokenizer, vocab_size = load_tokenizer(Path(settings["folder"])), settings["vocab_size"]
    compiler = spec.make(read_vocabulary(tokenizer, vocab_size, tuple(settings["eos_ids"])))
    _limit_memory(settings["max_bytes"])
    answers.write("null\n")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"])  # SIGALRM ends the process
        answer = _try(compiler, json.loads(line), vocab_size)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")


def _try(compiler: GrammarCompiler, grammar: dict[str, Any], vocab_size: int) -> str | None:
    """Compile a grammar and fill its first mask. Returns why it is invalid."""
    try:
        compiled = compiler.compile(grammar["kind"], grammar["text"])
        compiled.matcher().fill(np.zeros(-(-vocab_size // 32), np.int32))
    except GrammarError as error:
        return str(error)
    return None


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to its current size plus `num_bytes`."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
