// Calls of OpenAI's client for Node. `node calls.mjs URL KEY` prints a JSON object: the error of each call, or null.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const model = "demo";
const sum = [{ role: "user", content: "What is 23 + 45?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const extract = [
  { role: "user", content: "Extract name and city as JSON: Maria lives in Lisbon." },
];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [
  { type: "function", function: { name: "get_weather", description: "Get the weather in a city.", parameters } },
];
const schema = {
  type: "object",
  properties: { name: { type: "string" }, city: { type: "string" } },
  required: ["name", "city"],
  additionalProperties: false,
};
const maria = { name: "Maria", city: "Lisbon" };

const chat = (options = {}) =>
  client.chat.completions.create({ model, messages: sum, temperature: 0, ...options });

const calls = {
  async chat_answers() {
    const { choices, usage } = await chat();
    assert.match(choices[0].message.content, /68/);
    assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  },
  async chat_streams_with_usage() {
    let text = "";
    let usage = null;
    for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.match(text, /68/);
    assert.ok(usage.completion_tokens > 0);
  },
  async stream_helper_accumulates() {
    const stream = client.chat.completions.stream({ model, messages: sum, temperature: 0 });
    const final = await stream.finalChatCompletion();
    assert.match(final.choices[0].message.content, /68/);
  },
  async stream_can_be_aborted() {
    const stream = await chat({ messages: [{ role: "user", content: "Count from 1 to 20" }], stream: true });
    for await (const _ of stream) break;
    assert.ok(stream.controller.signal.aborted);
  },
  async tool_is_called() {
    const { choices } = await chat({ messages: weather, tools });
    const [call] = choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    assert.equal(choices[0].finish_reason, "tool_calls");
  },
  async required_tool_is_called() {
    const { choices } = await chat({ tools, tool_choice: "required" });
    assert.equal(choices[0].message.tool_calls[0].function.name, "get_weather");
  },
  async run_tools_loops() {
    const runner = client.chat.completions.runTools({
      model,
      messages: weather,
      temperature: 0,
      tools: [
        {
          type: "function",
          function: {
            name: "get_weather",
            description: "Get the weather in a city.",
            parameters,
            parse: JSON.parse,
            function: ({ city }) => JSON.stringify({ city, temperature: 21 }),
          },
        },
      ],
    });
    assert.match(await runner.finalContent(), /21/);
  },
  async schema_holds_the_answer() {
    const completion = await client.chat.completions.parse({
      model,
      messages: extract,
      temperature: 0,
      response_format: { type: "json_schema", json_schema: { name: "person", strict: true, schema } },
    });
    assert.deepEqual(JSON.parse(completion.choices[0].message.content), maria);
  },
  async logprobs_are_returned() {
    const { choices, usage } = await chat({ logprobs: true, top_logprobs: 2 });
    assert.equal(choices[0].logprobs.content.length, usage.completion_tokens);
  },
  async completion_continues_text() {
    const { usage } = await client.completions.create({ model, prompt: "one two", max_tokens: 4 });
    assert.ok(usage.completion_tokens <= 4);
  },
  async response_is_created() {
    const response = await client.responses.create({ model, input: sum, temperature: 0 });
    assert.match(response.output_text, /68/);
  },
  async response_streams() {
    const types = [];
    for await (const event of await client.responses.create({ model, input: sum, stream: true })) {
      types.push(event.type);
    }
    assert.ok(types.includes("response.output_text.delta"));
    assert.equal(types.at(-1), "response.completed");
  },
  async response_is_held_to_a_schema() {
    const response = await client.responses.parse({
      model,
      input: extract,
      temperature: 0,
      text: { format: { type: "json_schema", name: "person", strict: true, schema } },
    });
    assert.deepEqual(JSON.parse(response.output_text), maria);
  },
  async models_are_listed() {
    const names = [];
    for await (const found of client.models.list()) names.push(found.id);
    assert.deepEqual(names, [model]);
  },
  async wrong_model_is_not_found() {
    await assert.rejects(chat({ model: "gpt-9" }), OpenAI.NotFoundError);
  },
  async wrong_key_is_refused() {
    const other = new OpenAI({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(other.models.list(), OpenAI.AuthenticationError);
  },
  async wrong_value_names_the_field() {
    await assert.rejects(chat({ temperature: -1 }), (error) => error.param === "temperature");
  },
  async refused_image() {
    const image = { type: "image_url", image_url: { url: "https://example.com/a.png" } };
    const messages = [{ role: "user", content: [image] }];
    await assert.rejects(chat({ messages }), (error) => /image_url/.test(error.message));
  },
  async refused_embeddings() {
    const created = client.embeddings.create({ model, input: "a" });
    await assert.rejects(created, OpenAI.NotFoundError);
  },
};

const outcome = {};
for (const [name, call] of Object.entries(calls)) {
  outcome[name] = await call().then(
    () => null,
    (error) => String(error.stack ?? error),
  );
}
console.log(JSON.stringify(outcome));
