// The page at /: a conversation, what is known of its tokens, and what the server does meanwhile.
// Whatever a model or a user wrote becomes text, never markup.

const $ = (id) => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// ---- Parameters: what is left empty is not sent, so that the server's defaults hold

const PARAMETERS = [
  ["temperature", "Temperature", "1"],
  ["top_p", "Top-p", "1"],
  ["top_k", "Top-k", "0 (off)"],
  ["min_p", "Min-p", "0"],
  ["max_tokens", "Max tokens", "as many as fit"],
  ["seed", "Seed", "random"],
  ["frequency_penalty", "Frequency penalty", "0"],
  ["presence_penalty", "Presence penalty", "0"],
  ["repetition_penalty", "Repetition penalty", "1"],
  ["stop", "Stop at", "one text a line, \\n is a new line", "textarea"],
  ["system", "System prompt", "none", "textarea"],
];
const fields = {};

function buildFields() {
  const kept = JSON.parse(localStorage.getItem("parameters") ?? "{}");
  for (const [name, label, placeholder, kind = "input"] of PARAMETERS) {
    const wrong = make("small", { id: `${name}-wrong` });
    const input = make(kind, { id: name, placeholder, value: kept[name] ?? "", autocomplete: "off", spellcheck: false });
    if (kind === "textarea") input.rows = 2;
    else input.inputMode = "decimal";
    input.setAttribute("aria-describedby", wrong.id);
    input.addEventListener("input", () => {
      blame(name, "");
      keepFields();
    });
    const className = kind === "textarea" ? "field wide" : "field";
    $("fields").append(make("div", { className }, make("label", { htmlFor: name, textContent: label }), input, wrong));
    fields[name] = input;
  }
  $("tokens").checked = kept.tokens ?? false;
}

function keepFields() {
  const values = Object.entries(fields).map(([name, input]) => [name, input.value]);
  localStorage.setItem("parameters", JSON.stringify({ ...Object.fromEntries(values), tokens: $("tokens").checked }));
}

$("defaults").addEventListener("click", () => {
  for (const name in fields) blame(name, (fields[name].value = ""));
  keepFields();
});

/** Show at a field what is wrong with it; nothing is wrong where the message is empty. */
function blame(name, message) {
  fields[name].setAttribute("aria-invalid", String(message !== ""));
  $(`${name}-wrong`).textContent = message;
}

/** The request as JSON. Numbers go as they were written: a seed has more digits than this language's numbers. */
function requestBody() {
  const messages = turns.map(({ role, content }) => ({ role, content }));
  if (fields.system.value.trim()) messages.unshift({ role: "system", content: fields.system.value });
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  if ($("tokens").checked) Object.assign(body, { logprobs: true, top_logprobs: 5, return_token_ids: true });
  const stops = fields.stop.value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops.map((text) => text.replaceAll("\\n", "\n"));
  const numbers = Object.entries(fields)
    .map(([name, input]) => [name, input.value.trim()])
    .filter(([name, value]) => value && name !== "stop" && name !== "system")
    .map(([name, value]) => {
      const literal = /^-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?$/.test(value);
      return `,${JSON.stringify(name)}:${literal ? value : JSON.stringify(value)}`;
    });
  return JSON.stringify(body).slice(0, -1) + numbers.join("") + "}";
}

// ---- The server

const refusal = ({ code, param, message }, wait) =>
  Object.assign(new Error(wait ? `${message} (in ${wait} s)` : message), { code, param });

/** The response, once the key is right where one is needed; an error with its code for any that is no success. */
async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const unknown = { error: { code: response.status, message: `the server answers ${response.status}` } };
    const { error } = await response.json().catch(() => unknown);
    const asked = response.status === 401 && (await askForKey(key));
    if (!asked) throw refusal(error, response.headers.get("Retry-After"));
  }
}

/** Whether the user has entered a key. One that was refused is forgotten. */
function askForKey(refused) {
  sessionStorage.removeItem("key");
  $("lock-title").textContent = refused ? "The key is wrong" : "This server asks for a key";
  $("lock").showModal();
  return new Promise((resolve) => {
    $("lock").onclose = () => resolve(sessionStorage.getItem("key") !== null);
  });
}

$("lock").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  $("lock").close();
});

/** The objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// ---- The conversation

const turns = []; // of {role, content, shown, plain}: its element, and that of its text
let answering = null; // the AbortController of the answer that is on its way
let following = true;

function addTurn(role, content) {
  const plain = make("div", { className: "text plain", textContent: content });
  const heading = make("h2", { textContent: role === "user" ? "You" : "Answer" });
  const shown = make("article", { className: `turn ${role}` }, heading, plain);
  $("turns").append(shown);
  turns.push({ role, content, shown, plain });
  return turns.at(-1);
}

function removeTurn() {
  const turn = turns.pop();
  turn.shown.remove();
  return turn;
}

function update() {
  const idle = answering === null;
  $("send").hidden = !idle;
  $("halt").hidden = idle;
  $("retry").disabled = !idle || turns.at(-1)?.role !== "assistant";
  $("edit").disabled = $("clear").disabled = !idle || !turns.length;
  document.body.classList.toggle("by-token", $("tokens").checked);
  follow();
}

/** Put the last thing that the user said back to where it was entered, and what followed away. */
function takeBack() {
  if (turns.at(-1).role === "assistant") removeTurn();
  $("message").value = [removeTurn().content, $("message").value].filter(Boolean).join("\n");
}

async function answer() {
  const controller = (answering = new AbortController());
  const began = performance.now();
  let first, usage, reason, failure;
  $("error").textContent = "";
  const body = requestBody();
  const turn = addTurn("assistant", "");
  const spans = make("div", { className: "text spans", role: "group", ariaLabel: "Tokens, by arrow keys" });
  turn.shown.append(spans);
  turn.shown.ariaBusy = "true";
  following = true;
  update();
  try {
    const response = await ask("v1/chat/completions", { method: "POST", body, signal: controller.signal });
    for await (const event of events(response)) {
      if (event.error) throw refusal(event.error);
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (!choice) continue;
      turn.plain.append(choice.delta.content ?? "");
      turn.content += choice.delta.content ?? "";
      choice.logprobs?.content.forEach((entry, i) => addToken(spans, entry, choice.from_draft[i]));
      if (spans.childNodes.length) turn.shown.classList.add("detailed");
      if (turn.content || spans.childNodes.length) first ??= performance.now();
      reason = choice.finish_reason ?? reason;
      follow();
    }
  } catch (error) {
    failure = error;
  }
  answering = null;
  turn.shown.ariaBusy = "false";
  if (controller.signal.aborted) reason = "stopped by you";
  else if (failure) report(failure);
  if (first === undefined && (failure || controller.signal.aborted)) takeBack();
  else turn.shown.append(make("p", { className: "facts", textContent: facts(usage, reason, began, first) }));
  update();
}

/** What the answer took, as this page saw it. */
function facts(usage, reason, began, first) {
  const parts = [{ stop: "ended by itself", length: "length limit" }[reason] ?? reason ?? "broken off"];
  if (usage) {
    const { completion_tokens: made, completion_tokens_details: details, prompt_tokens_details: prompt } = usage;
    parts.unshift(`${made} tokens`);
    if (first !== undefined) parts.push(`first after ${(first - began).toFixed(0)} ms`);
    if (made > 1) parts.push(`then ${((made - 1) / ((performance.now() - first) / 1000)).toFixed(1)} tokens/s`);
    const drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens;
    if (drafted) parts.push(`${details.accepted_prediction_tokens} of ${drafted} drafted tokens accepted`);
    if (prompt.cached_tokens) parts.push(`${prompt.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  return parts.join(" · ");
}

function report(error) {
  const name = error.param?.split(".")[0];
  if (name in fields) {
    blame(name, error.message);
    $("settings").open = true;
    fields[name].focus();
  } else {
    $("error").textContent = error.code ? error.message : `The server cannot be reached: ${error.message}`;
  }
}

/** Keep the end in sight, unless the user has scrolled away from it. */
function follow() {
  if (following) $("scroll").scrollTop = $("scroll").scrollHeight;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("message").value;
  if (answering || !content.trim()) return;
  $("message").value = "";
  addTurn("user", content);
  answer();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
const ACTIONS = {
  halt: () => answering.abort(),
  retry: () => removeTurn() && answer(),
  edit: takeBack,
  clear: () => turns.splice(0).forEach(({ shown }) => shown.remove()),
};
for (const id in ACTIONS) {
  $(id).addEventListener("click", () => {
    $("error").textContent = "";
    ACTIONS[id]();
    update();
    $("message").focus();
  });
}
$("tokens").addEventListener("change", () => {
  keepFields();
  update();
});

// ---- Tokens

const entries = new WeakMap(); // what is known of a token, by its element
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob ?? -Infinity);
  return value && value < 0.01 ? "< 0.01 %" : `${value.toFixed(value < 1 ? 2 : 1)} %`;
};

/** A token's text with all of it visible: lone spaces (leading ones if asked), ends of lines, parts of characters. */
function visible({ bytes }, leading = false) {
  const symbol = (textContent) => make("span", { className: "symbol", textContent });
  let text;
  try {
    text = utf8.decode(new Uint8Array(bytes));
  } catch {
    return [symbol(`⟨${bytes.map((byte) => byte.toString(16).padStart(2, "0").toUpperCase()).join(" ")}⟩`)];
  }
  if (text === "") return [symbol("∅")];
  const spaces = text.match(leading ? /^ +/ : /^ +$/)?.[0].length ?? 0;
  const rest = text.slice(spaces).split(/([\p{C}\u2028\u2029])/u).flatMap((part, i) => {
    if (i % 2 === 0) return part;
    const end = { "\n": "⏎", "\t": "⇥" }[part];
    return end ? [symbol(end), part] : symbol(`⟨${part.codePointAt(0).toString(16).toUpperCase()}⟩`);
  });
  return spaces ? [symbol("␣".repeat(spaces)), ...rest] : rest;
}

function addToken(spans, entry, drafted) {
  const token = make("span", { className: drafted ? "token drafted" : "token", role: "button" }, ...visible(entry));
  token.tabIndex = spans.childNodes.length ? -1 : 0; // arrow keys move on from the first
  const logprob = entry.logprob ?? -Infinity;
  token.style.setProperty("--surprise", Math.min(1, -logprob / Math.LN10 / 3).toFixed(3));
  token.ariaLabel = `${JSON.stringify(entry.token)}, ${percent(logprob)}${drafted ? ", from a draft" : ""}`;
  token.setAttribute("aria-describedby", "alternatives");
  entries.set(token, { ...entry, drafted });
  spans.append(token);
}

function showAlternatives(token) {
  const { drafted, ...entry } = entries.get(token);
  const isDrawn = (one) => String(one.bytes) === String(entry.bytes) && one.logprob === entry.logprob;
  const listed = entry.top_logprobs.some(isDrawn) ? entry.top_logprobs : [...entry.top_logprobs, entry];
  const rows = listed.map((one) => {
    const cells = [make("td", {}, ...visible(one, true)), make("td"), make("td", { textContent: percent(one.logprob) })];
    cells[1].style.setProperty("--share", Math.exp(one.logprob ?? -Infinity));
    return make("tr", { className: isDrawn(one) ? "drawn" : "" }, ...cells);
  });
  const box = $("alternatives");
  box.replaceChildren(make("table", { role: "presentation" }, ...rows));
  if (drafted) box.append(make("p", { textContent: "accepted from a draft" }));
  box.hidden = false;
  const place = token.getClientRects()[0];
  const left = Math.max(8, Math.min(place.left, innerWidth - box.offsetWidth - 8));
  const below = place.bottom + 6;
  const top = below + box.offsetHeight < innerHeight ? below : Math.max(8, place.top - box.offsetHeight - 6);
  Object.assign(box.style, { left: `${left}px`, top: `${top}px` });
}

const hideAlternatives = () => ($("alternatives").hidden = true);
for (const [kind, leave] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  $("turns").addEventListener(kind, (event) => {
    const token = event.target.closest(".token");
    if (token) showAlternatives(token);
  });
  $("turns").addEventListener(leave, hideAlternatives);
}
$("scroll").addEventListener("scroll", ({ target }) => {
  hideAlternatives();
  following = target.scrollHeight - target.scrollTop - target.clientHeight < 60;
});
$("turns").addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideAlternatives();
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && event.target.closest(".token")?.[step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// ---- What the server does now, from what it tells Prometheus

const speeds = Array(60).fill(0); // of the last minute
let before = null; // {at, values} of the last poll
let polling = false;

async function poll() {
  if (polling || document.visibilityState !== "visible") return;
  polling = true;
  try {
    const text = await (await fetch("metrics")).text();
    const lines = [...text.matchAll(/^freewheel_(\S+) (\S+)$/gm)];
    const now = { at: performance.now(), values: Object.fromEntries(lines.map(([, name, value]) => [name, +value])) };
    showLive(now, before);
    before = now;
    document.body.classList.remove("lost");
  } catch {
    before = null;
    document.body.classList.add("lost");
  }
  polling = false;
}

function showLive({ at, values }, last) {
  const tokens = (kind) => values[`tokens_total{kind="${kind}"}`];
  const share = (part, whole) => (whole ? `${Math.min(100, (100 * part) / whole).toFixed(0)} %` : "–");
  const show = (id, value) => ($(id).textContent = value);
  show("running", values.running);
  show("waiting", values.waiting);
  show("pages", `${values.pages_in_use.toLocaleString("en")} / ${values.pages.toLocaleString("en")}`);
  show("hits", share(tokens("cached"), tokens("prompt")));
  show("acceptance", share(tokens("accepted"), tokens("drafted")));
  if (!last) return;
  const seconds = (at - last.at) / 1000;
  const speed = (tokens("output") - last.values['tokens_total{kind="output"}']) / seconds;
  show("speed", speed.toFixed(speed < 100 ? 1 : 0));
  show("occupancy", share(values.busy_seconds - last.values.busy_seconds, seconds));
  speeds.push(Math.max(0, speed));
  speeds.shift();
  const top = Math.max(1, ...speeds);
  const points = speeds.map((one, i) => `${i},${(15.25 - (14.5 * one) / top).toFixed(2)}`);
  $("trend").firstElementChild.setAttribute("points", points.join(" "));
}

document.addEventListener("visibilitychange", () => {
  before = null; // rates are of what was seen
  poll();
});

// ---- Begin

buildFields();
$("settings").open = matchMedia("(min-width: 60rem)").matches;
update();
poll();
setInterval(poll, 1000);
try {
  const { data } = await (await ask("v1/models")).json();
  $("model").textContent = data[0].id;
} catch (error) {
  report(error);
}
