"""OpenAI's Responses API: /v1/responses and the routes of stored responses."""
