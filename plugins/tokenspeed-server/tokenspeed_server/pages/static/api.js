import { byId, element, requestJson } from "./common.js";

let schemas = {};
const code = (textContent) => element("code", { textContent });
const nameOf = (schema) => (schema.$ref || "").split("/").pop();
const resolve = (schema) => (schema.$ref ? schemas[nameOf(schema)] || {} : schema);

function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map(typeOf).filter((name) => name !== "null").join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items || {}) || "any"}`;
  return schema.type || "any";
}

function boundsOf(schema) {
  const choices = [schema, ...(schema.anyOf || schema.oneOf || [])];
  const named = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<",
    minLength: "length ≥", maxLength: "length ≤", minItems: "items ≥", maxItems: "items ≤" };
  const found = choices.flatMap((choice) =>
    Object.keys(named).filter((key) => choice[key] !== undefined).map((key) => `${named[key]} ${choice[key]}`));
  return [...new Set(found)].join(", ");
}

// A field that may be null has its description, default and bounds inside the other choice.
function withoutNull(field) {
  const others = (field.anyOf || []).filter((choice) => choice.type !== "null");
  const { anyOf, ...rest } = field;
  return others.length === 1 ? { ...others[0], ...rest } : field;
}

function refsIn(schema, into) {
  if (schema.$ref) into.add(nameOf(schema));
  for (const part of [...(schema.anyOf || []), ...(schema.oneOf || []), schema.items || null])
    if (part) refsIn(part, into);
  return into;
}

function row(...cells) {
  return element("tr", {}, ...cells.map((each) => element("td", {}, each)));
}

function fieldOf(name, field, isRequired) {
  const fallback = field.default === undefined || field.default === null ? "" : `default ${JSON.stringify(field.default)}`;
  const meaning = [isRequired ? "required" : "", field.description || "", boundsOf(field), fallback];
  return row(code(name), typeOf(field), meaning.filter(Boolean).join("; "));
}

// The fields of a schema, and closed sections of the schemas that they name.
function fieldsOf(schema, seen) {
  const found = resolve(schema);
  const holder = element("div");
  if (found.description) holder.append(element("p", { textContent: found.description }));
  const head = ["field", "type", "meaning"].map((textContent) => element("th", { textContent, scope: "col" }));
  const table = element("table", {}, element("tr", {}, ...head));
  const inner = new Set();
  for (const [name, given] of Object.entries(found.properties || {})) {
    const field = withoutNull(given);
    table.append(fieldOf(name, field, (found.required || []).includes(name)));
    refsIn(field, inner);
  }
  holder.append(table);
  for (const name of inner) {
    if (seen.has(name) || !schemas[name] || !schemas[name].properties) continue;
    const more = element("details", {}, element("summary", { textContent: name }));
    more.addEventListener("toggle", () => {
      if (!more.open || more.children.length > 1) return;
      more.append(element("div", { className: "inner" }, fieldsOf(schemas[name], new Set([...seen, name]))));
    });
    holder.append(more);
  }
  return holder;
}

function routeOf(path, method, route) {
  const line = (route.description || route.summary || "").split("\n")[0];
  const title = element("summary", {}, element("span", { className: "method", textContent: method.toUpperCase() }),
    code(path), element("span", { className: "faint", textContent: ` ${line}` }));
  const inner = element("div", { className: "inner" });
  const body = route.requestBody && route.requestBody.content["application/json"].schema;
  if (body) inner.append(element("h2", { textContent: "Body" }), fieldsOf(body, new Set([nameOf(body)])));
  for (const parameter of route.parameters || [])
    inner.append(element("p", {}, code(parameter.name), ` in ${parameter.in}: ${typeOf(parameter.schema || {})}`));
  const answers = Object.entries(route.responses || {}).map(([status, answer]) => row(status, answer.description || ""));
  inner.append(element("h2", { textContent: "Answers" }), element("table", {}, ...answers));
  return element("details", {}, title, inner);
}

try {
  const described = await requestJson("openapi.json");
  schemas = (described.components || {}).schemas || {};
  byId("state").textContent = `version ${described.info.version}`;
  for (const [path, methods] of Object.entries(described.paths))
    for (const [method, route] of Object.entries(methods)) byId("routes").append(routeOf(path, method, route));
} catch (error) {
  byId("state").textContent = error.message;
  byId("state").classList.add("error");
}
