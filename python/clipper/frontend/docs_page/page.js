"use strict";
// Renders openapi.json, which lies beside this page: no other address is ever requested.
const at = (id) => document.getElementById(id);
const METHODS = ["get", "post", "put", "patch", "delete"];
const DEPTH_MAX = 6;
let description = null;

function make(tag, settings = {}, ...children) {
  const { className, ...attributes } = settings;
  const found = document.createElement(tag);
  if (className) found.className = className;
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) found.setAttribute(name, value);
  found.append(...children.filter((child) => child !== null && child !== undefined));
  return found;
}

// What a text has between backticks is code.
function prose(text) {
  return text.split("`").map((part, at) => at % 2 ? make("code", {}, part) : part);
}

function said(thing) {
  return thing.description ? [" – ", ...prose(thing.description)] : [];
}

function resolved(thing) {
  if (!thing || !thing.$ref) return thing || {};
  return thing.$ref.slice(2).split("/").reduce((place, key) => place[key.replace(/~1/g, "/").replace(/~0/g, "~")], description);
}

function typeOf(schema) {
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const bounds = [];
  for (const [key, sign] of [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]])
    if (schema[key] !== undefined && Math.abs(schema[key]) < 1e15) bounds.push(sign + " " + schema[key]);
  if (schema.minItems !== undefined && schema.minItems === schema.maxItems) bounds.push(schema.minItems + " items");
  else if (schema.maxItems !== undefined) bounds.push("up to " + schema.maxItems + " items");
  const type = schema.type === undefined ? "any" : [].concat(schema.type).join(" | ");
  return type + (schema.contentEncoding ? ", " + schema.contentEncoding : "") + (bounds.length ? ", " + bounds.join(", ") : "");
}

function shown(given, depth = 0) {
  const schema = resolved(given);
  const several = schema.oneOf || schema.anyOf;
  const found = make("span", { className: "type" }, several ? "one of" : typeOf(schema), ...said(schema));
  if (depth >= DEPTH_MAX) return [found];
  if (several) return [found, make("ul", {}, ...several.map((one) => make("li", {}, ...shown(one, depth + 1))))];
  const below = [];
  for (const [name, member] of Object.entries(schema.properties || {}))
    below.push(make("li", {}, make("code", {}, name), (schema.required || []).includes(name) ? "* " : " ", ...shown(member, depth + 1)));
  if (schema.items) below.push(make("li", {}, "each: ", ...shown(schema.items, depth + 1)));
  return below.length ? [found, make("ul", {}, ...below)] : [found];
}

function sample(given, depth = 0) {
  const schema = resolved(given);
  if (schema.const !== undefined) return schema.const;
  if (schema.examples) return schema.examples[0];
  if (schema.enum) return schema.enum[0];
  const several = schema.oneOf || schema.anyOf;
  if (several) return sample(several[0], depth + 1);
  const type = [].concat(schema.type)[0];
  if (depth > DEPTH_MAX || type === undefined) return null;
  if (type === "object") {
    const found = {};
    for (const name of schema.required || []) found[name] = sample((schema.properties || {})[name] || {}, depth + 1);
    return found;
  }
  if (type === "array") return Array(Math.min(schema.minItems ?? 1, 10000)).fill(sample(schema.items || {}, depth + 1));
  return { string: "", integer: schema.minimum > 0 ? schema.minimum : 0, number: schema.exclusiveMinimum === 0 ? 1 : 0, boolean: false }[type] ?? null;
}

function parameterRows(parameters, fields) {
  return parameters.map((parameter) => {
    const id = "field-" + (parameterRows.count = (parameterRows.count || 0) + 1);
    const field = make("input", { id, className: "code", autocomplete: "off", placeholder: parameter.required ? "needed" : "" });
    fields.push([parameter, field]);
    return make("tr", {}, make("td", {}, make("label", { for: id }, make("code", {}, parameter.name))), make("td", {}, field),
      make("td", {}, make("span", { className: "type" }, parameter.in + ", " + typeOf(resolved(parameter.schema)),
        ...said(parameter))));
  });
}

function requestOf(method, path, fields, body) {
  let url = path;
  const query = new URLSearchParams();
  const headers = {};
  for (const [parameter, field] of fields) {
    if (parameter.in === "path") url = url.replace("{" + parameter.name + "}", encodeURIComponent(field.value));
    else if (field.value && parameter.in === "query") query.append(parameter.name, field.value);
    else if (field.value) headers[parameter.name] = field.value;
  }
  if (body && body.value) headers["Content-Type"] = "application/json";
  if (at("token").value) headers.Authorization = "Bearer " + at("token").value;
  if (query.size) url += "?" + query;
  return { url: url.slice(1), init: { method: method.toUpperCase(), headers, body: body && body.value ? body.value : undefined } };
}

const quoted = (text) => "'" + text.replace(/'/g, "'\\''") + "'";

function asCurl({ url, init }) {
  const headers = Object.entries(init.headers).map(([name, value]) => " -H " + quoted(name + ": " + (name === "Authorization" ? "Bearer $TOKEN" : value)));
  return "curl -X " + init.method + " " + quoted(new URL(url, new URL(".", location.href)).href) + headers.join("") + (init.body ? " -d " + quoted(init.body) : "");
}

async function send(request, into) {
  into.replaceChildren("…");
  const began = performance.now();
  try {
    const response = await fetch(request.url, request.init);
    const line = make("strong", { className: response.ok ? "good" : "bad" }, response.status + " " + response.statusText);
    const output = make("pre", { tabindex: "0" });
    into.replaceChildren(make("p", {}, line, ""), output);
    const type = response.headers.get("content-type") || "";
    const again = response.headers.get("retry-after");
    await follow(response, type, output);
    line.after(" in " + (performance.now() - began).toFixed(1) + " ms, " + type + (again ? ", Retry-After " + again + " s" : ""));
  } catch (error) {
    into.replaceChildren(make("strong", { className: "bad" }, "no response: " + error.message));
  }
}

async function follow(response, type, output) {
  if (!type.startsWith("text/event-stream")) {
    const text = await response.text();
    try { output.textContent = JSON.stringify(JSON.parse(text), null, 2); } catch { output.textContent = text || "(no body)"; }
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) output.append(part.value);
}

function operation(method, path, about) {
  const fields = [];
  const inside = make("div");
  const found = make("details", { className: "operation" + (about.deprecated ? " old" : ""), id: about.operationId },
    make("summary", {}, make("span", { className: "method" }, method.toUpperCase()), make("span", { className: "path" }, path),
      make("span", { className: "says" }, ...prose(about.summary || ""), about.deprecated ? " (old)" : "")), inside);
  found.addEventListener("toggle", () => {
    if (found.open && !inside.hasChildNodes()) fill(inside, method, path, about, fields);
  });
  return found;
}

function fill(inside, method, path, about, fields) {
  if (about.description) inside.append(make("p", {}, ...prose(about.description)));
  const rows = parameterRows((about.parameters || []).map(resolved), fields);
  if (rows.length) inside.append(make("h3", {}, "Parameters"), make("table", {}, make("tbody", {}, ...rows)));
  let body = null;
  const content = ((about.requestBody || {}).content || {})["application/json"];
  if (content) {
    body = make("textarea", { "aria-label": "Body", spellcheck: "false" });
    body.value = JSON.stringify(content.example ?? sample(content.schema));
    inside.append(make("h3", {}, "Body"), body, ...shown(content.schema));
  }
  const answer = make("div", { "aria-live": "polite" });
  const curl = make("pre", { tabindex: "0" });
  const button = make("button", { type: "button" }, "Send");
  button.addEventListener("click", () => {
    const request = requestOf(method, path, fields, body);
    curl.textContent = asCurl(request);
    send(request, answer);
  });
  curl.textContent = asCurl(requestOf(method, path, fields, body));
  inside.append(make("p", { className: "row" }, button), curl, answer, make("h3", {}, "Responses"));
  for (const [status, given] of Object.entries(about.responses)) {
    const response = resolved(given);
    const first = Object.entries(response.content || {})[0];
    inside.append(make("details", {}, make("summary", {}, make("strong", {}, status), response.description, make("span", { className: "type" }, first ? first[0] : "")),
      ...(first && first[1].schema ? shown(first[1].schema) : ["no body"])));
  }
}

function find() {
  const wanted = at("filter").value.toLowerCase();
  for (const group of document.querySelectorAll("section")) {
    let some = false;
    for (const one of group.querySelectorAll("details.operation")) {
      one.hidden = !one.firstChild.textContent.toLowerCase().includes(wanted);
      some = some || !one.hidden;
    }
    group.hidden = !some;
  }
}

async function read() {
  const token = at("token").value;
  const response = await fetch("openapi.json", token ? { headers: { Authorization: "Bearer " + token } } : {});
  if (response.status === 401) {
    at("token").hidden = at("token-label").hidden = false;
    at("state").textContent = "Management needs its token: http.token.";
    return;
  }
  description = await response.json();
  at("title").textContent = document.title = description.info.title + " " + description.info.version;
  at("about").replaceChildren(...prose(description.info.description || ""));
  const groups = new Map((description.tags || []).map((tag) => [tag.name, []]));
  for (const [path, operations] of Object.entries(description.paths))
    for (const method of METHODS)
      if (operations[method]) groups.get(operations[method].tags[0]).push(operation(method, path, operations[method]));
  at("operations").replaceChildren(...[...groups].map(([name, all]) => make("section", { "aria-label": name }, make("h2", {}, name), ...all)));
  at("state").hidden = true;
  find();
  const linked = location.hash && at(decodeURIComponent(location.hash.slice(1)));
  if (linked) { linked.open = true; linked.scrollIntoView(); }
}

at("filter").addEventListener("input", find);
at("token").addEventListener("change", read);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); at("filter").focus(); }
});
read().catch((error) => { at("state").textContent = "openapi.json cannot be read: " + error.message; });
