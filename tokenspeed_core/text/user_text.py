"""Encodes control tokens in texts of users as plain text.

A chat template writes control tokens, such as `<|im_end|>`, around the texts of messages. A tokenizer
would also encode those that a user wrote, so a user could forge the turn of another role. Therefore a
break is inserted into each of them before rendering. The rendered text is cut at the breaks, and its
pieces are encoded one by one, so only the template's control tokens are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from tokenspeed_core.errors import BadRequestError
from tokenspeed_core.text.patterns import any_of

MAX_BREAKS = 20_000
BREAK = "\ufdd0\ufdd1\ufdd0"  # noncharacters, which texts do not contain
_ESCAPED = "".join(f"\\u{ord(character):04x}" for character in BREAK)  # by a template's tojson
_CUT = re.compile(f"{BREAK}|{re.escape(_ESCAPED)}")


class UserTextGuard:
    """Inserts breaks into texts of users, and cuts rendered texts at them."""

    def __init__(
        self, control_tokens: Iterable[str], normalize: Callable[[str], str] | None = None
    ) -> None:
        """Make a guard for some control tokens. Tokens of one character cannot be broken and are ignored.

        `normalize` is the tokenizer's normalization, which it applies before it searches some of the tokens.
        """
        self._normalize = normalize
        tokens = sorted({token for token in control_tokens if len(token) > 1})
        self._token = re.compile(any_of(tokens)) if tokens else None
        # A text may also end with the start of a token, which the next text completes.
        self._starts = {token[:length] for token in tokens for length in range(2, len(token))}
        self._max_start = max(map(len, self._starts), default=0)
        self._first_characters = {token[0] for token in tokens}

    def protect(self, value: Any) -> Any:
        """Return strings, lists and dictionaries with breaks; `value` itself if none is needed.

        Raises BadRequestError beyond `MAX_BREAKS`, since each break delays other requests.
        """
        return _Protection(self).apply(value)

    def cuts(self, text: str) -> Iterator[int]:
        """Yield the positions in a normalized text where breaks are needed, in any order."""
        if self._token is None:
            return
        # After the first character of each occurrence. They may overlap.
        found = self._token.search(text)
        while found is not None:
            yield found.start() + 1
            found = self._token.search(text, found.start() + 1)
        stripped = text.rstrip()  # as many templates do
        end = stripped[-self._max_start :]
        if any(character in end for character in self._first_characters):
            for at in range(len(end) - 1):
                if end[at:] in self._starts:
                    yield len(stripped) - len(end) + at + 1

    def normalized(self, text: str) -> str:
        """Return the text as the tokenizer normalizes it if that contains a control token, else the text itself."""
        if self._normalize is None or self._token is None:
            return text
        normal = self._normalize(text)
        return normal if self._token.search(normal) else text


class _Protection:
    """One value that is protected, and how many breaks it may still get."""

    def __init__(self, guard: UserTextGuard) -> None:
        self._guard = guard
        self._num_left = MAX_BREAKS

    def apply(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            items = [(self.apply(key), self.apply(each)) for key, each in value.items()]
            same = (
                a is key and b is each
                for (a, b), (key, each) in zip(items, value.items(), strict=True)
            )
            return value if all(same) else dict(items)
        if isinstance(value, list | tuple):
            protected = [self.apply(each) for each in value]
            is_same = all(a is b for a, b in zip(protected, value, strict=True))
            return value if is_same else protected
        return value

    def _text(self, text: str) -> str:
        text = self._guard.normalized(text)
        cuts = set(islice(self._guard.cuts(text), self._num_left + 1))
        if not cuts:
            return text
        self._num_left -= len(cuts)
        if self._num_left < 0:
            raise BadRequestError(
                f"the messages contain the text of more than {MAX_BREAKS} control tokens",
                "messages",
            )
        ends = [0, *sorted(cuts), len(text)]
        return BREAK.join(text[a:b] for a, b in pairwise(ends))


def cut_at_breaks(text: str) -> Sequence[str]:
    """Return the pieces of a rendered text, to be encoded one by one."""
    return _CUT.split(text) if BREAK in text or _ESCAPED in text else (text,)
