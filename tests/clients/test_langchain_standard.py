"""The standard tests of langchain-tests for chat models, with ChatOpenAI over both APIs of OpenAI."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pydantic import SecretStr
from running_server import Server

CLIENT = "langchain-tests"
# Tests that ask a model of five million parameters for jokes, and for arguments that it was not trained on.
BEYOND_THE_DEMO = (
    "test_structured_output",
    "test_structured_output_async",
    "test_structured_output_pydantic_2_v1",
    "test_tool_calling",
    "test_tool_calling_async",
    "test_tool_calling_with_no_arguments",
    "test_unicode_tool_call_integration",
)


class Standard(ChatModelIntegrationTests):
    """The suite, without images, audio and files, which the demo cannot read."""

    use_responses_api = False

    @pytest.fixture(autouse=True)
    def _server(self, server: Server, request: pytest.FixtureRequest) -> None:
        self.server = server
        if request.node.originalname in BEYOND_THE_DEMO:
            reason = "the demo writes other arguments, or texts without an end"
            request.applymarker(pytest.mark.xfail(reason=reason))

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "base_url": self.server.v1,
            "api_key": SecretStr(self.server.key),
            "temperature": 0,
            "max_tokens": 300,
            "max_retries": 0,
            "stream_usage": True,
            "use_responses_api": self.use_responses_api,
        }

    @property
    def model_override_value(self) -> str:
        return "demo"

    @pytest.fixture
    def model(self, request: Any) -> BaseChatModel:
        options = getattr(request, "param", None) or {}
        return ChatOpenAI(
            **{**self.standard_chat_model_params, **self.chat_model_params, **options}
        )


class TestChat(Standard):
    """Chat completions."""


class TestResponses(Standard):
    """The Responses API."""

    use_responses_api = True
