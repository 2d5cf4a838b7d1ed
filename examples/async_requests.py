"""Answer several questions at once, each in its own task."""

import asyncio

from tokenspeed_core import AsyncLLM, SamplingParams

QUESTIONS = ["what is 23 + 45?", "Repeat: hello world", "Replace cat with dog in: the cat sat"]


async def answer(llm: AsyncLLM, question: str) -> None:
    """Collect the parts of an answer as they come, and print it."""
    params = SamplingParams(temperature=0, max_tokens=64)
    parts = []
    async for output in llm.chat(question, params, delta=True, enable_thinking=False):
        parts.append(output.outputs[0].text or "")
    print(f"{question} -> {''.join(parts)}")


async def main() -> None:
    """Answer all questions concurrently with the bundled demo model."""
    async with AsyncLLM() as llm:
        await asyncio.gather(*(answer(llm, question) for question in QUESTIONS))


if __name__ == "__main__":
    asyncio.run(main())
