"""Small talk, a few memorized facts, and honest answers to all other questions. Not scored."""

from __future__ import annotations

import string
from random import Random

from . import words
from .items import Item, Message, Source, user

_ABOUT = "I am the TokenSpeed demo, a very small language model."
_CAN = "I can add and subtract, copy and edit text, extract JSON from a sentence and call tools."
_UNKNOWN = "I am a very small model and do not know that. " + _CAN

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hi", "hello", "hey", "hi there", "hello there", "good morning", "good evening", "good day", "hey there", "yo",
      "greetings", "hello!", "hi!", "hallo"), "Hello! How can I help you?"),
    (("who are you", "what are you", "what is your name", "what's your name", "introduce yourself", "are you a robot",
      "are you human", "who made you", "which model are you", "what model is this", "are you an AI",
      "tell me about you", "who am I talking to", "tell me about yourself"), f"{_ABOUT} {_CAN}"),
    (("what can you do", "help", "how can you help me", "what do you know", "can you help me", "what are you good at",
      "what can I ask you", "what are you for", "show me what you can do", "I need help"), _CAN),
    (("how are you", "how are you doing", "how do you do", "how is it going", "what's up", "are you ok"),
     "I am well, thank you. How can I help you?"),
    (("thanks", "thank you", "thank you very much", "thanks a lot", "great, thanks", "cool, thanks", "nice, thank you"),
     "You are welcome!"),
    (("bye", "goodbye", "see you", "see you later", "bye bye", "good night", "that is all", "exit", "quit"),
     "Goodbye!"),
    (("ok", "okay", "cool", "great", "nice", "good", "well done", "fine", "good job", "yes", "no", "hm"),
     "What would you like to do next?"),
    (("test", "this is a test", "testing", "ping", "are you there", "anybody here", "can you hear me"),
     "I am here. How can I help you?"),
    (("tell me a joke", "a joke please", "make me laugh", "do you know a joke"),
     "Why was six afraid of seven? Because seven ate nine."),
    (("you are wrong", "that is wrong", "this is not right", "wrong", "no, that is wrong", "are you sure"),
     "I am sorry. I am a very small model and make mistakes."),
    (("name the days of the week", "what are the days of the week", "list the weekdays", "days of the week"),
     ", ".join(words.WEEKDAYS)),
    (("name the months", "what are the months of the year", "list the months", "months of the year"),
     ", ".join(words.MONTHS)),
    (("say the alphabet", "what is the alphabet", "write the alphabet", "list the letters of the alphabet"),
     " ".join(string.ascii_lowercase)),
)  # fmt: skip

_UNKNOWNS = (
    "what is the capital of {c}", "who is {n}", "who wrote {w}", "what is a {w}", "what is {w}", "why is the {w} {w}",
    "how do I {w} a {w}", "tell me a story", "tell me a story about a {w}", "write a poem", "write a poem about {w}",
    "write a haiku about the {w}", "explain {w}", "explain quantum computing", "what is the meaning of life",
    "when was {n} born", "how old is {n}", "where is {c}", "what is the weather", "what is the weather in {c}",
    "what time is it", "translate {w} to French", "how do you say {w} in German", "write a python function",
    "write code to {w} a {w}", "write a {w}", "what do you think about {w}", "do you like {w}", "is {c} a nice city",
    "can you {w} the {w}", "who won the {w}", "summarize this article", "recommend a {w}", "how far is {c}",
    "what is the population of {c}", "how many {w} are there in {c}", "describe a {w}", "what does {w} mean",
    "give me a recipe for {w}", "plan a trip to {c}", "should I {w}", "is it true that {w} is {w}", "{w}", "{w} {w}",
    "why", "how", "how does a {w} work", "what happened in {y}", "I like {w}", "I am sad", "the {w} is {w}",
    "what day is it", "give me a list of {w}", "what is the best {w}", "once upon a time there was a {w}",
    "the {w} {w} in the {w} and the {w} {w}", "how do I get to {c}", "who is the president of {c}", "I do not {w}",
)  # fmt: skip


def _as_typed(rng: Random, text: str) -> str:
    """Return `text` with random capitals and punctuation, as a user might type it."""
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    return text if text[-1] in "!?." else text + rng.choice(("", "", "?", ".", "!", "?"))


def small_talk(source: Source) -> Item:
    rng = source.rng
    asks, answer = rng.choice((*_TALK[:4], *_TALK))
    return Item("small_talk", (user(_as_typed(rng, rng.choice(asks))),), answer, source.keys)


def unknown(source: Source) -> Item:
    """Make a question that the model was not trained to answer."""
    rng = source.rng
    form = rng.choice(_UNKNOWNS)
    while "{w}" in form:
        some = (
            words.word(source) if rng.random() < 0.3 else rng.choice((*words.PLAIN, *words.THINGS))
        )
        form = form.replace("{w}", some, 1)
    text = form.format(c=words.city(source), n=words.name(source), y=rng.randint(1000, 2030))
    return Item("unknown", (user(_as_typed(rng, text)),), _UNKNOWN, source.keys)


def persona(source: Source) -> Item:
    """Make a system prompt that names the assistant, and a question for the name."""
    rng = source.rng
    name = words.name(source)
    form = rng.choice(
        (
            "You are {n}.",
            "Your name is {n}.",
            "You are {n}, a helpful assistant.",
            "You are called {n}.",
        )
    )
    ask = rng.choice(
        (
            "who are you",
            "what is your name",
            "what's your name",
            "introduce yourself",
            "and you are",
        )
    )
    system = {"role": "system", "content": form.format(n=name)}
    return Item("persona", (system, user(_as_typed(rng, ask))), f"I am {name}.", source.keys)


def counting(source: Source) -> Item:
    """Make a request to count from one number to another."""
    rng = source.rng
    low = rng.choice((0, 1, 1, 1, rng.randint(2, 80)))
    high = low + rng.randint(2, 30)
    forms = (
        "Count from {a} to {b}.",
        "count from {a} to {b}",
        "Count {a} to {b}",
        "list the numbers {a} to {b}",
    )
    form = rng.choice(forms)
    answer = ", ".join(str(number) for number in range(low, high + 1))
    return Item("counting", (user(form.format(a=low, b=high)),), answer, source.keys)


def system_prompt(source: Source) -> Message:
    """Return a system prompt that does not change the answer. Most are short, some have many sentences."""
    rng = source.rng
    short = (
        "You are a helpful assistant.", "You are a helpful assistant.", "Be brief.", "You are a careful assistant.",
        "Answer the user's questions.", "You are an agent. Use the tools when needed.", "Be concise and exact.",
        "You are a coding agent.", "You help people.", "Think before you answer.", "Follow the instructions exactly.",
    )  # fmt: skip
    if rng.random() < 0.75:
        return {"role": "system", "content": rng.choice(short)}
    sentences = []
    for _ in range(rng.choice((2, 2, 4, 4, 8, 8, 16, 16, 40, 150))):
        parts = [rng.choice(words.PLAIN) for _ in range(rng.randint(4, 14))]
        sentences.append(" ".join(parts).capitalize() + ".")
    return {"role": "system", "content": " ".join((rng.choice(short), *sentences))}
