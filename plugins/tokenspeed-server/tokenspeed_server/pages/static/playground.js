import { byId, element, errorOf, kernelTable, request, requestJson } from "./common.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
let model = "";
let messages = [];
let running = null; // the AbortController of the answer in progress

function readJson(id, what) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    byId(id).focus();
    throw new Error(`${what} is not valid JSON: ${error.message}`);
  }
}

// The request body from the conversation and the settings.
function bodyOf() {
  const system = byId("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const id of NUMBERS) if (byId(id).value !== "") body[id] = Number(byId(id).value);
  const tools = readJson("tools", "Tools");
  if (tools) body.tools = tools;
  const format = byId("format").value;
  if (format === "json_object") body.response_format = { type: format };
  if (format === "json_schema")
    body.response_format = { type: format, json_schema: { name: "answer", schema: readJson("schema", "The schema") } };
  return body;
}

function addMessage(role, text = "") {
  const content = element("div", { className: "text", textContent: text });
  const made = element("article", { className: `message ${role}` },
    element("div", { className: "role", textContent: role }), content);
  byId("messages").append(made);
  made.scrollIntoView({ block: "end" });
  return { made, content };
}

function addError(text) {
  byId("messages").append(element("p", { className: "error", textContent: text, role: "alert" }));
}

// An answer on the page: thinking, text and tool calls, as they arrive.
class Answer {
  constructor(startedAt) {
    Object.assign(this, addMessage("assistant"));
    this.message = { role: "assistant", content: "" };
    this.startedAt = startedAt;
    this.firstAt = null;
    this.usage = null;
  }

  add(delta) {
    const thought = delta.reasoning_content || delta.reasoning;
    if (thought || delta.content || delta.tool_calls) this.firstAt ??= performance.now();
    if (thought) this.think(thought);
    if (delta.content) {
      this.message.content += delta.content;
      this.content.append(delta.content);
    }
    for (const call of delta.tool_calls || []) this.addCall(call);
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }

  think(text) {
    if (!this.thinking) {
      this.thinking = element("div", { className: "text" });
      this.content.before(element("details", { className: "thinking" },
        element("summary", { textContent: "Thinking" }), this.thinking));
    }
    this.thinking.append(text);
  }

  addCall(part) {
    const calls = (this.message.tool_calls ||= []);
    if (!calls[part.index]) {
      calls[part.index] = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
      const shown = element("pre");
      calls[part.index].shown = shown;
      this.made.append(element("div", { className: "call" },
        element("div", {}, "calls ", element("code", { textContent: part.function.name })), shown));
    }
    const call = calls[part.index];
    call.function.arguments += part.function.arguments || "";
    call.shown.textContent = call.function.arguments;
  }

  end() {
    const calls = this.message.tool_calls || [];
    for (const call of calls) {
      const shown = call.shown;
      delete call.shown;
      this.askForResult(call, shown);
    }
    if (calls.length && !this.message.content) this.message.content = null;
    messages.push(this.message);
    this.showStatistics();
  }

  // Below a tool call: a field for its result. The conversation goes on when all have one.
  askForResult(call, shown) {
    const field = element("textarea", { className: "code", rows: 2 });
    const button = element("button", { textContent: "Send the result" });
    const form = element("form", {}, element("label", {}, "Result of the tool", field), button);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (running) return;
      messages.push({ role: "tool", tool_call_id: call.id, content: field.value });
      field.disabled = button.disabled = true;
      const answered = new Set(messages.map((each) => each.tool_call_id));
      if (this.message.tool_calls.every((each) => answered.has(each.id))) ask();
    });
    shown.after(form);
  }

  showStatistics() {
    if (!this.usage || this.firstAt === null) return;
    const { prompt_tokens, completion_tokens, prompt_tokens_details: details } = this.usage;
    const seconds = (performance.now() - this.firstAt) / 1000;
    const cached = details ? ` (${details.cached_tokens} cached)` : "";
    const rate = completion_tokens > 1 ? `, ${((completion_tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
    byId("statistics").textContent = `${prompt_tokens} prompt tokens${cached}, ${completion_tokens} tokens${rate}, ` +
      `first after ${((this.firstAt - this.startedAt) / 1000).toFixed(2)} s`;
  }
}

// Reads the events of a stream.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = Boolean(controller);
  byId("stop").disabled = !controller;
}

// Asks for the answer to the conversation. Returns whether the server accepted it.
async function ask() {
  const controller = new AbortController();
  const startedAt = performance.now();
  let answer = null;
  setRunning(controller);
  byId("statistics").textContent = "";
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(bodyOf()),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    answer = new Answer(startedAt);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) answer.usage = event.usage;
      for (const choice of event.choices) answer.add(choice.delta);
    }
  } catch (error) {
    if (error.name !== "AbortError") addError(error.message);
    else if (answer) byId("statistics").textContent = "stopped";
  } finally {
    if (answer) answer.end();
    setRunning(null);
  }
  return answer !== null;
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("question").value;
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  const { made } = addMessage("user", text);
  byId("question").value = "";
  if (await ask()) return;
  messages.pop(); // refused: the user may correct it
  made.remove();
  byId("question").value = text;
});

byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  byId("messages").replaceChildren();
  byId("statistics").textContent = "";
  byId("question").focus();
});
byId("format").addEventListener("change", () => {
  byId("schemaField").hidden = byId("format").value !== "json_schema";
});
byId("kernels").addEventListener("toggle", async () => {
  if (!byId("kernels").open || byId("kernelTable").firstChild) return;
  try {
    byId("kernelTable").append(kernelTable((await requestJson("v1/plugins")).kernel_plan, true));
  } catch (error) {
    byId("kernelTable").append(element("p", { className: "error", textContent: error.message }));
  }
});

async function connect() {
  try {
    model = (await requestJson("v1/models")).data[0].id;
    byId("state").textContent = model;
  } catch (error) {
    byId("state").textContent = error.message;
    setTimeout(connect, 2000);
  }
}
connect();
