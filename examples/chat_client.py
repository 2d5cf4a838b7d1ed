"""Stream a chat from a running server with the OpenAI client."""

import os

from openai import OpenAI

URL = os.environ.get("TOKENSPEED_URL", "http://127.0.0.1:8000")


def main() -> None:
    """Print the answer while it arrives."""
    client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "what is 23 + 45?"}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
