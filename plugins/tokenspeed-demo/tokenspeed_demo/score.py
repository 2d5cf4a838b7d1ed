"""Score the demo model on its held-out sets: exact answers, decoded greedily.

    python -m tokenspeed_demo.score --base-url http://127.0.0.1:8000/v1   # any OpenAI-compatible server
    python -m tokenspeed_demo.score --engine                              # tokenspeed_core.LLM in process
    python -m tokenspeed_demo.score --transformers                        # transformers, as the reference

An answer counts when it equals the expected one once thinking and outer white space are taken away.
Tool calls count when name and arguments are equal as JSON and nothing else was said. The exit status
is 1 when a task falls below its required share.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .items import NUM_HELD_OUT, REQUIRED, Item, held_out_set
from .render import Renderer

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
MAX_TOKENS = 320  # more than the longest held-out answer has
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

Answerer = Callable[[list[Item]], list[str]]


def without_thinking(text: str) -> str:
    """Return the answer in a model's text, "" if its reasoning is unfinished."""
    if "<think>" in text and "</think>" not in text:
        return ""
    return text.rpartition("</think>")[2].replace("<|im_end|>", "").strip()


def normalized(text: str) -> object:
    """Return an answer's tool calls as data, or its text without calls. Equal answers give equal values."""
    answer = without_thinking(text)
    bodies = _CALL.findall(answer)
    if not bodies or _CALL.sub("", answer).strip():
        return answer
    try:
        calls = [json.loads(body) for body in bodies]
    except json.JSONDecodeError:
        return answer
    return json.dumps(calls, sort_keys=True)


def is_right(item: Item, text: str) -> bool:
    return normalized(text) == normalized(item.answer)


def message_text(message: dict[str, Any]) -> str:
    """Return a chat message as text, as a server without parsers sends it."""
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]
    parts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return "\n".join([message.get("content") or "", *parts]).strip()


def over_http(base_url: str, model: str, api_key: str, concurrency: int) -> Answerer:
    """Send the items to a server, `concurrency` requests at a time."""
    import asyncio

    import httpx

    async def ask(client: httpx.AsyncClient, gate: asyncio.Semaphore, name: str, item: Item) -> str:
        body: dict[str, Any] = {
            "model": name,
            "messages": list(item.messages),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if item.tools:
            body["tools"] = list(item.tools)
        async with gate:
            response = await client.post("chat/completions", json=body)
        if response.is_error:
            raise SystemExit(f"the server answered {response.status_code}: {response.text[:400]}")
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message_text(message)

    async def ask_all(items: list[Item]) -> list[str]:
        headers = {"Authorization": f"Bearer {api_key}"}
        url = base_url.rstrip("/") + "/"
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=600, trust_env=False
        ) as client:
            name = model or (await client.get("models")).json()["data"][0]["id"]
            gate = asyncio.Semaphore(concurrency)
            return await asyncio.gather(*(ask(client, gate, name, item) for item in items))

    return lambda items: asyncio.run(ask_all(items))


def in_process(path: Path, keywords: dict[str, Any]) -> Answerer:
    """Run the items on `tokenspeed_core.LLM`, with prompts as token ids."""
    from tokenizers import Tokenizer

    from tokenspeed_core import LLM, SamplingParams

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    renderer = Renderer(path / "chat_template.jinja")
    llm = LLM(str(path), **keywords)
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def answer(items: list[Item]) -> list[str]:
        prompts = [
            {
                "prompt_token_ids": tokenizer.encode(
                    renderer.prompt(item), add_special_tokens=False
                ).ids
            }
            for item in items
        ]
        return [output.outputs[0].text or "" for output in llm.generate(prompts, sampling)]

    return answer


def with_transformers(path: Path, device: str, batch_size: int) -> Answerer:
    """Run the items on transformers, in batches padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()

    def answer_batch(items: list[Item]) -> list[str]:
        prompts = [
            tokenizer.apply_chat_template(
                list(item.messages),
                tools=list(item.tools) or None,
                add_generation_prompt=True,
                enable_thinking=item.enable_thinking,
                tokenize=False,
            )
            for item in items
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(
            device
        )
        with torch.inference_mode():
            outputs = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        new = outputs[:, inputs["input_ids"].shape[1] :]
        # Tokens after the end of the turn are padding.
        return [text.partition("<|im_end|>")[0] for text in tokenizer.batch_decode(new)]

    def answer(items: list[Item]) -> list[str]:
        # Prompts of similar length share a batch to save padding.
        order = sorted(
            range(len(items)), key=lambda i: len(str(items[i].messages)) + len(str(items[i].tools))
        )
        answers = [""] * len(items)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            for place, text in zip(chosen, answer_batch([items[i] for i in chosen]), strict=True):
                answers[place] = text
        return answers

    return answer


def score(
    answer: Answerer, tasks: list[str], num_items: int, show_wrong: int
) -> dict[str, dict[str, Any]]:
    """Return the share of exact answers and the seconds of each task; print a line per task."""
    results: dict[str, dict[str, Any]] = {}
    print(f"{'task':26} {'exact':>7} {'needed':>7} {'items':>6} {'seconds':>8}")
    for task in tasks:
        items = held_out_set(task, num_items)
        start = time.perf_counter()
        texts = answer(items)
        seconds = time.perf_counter() - start
        wrong = [
            (item, text)
            for item, text in zip(items, texts, strict=True)
            if not is_right(item, text)
        ]
        exact, required = 1 - len(wrong) / len(items), REQUIRED[task]
        results[task] = {
            "exact": exact,
            "required": required,
            "items": len(items),
            "seconds": round(seconds, 1),
        }
        print(f"{task:26} {exact:7.1%} {required:7.0%} {len(items):6} {seconds:8.1f}", flush=True)
        for item, text in wrong[:show_wrong]:
            print(
                f"  asked    {item.messages[-1]['content']!r}\n  expected {item.answer!r}\n  got      {text!r}"
            )
    return results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score the demo model on its held-out sets.")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument(
        "--base-url", help="URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1"
    )
    ways.add_argument("--engine", action="store_true", help="tokenspeed_core.LLM in this process")
    ways.add_argument("--transformers", action="store_true", help="transformers in this process")
    parser.add_argument(
        "--path", type=Path, default=CHECKPOINT, help="checkpoint, for --engine and --transformers"
    )
    parser.add_argument(
        "--engine-options", type=json.loads, default={}, help="keywords for LLM, as JSON"
    )
    parser.add_argument(
        "--model", default="", help="model name to request; default: the first one listed"
    )
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--concurrency", type=int, default=32, help="concurrent requests")
    parser.add_argument("--device", default="cpu", help="for --transformers")
    parser.add_argument("--batch-size", type=int, default=128, help="for --transformers")
    parser.add_argument("--tasks", nargs="+", choices=list(REQUIRED), default=list(REQUIRED))
    parser.add_argument("--num-items", type=int, default=NUM_HELD_OUT, help="items per task")
    parser.add_argument(
        "--show-wrong", type=int, default=0, help="wrong answers to print for each task"
    )
    parser.add_argument("--json", type=Path, help="file for the scores")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.base_url:
        answer = over_http(
            arguments.base_url, arguments.model, arguments.api_key, arguments.concurrency
        )
    elif arguments.engine:
        answer = in_process(arguments.path, arguments.engine_options)
    else:
        answer = with_transformers(arguments.path, arguments.device, arguments.batch_size)
    results = score(answer, arguments.tasks, arguments.num_items, arguments.show_wrong)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    missed = [task for task, result in results.items() if result["exact"] < result["required"]]
    if missed:
        print(f"below the required share: {', '.join(missed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
