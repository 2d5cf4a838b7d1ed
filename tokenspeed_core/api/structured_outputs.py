"""Structured outputs: the JSON schema, regex, choice or grammar that a request sets for its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tokenspeed_core.api.grammars import ANY_OBJECT, MAX_GRAMMAR_CHARS, GrammarKind

MAX_CHOICES = 4096

Choice = Annotated[str, Field(min_length=1, max_length=4096)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class StructuredOutputs(BaseModel):
    """The form of an output. Exactly one field is set.

    >>> StructuredOutputs(regex="[0-9]+")
    StructuredOutputs(regex='[0-9]+')
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True
    )

    json_schema: dict[str, Any] | bool | GrammarText | None = Field(
        None, alias="json", description="a JSON schema, as an object or as text"
    )
    regex: GrammarText | None = Field(
        None, description="a regular expression that the whole output matches"
    )
    choice: list[Choice] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="the output is one of these"
    )
    grammar: GrammarText | None = Field(
        None, description="a context-free grammar in GBNF with the start rule `root`"
    )
    json_object: bool | None = Field(None, description="the output is any JSON object")

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            json: dict[str, Any] | bool | str | None = None,
            regex: str | None = None,
            choice: list[str] | None = None,
            grammar: str | None = None,
            json_object: bool | None = None,
        ) -> None: ...

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        if self.json_object is False:
            raise ValueError("json_object must be true or omitted")
        given = self._given()
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(
                f"set exactly one of json, regex, choice, grammar and json_object; found {found}"
            )
        return self

    def kind_and_text(self) -> tuple[GrammarKind, str]:
        """Return the kind and the text of the grammar, for a `GrammarCompiler`."""
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        if self.grammar is not None:
            return "ebnf", self.grammar
        if self.json_object:
            return "json", ANY_OBJECT
        schema = self.json_schema
        return "json", schema if isinstance(schema, str) else json.dumps(schema)

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Return the field that is set."""
        return [(name, value) for name, value in self._given().items()]

    def _given(self) -> dict[str, Any]:
        return {
            field.alias or name: value
            for name, field in type(self).model_fields.items()
            if (value := getattr(self, name)) is not None
        }
