"""The request fields for structured output of OpenAI, vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tokenspeed_core.api.structured_outputs import (
    MAX_CHOICES,
    Choice,
    GrammarText,
    StructuredOutputs,
)
from tokenspeed_core.commands.serving import BadRequestError
from tokenspeed_server.body_part import BodyPart

Schema = dict[str, Any] | bool | GrammarText
Choices = Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class TextFormat(BodyPart):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(BodyPart):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaSpec(BodyPart):
    """A JSON schema. The output is held to it with `strict` and without."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(BodyPart):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


OutputFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredFields(BaseModel):
    """The request fields for structured output. A request uses one of them."""

    response_format: OutputFormat | None = Field(None, description="OpenAI's form")
    guided_json: Schema | None = Field(None, description="structured_outputs.json")
    guided_regex: GrammarText | None = Field(None, description="structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="structured_outputs.choice")
    guided_grammar: GrammarText | None = Field(None, description="structured_outputs.grammar")
    json_schema: Schema | None = Field(None, description="structured_outputs.json")
    regex: GrammarText | None = Field(None, description="structured_outputs.regex")
    ebnf: GrammarText | None = Field(None, description="structured_outputs.grammar")

    def requested_outputs(self) -> StructuredOutputs | None:
        """Return the requested constraint. Raises BadRequestError if two fields set one."""
        return next(iter(self._by_field().values()), None)

    def output_field(self) -> str | None:
        """Return the name of the field that sets a constraint, or None."""
        return next(iter(self._by_field()), None)

    def _by_field(self) -> dict[str, StructuredOutputs]:
        """Return the requested form by the name of its field. Raises BadRequestError if there are two."""
        fields = {
            "guided_json": "json",
            "json_schema": "json",
            "guided_regex": "regex",
            "regex": "regex",
            "guided_choice": "choice",
            "guided_grammar": "grammar",
            "ebnf": "grammar",
        }
        found = {
            name: StructuredOutputs.model_validate({form: value})
            for name, form in fields.items()
            if (value := getattr(self, name)) is not None
        }
        given = getattr(self, "structured_outputs", None)
        if given is not None:
            found["structured_outputs"] = given
        match self.response_format:
            case JsonObjectFormat():
                found["response_format"] = StructuredOutputs(json_object=True)
            case JsonSchemaFormat(json_schema=spec):
                found["response_format"] = (
                    StructuredOutputs(json_object=True)
                    if spec.schema_ is None
                    else StructuredOutputs(json=spec.schema_)
                )
        if len(found) > 1:
            first, second, *_ = found
            raise BadRequestError(
                f"{first} and {second} both constrain the output: send one of them", second
            )
        return found
