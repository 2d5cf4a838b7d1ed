"""Generate for a list of prompts in process."""

from tokenspeed_core import LLM, SamplingParams

QUESTIONS = ["what is 23 + 45?", "Repeat: hello world", "Replace cat with dog in: the cat sat"]


def main() -> None:
    """Answer all questions as one batch with the bundled demo model."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM() as llm:
        results = llm.chat(
            conversations,
            SamplingParams(temperature=0, max_tokens=64),
            enable_thinking=False,
        )
    for question, result in zip(QUESTIONS, results, strict=True):
        print(f"{question} -> {result.outputs[0].text}")


if __name__ == "__main__":
    main()
