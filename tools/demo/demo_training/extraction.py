"""Extraction of JSON with requested keys from a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable

from . import words
from .items import Item, Source, user

Value = str | int


def _item(source: Source) -> str:
    return (
        source.rng.choice(words.THINGS) if source.rng.random() < 0.5 else words.word(source) + "s"
    )


def _title(source: Source) -> str:
    return " ".join(words.word(source).capitalize() for _ in range(source.rng.randint(1, 3)))


def _company(source: Source) -> str:
    return words.word(source).capitalize() + source.rng.choice(
        ("", "", " Ltd", " Inc", " Labs", " & Co")
    )


def _phone(source: Source) -> str:
    rng = source.rng
    return source.draw("value", lambda: f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}")


_FIELDS: dict[str, Callable[[Source], Value]] = {
    "name": words.name,
    "city": words.city,
    "age": lambda s: words.number(s, 10, 99),
    "quantity": lambda s: words.number(s, 10, 999),
    "price": lambda s: words.number(s, 10, 9999),
    "year": lambda s: words.number(s, 1900, 2050),
    "item": _item,
    "date": words.date,
    "time": words.clock,
    "day": lambda s: s.rng.choice(words.WEEKDAYS),
    "email": words.email,
    "phone": _phone,
    "company": _company,
    "order": words.code,
    "title": _title,
    "room": lambda s: words.number(s, 10, 999),
    "file": words.path,
    "topic": words.word,
}

# Synonyms that a request may use for a field.
_KEYS = {
    "name": ("name", "person", "customer", "who"),
    "city": ("city", "place", "location"),
    "quantity": ("quantity", "count", "amount"),
    "price": ("price", "cost", "total"),
    "item": ("item", "product"),
    "order": ("order", "order_id", "code"),
    "company": ("company", "employer"),
    "title": ("title", "book"),
    "file": ("file", "path"),
    "day": ("day", "weekday"),
    "topic": ("topic", "subject"),
}

_SENTENCES = (
    "{name} bought {quantity} {item} in {city} for {price} dollars.",
    "{name} is {age} years old and lives in {city}.",
    "{name}, aged {age}, works for {company} in {city}.",
    "{name} moved to {city} in {year}.",
    "{name}, {age}, {city}",
    "{name} lives in {city} and likes {topic}.",
    "{name}, {age}, lives in {city} and works at {company}.",
    "My name is {name}, I am {age} and my email is {email}.",
    "Please send {quantity} {item} to {name} in {city} by {date}.",
    "Order {order}: {quantity} {item} for {price} dollars, shipped to {city}.",
    "{name} ordered {quantity} {item} on {date}; the order number is {order}.",
    "The meeting with {name} about {topic} is on {day} at {time} in room {room}.",
    "{name} from {company} called at {time} and left the number {phone}.",
    "You can reach {name} at {email} or {phone}.",
    "{company} was founded in {city} in {year} by {name}.",
    "{name} wrote {title} in {year}.",
    "The book {title} by {name} costs {price} dollars.",
    "On {date} at {time} {name} saved the file {file}.",
    "Train to {city} leaves on {day} at {time} and costs {price} dollars.",
    "{name} paid {price} dollars to {company} on {date}.",
    "We hired {name} in {year}; write to {email}.",
    "A flight from {city} on {date} at {time} was booked for {name}.",
    "{item} cost {price} dollars at {company}.",
    "Delete {file} before {date}, said {name}.",
    "Ticket {order} was opened by {name} on {day} about {topic}.",
)

_ASKS = (
    "Extract {keys} as JSON: {text}", "Extract {keys} as JSON from this sentence:\n{text}",
    "Extract {keys} as JSON.\n\n{text}", "Give me {keys} as JSON.\n{text}", "Return JSON with {keys}:\n{text}",
    "Extract {keys} from: {text}", "extract {keys} from this text as JSON: {text}", "JSON with {keys}: {text}",
    "{text}\n\nExtract {keys} as JSON.", "{text}\nReturn a JSON object with {keys}.",
    'Turn this into JSON with the keys {keys}: "{text}"', "Read this and answer in JSON with {keys}: {text}",
)  # fmt: skip


def sentence(source: Source) -> tuple[str, dict[str, Value]]:
    """Return a sentence, and the values it contains in their order."""
    form = source.rng.choice(_SENTENCES)
    fields = [part.partition("}")[0] for part in form.split("{")[1:]]
    values = {field: _FIELDS[field](source) for field in fields}
    return form.format(**values), values


def key_list(source: Source, keys: list[str]) -> str:
    """Return a list of keys as a request writes it."""
    rng = source.rng
    if len(keys) == 1:
        return rng.choice((f"the {keys[0]}", keys[0], f'"{keys[0]}"'))
    if rng.random() < 0.3:
        return ", ".join(f'"{key}"' for key in keys)
    lead = rng.choice(("", "the "))
    return (
        lead + ", ".join(keys[:-1]) + " and " + keys[-1] if rng.random() < 0.7 else ", ".join(keys)
    )


def extract(source: Source) -> Item:
    """Make a request for JSON with one to four keys, in the order of the request."""
    rng = source.rng
    text, values = sentence(source)
    chosen = rng.sample(sorted(values), rng.randint(1, min(4, len(values))))
    names = {field: rng.choice(_KEYS.get(field, (field,))) for field in chosen}
    prompt = rng.choice(_ASKS).format(keys=key_list(source, list(names.values())), text=text)
    answer = json.dumps({names[field]: values[field] for field in chosen}, ensure_ascii=False)
    return Item("extract", (user(prompt),), answer, source.keys)
