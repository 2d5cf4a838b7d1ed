"""Let the model call a Python function, and answer from its result."""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

URL = os.environ.get("TOKENSPEED_URL", "http://127.0.0.1:8000")
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def get_weather(city: str) -> dict[str, object]:
    """Return the weather of a city. A real program would ask a weather service."""
    return {"city": city, "condition": "sunny", "temperature": 21}


def main() -> None:
    """Ask a question that needs the tool, run the calls, and print the final answer."""
    client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the weather in Paris?"}
    ]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], temperature=0
    )
    message = reply.choices[0].message
    calls = [call for call in message.tool_calls or [] if call.type == "function"]
    messages.append(
        {
            "role": "assistant",
            "content": message.content,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for call in calls
            ],
        }
    )
    for call in calls:
        arguments = json.loads(call.function.arguments)
        print(f"call: {call.function.name}({arguments})")
        result = json.dumps(get_weather(**arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    final = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], temperature=0
    )
    print(f"answer: {final.choices[0].message.content}")


if __name__ == "__main__":
    main()
