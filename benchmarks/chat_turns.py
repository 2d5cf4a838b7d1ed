"""Time what an API worker does for an agent's next turn: JSON parsing, the chat template and the tokenizer.

Every request holds the whole conversation. `kept_ms` is with a tokenizer that has encoded the earlier turns, `new_ms`
with a new one, and `floor_ms` with a new one that encodes the new turn alone. The tokenizer and the template are the
demo's, or those of a folder with tokenizer.json and chat_template.jinja. Example:

    python benchmarks/chat_turns.py --turns 12 --first-chars 200000
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenspeed_bench.result import machine
from tokenspeed_demo.score import CHECKPOINT
from tokenspeed_server.api_body import parse_body
from tokenspeed_server.prompts import chat_ids
from tokenspeed_server.protocol import ChatRequest

from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.messages import Ready
from tokenspeed_core.text.template import ChatTemplate, load_chat_template
from tokenspeed_core.text.tokenizer import Tokenizer, load_tokenizer

SEED = 7
LIMITS = Ready(2**30, 2**30, 2**31 - 1, "")
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
T = TypeVar("T")


def words(rng: random.Random, num_chars: int) -> str:
    """Return words and line ends with the lengths and frequencies of English."""
    text: list[str] = []
    left = num_chars
    while left > 0:
        length = min(9, 1 + int(rng.expovariate(1 / 4)))
        text.append(
            "".join(rng.choices(LETTERS, range(26, 0, -1), k=length))
            + (" " if rng.random() < 0.9 else ".\n")
        )
        left -= length + 1
    return "".join(text)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the milliseconds that a call took, and its value."""
    begin = time.perf_counter()
    value = call()
    return 1e3 * (time.perf_counter() - begin), value


def _inputs(tokenizer: Tokenizer, template: ChatTemplate | None) -> InputProcessor:
    return InputProcessor(ModelText(tokenizer, template), LIMITS)


def main() -> None:
    """Print a line of JSON with the medians over the turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(CHECKPOINT), help="default: the demo"
    )
    parser.add_argument("--turns", type=int, default=12, help="number of turns")
    parser.add_argument(
        "--first-chars", type=int, default=200_000, help="characters before the first turn"
    )
    parser.add_argument("--turn-chars", type=int, default=3_200, help="characters that a turn adds")
    given = parser.parse_args()
    kept = load_tokenizer(given.folder)
    template = load_chat_template(given.folder, kept.special_tokens)
    rng = random.Random(SEED)
    texts = [words(rng, given.turn_chars) for _ in range(given.first_chars // given.turn_chars)]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    times: dict[str, list[float]] = {"json_ms": [], "kept_ms": [], "new_ms": [], "floor_ms": []}
    num_tokens = 0
    for turn in range(given.turns + 1):
        messages += [{"role": "user", "content": words(rng, given.turn_chars)}]
        body = json.dumps({"messages": messages}).encode()
        json_ms, parsed = timed(partial(parse_body, body, ChatRequest))
        request = parsed.body
        new, other = load_tokenizer(given.folder), load_tokenizer(given.folder)
        kept_ms, ids = timed(partial(chat_ids, _inputs(kept, template), request, None))
        new_ms, same = timed(partial(chat_ids, _inputs(new, template), request, None))
        floor_ms, _ = timed(
            partial(other.encode, messages[-1]["content"], add_special_tokens=False)
        )
        assert (ids == same).all()
        num_tokens = len(ids)
        if turn:  # the first turn has no earlier ones
            for name, value in zip(times, (json_ms, kept_ms, new_ms, floor_ms), strict=True):
                times[name].append(value)
    print(
        json.dumps(
            {
                "tokens": num_tokens,
                "bytes": len(body),
                **{name: round(statistics.median(each), 2) for name, each in times.items()},
                "machine": machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
