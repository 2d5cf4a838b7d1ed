// Shared by both pages: elements, and requests with the API key.
export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const KEY = "tokenspeed-api-key";

function askForKey() {
  const input = element("input", { type: "password", autocomplete: "off", required: true });
  const form = element("form", { method: "dialog" },
    element("p", { textContent: "This server needs an API key. It stays in this tab." }),
    element("label", {}, "API key", input), element("p"),
    element("button", { className: "main", textContent: "Continue" }));
  const dialog = element("dialog", {}, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(input.value);
  }));
}

let asking = null;

// Requests a path of this server, and asks for the API key if the server wants one.
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(options.headers || {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status !== 401) return answer;
    asking ||= askForKey().finally(() => { asking = null; });
    const given = await asking;
    if (!given) return answer;
    sessionStorage.setItem(KEY, given);
  }
}

export async function requestJson(path) {
  const answer = await request(path);
  if (!answer.ok) throw new Error(await errorOf(answer));
  return answer.json();
}

export async function errorOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answered with status ${answer.status}`;
  }
}

// A table of the kernel plan: per op the backend that runs and, unless it is brief, why the others do not.
export function kernelTable(plan, isBrief = false) {
  const rows = new Map();
  for (const op of plan.ops) if (op.backend || !isBrief) rows.set(`${op.op} ${op.backend}`, op);
  const body = [...rows.values()].map((op) => {
    const others = new Set(op.verdicts.filter((each) => each.backend !== op.backend).map((each) =>
      `${each.backend}: ${each.reasons.map((reason) => reason.what).join("; ") || "fits, ranked lower"}`));
    const cells = [element("td", {}, element("code", { textContent: op.op })), element("td", { textContent: op.backend || "–" })];
    if (!isBrief)
      cells.push(element("td", { textContent: op.because }),
        element("td", { className: "faint", textContent: [...others].join(" · ") }));
    return element("tr", {}, ...cells);
  });
  const head = ["op", "backend", "reason", "other backends"].slice(0, isBrief ? 2 : 4).map((text) =>
    element("th", { textContent: text, scope: "col" }));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}
