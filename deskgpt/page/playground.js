// Fills the playground's page, asks its server for texts by OpenAI's API and shows them token by token. With a model that
// answers, the page is a chat: what is asked for is then the answer to all messages so far.
// What a model writes can be HTML: it is only ever set as textContent, Markdown too (rendered).
"use strict";

const GONE = "the server cannot be reached; start it again and open the URL that it prints";

const form = document.getElementById("request");
const tip = document.getElementById("tip");
const generateButton = document.getElementById("generate");
const stopButton = document.getElementById("stop");
const againButton = document.getElementById("again");
const copyButton = document.getElementById("copy");
const saveButton = document.getElementById("save");
const newButton = document.getElementById("new");
const earlier = document.getElementById("earlier");

const main = document.getElementById("model");
const text = main.querySelector(".text");
const status = main.querySelector(".status");

const ALTERNATIVES = 8; // likeliest tokens that are shown next to the drawn one
const MOST_EARLIER = 20; // texts that the page keeps
const KEY = location.pathname.split("/")[1]; // the page's address holds it
const CALL = {headers: {Authorization: `Bearer ${KEY}`}};

let page; // the model's facts and the settings, from the server
let messages = []; // of the dialogue
let answers = 0; // so far: each has a seed of its own
let tokens = 0; // shown of the text that is being written
let stopper = null; // an AbortController while a text is written

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function percent(p) {
  if (p > 0 && p < 0.0001) return "<0.01%";
  return (100 * p).toFixed(p < 0.01 ? 2 : 1) + "%";
}

function grouped(n) {
  return n.toLocaleString("en");
}

// A token for people to read: its text in quotes, or its bytes if they are not whole characters.
function nameOf(token) {
  try {
    return JSON.stringify(new TextDecoder("utf-8", {fatal: true, ignoreBOM: true}).decode(new Uint8Array(token.bytes)));
  } catch {
    return "bytes " + token.bytes.map(byte => byte.toString(16).padStart(2, "0").toUpperCase()).join(" ");
  }
}

// ---- the form ----

function fill() {
  for (const [name, value] of Object.entries(page.settings)) form.elements[name].value = value;
  document.getElementById("settings").open = matchMedia("(min-width: 60rem)").matches;
  main.querySelector("h2").textContent = page.id;
  const details = [];
  if (page.iter_num !== null) details.push(`step ${grouped(page.iter_num)}`);
  if (page.val_loss !== null) details.push(`val loss ${page.val_loss.toFixed(4)}`);
  details.push(`${(page.n_params / 1e6).toFixed(2)}M parameters`);
  details.push(`context of ${grouped(page.block_size)} tokens`);
  main.querySelector(".details").append(...details.map(detail => make("span", "", detail)));
  generateButton.disabled = false;
  if (page.system !== null) becomeChat();
  if (history.state !== null) restore(history.state);
}

// Keeps what was asked for, and the dialogue, over a reload, in the tab's entry for this address: when a page is left it is
// too late for that.
function keepState() {
  if (page === undefined) return;
  const state = {values: requested(), system: form.elements.system.value, messages, answers};
  history.replaceState(state, "");
}

function restore(kept) {
  for (const [name, value] of Object.entries(kept.values)) form.elements[name].value = value;
  form.elements.system.value = kept.system;
  messages = kept.messages;
  answers = kept.answers;
  // A question without its answer is asked again by hand.
  if (messages.at(-1)?.role === "user") form.elements.prompt.value = messages.pop().content;
  for (const {role, content} of messages) {
    const written = show(role, content);
    if (role === "user") addEdit(written);
    else finishAnswer(written);
  }
  setStopper(null);
}

function becomeChat() {
  const ask = document.getElementById("ask");
  const field = form.elements.prompt;
  document.body.classList.add("chat");
  form.querySelector("h1 span").textContent = "chat";
  form.elements.system.value = page.system;
  document.getElementById("of-system").hidden = false;
  againButton.hidden = false;
  saveButton.hidden = false;
  newButton.hidden = false;
  text.setAttribute("role", "log"); // a screen reader says each answer as it ends
  text.setAttribute("aria-label", "The dialogue; arrow keys go through an answer's tokens");
  copyButton.hidden = true; // each answer has its own
  generateButton.textContent = "Send";
  main.append(ask);
  ask.querySelector("span").textContent = "Message";
  document.getElementById("keys").textContent = "Enter sends, Shift+Enter begins a line, Esc stops.";
  field.rows = 2;
  field.value = field.value.trim();
  field.focus();
}

function requested() {
  const values = {};
  for (const [name, value] of Object.entries(page.settings)) {
    const field = form.elements[name];
    values[name] = typeof value === "number" ? field.valueAsNumber : field.value;
  }
  return values;
}

// ---- the text ----

function showStatus(line, isProblem = false) {
  status.textContent = line;
  status.classList.toggle("bad", isProblem);
}

// Adds a text or a message, and returns the element of its words.
function show(className, content) {
  const made = make("div", className);
  const written = make("div", "written", content);
  made.append(written);
  text.append(made);
  text.scrollTop = text.scrollHeight;
  return written;
}

function addAction(written, name, action) {
  let actions = written.parentElement.querySelector(".actions");
  if (actions === null) {
    actions = make("div", "actions");
    written.parentElement.append(actions);
  }
  const button = make("button", "", name);
  button.type = "button";
  button.setAttribute("aria-label", name === "Edit" ? "Edit this message and ask again" : `${name} of this answer`);
  button.addEventListener("click", () => action(button));
  actions.append(button);
}

function addEdit(message) {
  addAction(message, "Edit", () => edit(message.parentElement));
}

async function copy(content) {
  await navigator.clipboard.writeText(content);
  showStatus("copied");
}

// Saves the dialogue as a file that data/chat/prepare.py reads.
function save() {
  const link = make("a");
  link.download = "dialogue.jsonl";
  link.href = URL.createObjectURL(new Blob([JSON.stringify({messages: dialogue()}) + "\n"]));
  link.click();
  URL.revokeObjectURL(link.href);
}

// ---- earlier texts ----

// Moves the text that is shown to the earlier ones. One of these, clicked, comes back with its settings.
function keepText() {
  const shown = text.firstElementChild;
  if (shown === null) return;
  const item = make("li");
  const button = make("button", "", shown.textContent.trim().replace(/\s+/g, " ").slice(0, 200));
  button.type = "button";
  button.addEventListener("click", () => {
    if (stopper !== null) return;
    item.remove();
    keepText();
    text.append(shown);
    for (const [name, value] of Object.entries(shown.values)) form.elements[name].value = value;
  });
  item.append(button);
  const list = earlier.querySelector("ol");
  list.prepend(item);
  if (list.children.length > MOST_EARLIER) list.lastChild.remove();
  earlier.hidden = false;
  text.replaceChildren();
}

// ---- Markdown ----

// Returns the words of a line with `code`, **bold** and *emphasis*.
function inline(line) {
  const parts = line.split(/(`[^`]+`|\*\*[^*]+\*\*|\*[^\s*][^*]*\*)/);
  return parts.map(part => {
    if (/^`.+`$/.test(part)) return make("code", "", part.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(part)) return make("strong", "", part.slice(2, -2));
    if (/^\*.+\*$/.test(part)) return make("em", "", part.slice(1, -1));
    return part;
  });
}

// Returns an element with the Markdown of an answer: code, headings, lists and paragraphs.
function rendered(source) {
  const made = make("div", "markdown");
  let block = null; // that the next line may belong to
  let code = null; // between two lines of ```
  for (const line of source.split("\n")) {
    if (line.startsWith("```")) {
      code = code === null ? make("code") : null;
      block = null;
      if (code !== null) {
        const frame = make("pre");
        frame.append(code);
        made.append(frame);
      }
      continue;
    }
    if (code !== null) {
      code.append(line + "\n");
      continue;
    }
    const item = /^\s*([-*+]|\d+[.)])\s+(.*)/.exec(line);
    const heading = /^#{1,6}\s+(.*)/.exec(line);
    const wanted = heading ? "h3" : item ? (/\d/.test(item[1]) ? "ol" : "ul") : "p";
    if (!line.trim()) {
      block = null;
      continue;
    }
    const continues = block !== null && block.localName === wanted && !heading;
    if (!continues) {
      block = make(wanted);
      made.append(block);
    } else if (!item) {
      block.append(make("br"));
    }
    const place = item ? make("li") : block;
    place.append(...inline(heading ? heading[1] : item ? item[2] : line));
    if (item) block.append(place);
  }
  return made;
}

const IS_MARKDOWN = /```|`[^`]+`|\*\*|^#{1,6}\s|^\s*([-*+]|\d+[.)])\s/m;

// ---- writing ----

function addToken(token, place) {
  const span = make("span", token.text.startsWith("\n") ? "token line" : "token", token.text);
  span.about = token;
  span.style.setProperty("--surprise", 1 - Math.exp(token.logprob));
  span.tabIndex = tokens === 0 ? 0 : -1; // one stop of the Tab key; from there on the arrow keys
  const follows = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  place.append(span);
  if (follows) text.scrollTop = text.scrollHeight;
  tokens += 1;
}

// Writes what the values ask for into an element; returns whether the text came to its end.
async function write(values, place, signal) {
  let ended = false;
  tokens = 0;
  main.classList.add("writing");
  text.setAttribute("aria-busy", "true");
  showStatus("reading the prompt …");
  try {
    const {prompt, messages, max_new_tokens, ...others} = values;
    const isChat = messages !== undefined;
    const asked = {...others, max_tokens: max_new_tokens, stream: true, logprobs: ALTERNATIVES};
    Object.assign(asked, isChat ? {messages} : {prompt});
    const path = isChat ? "/v1/chat/completions" : "/v1/completions";
    const response = await fetch(path, {...CALL, method: "POST", body: JSON.stringify(asked), signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    let began = 0; // in milliseconds, when the first token came
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const shown = isChat ? choice.delta.content : choice.text;
      if (choice.logprobs) {
        if (tokens === 0) {
          began = performance.now();
          showStatus("writing …");
        }
        addToken({...choice.logprobs.content[0], text: shown}, place);
      } else {
        place.append(shown);
      }
      if (!choice.finish_reason) continue;
      ended = true;
      const perSecond = 1000 * (tokens - 1) / (performance.now() - began);
      const speed = tokens > 1 ? ` · ${perSecond.toLocaleString("en", {maximumSignificantDigits: 3})} tokens/s` : "";
      const stopped = choice.finish_reason === "stop" && !isChat ? ", up to the stop text" : "";
      const read = `prompt of ${grouped(event.usage.prompt_tokens)} tokens`;
      showStatus(`${tokens} of ${max_new_tokens} tokens${stopped}${speed} · ${read}`);
    }
    if (!ended) throw new Error(GONE);
  } catch (error) {
    if (signal.aborted) showStatus(`stopped after ${tokens} tokens`);
    else if (error instanceof TypeError) showStatus(GONE, true);
    else showStatus(error.message, true);
  }
  main.classList.remove("writing");
  text.setAttribute("aria-busy", "false");
  return ended;
}

// Yields the events of a stream, "data: {...}" with an empty line after each; the last one is no JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice("data: ".length));
    }
  }
}

async function generate() {
  if (stopper !== null || !form.reportValidity()) return;
  const values = requested();
  if (page.system === null) {
    keepText();
    const place = show("");
    place.parentElement.values = values;
    place.append(make("span", "prompt", values.prompt));
    await run(values, place);
    return;
  }
  const field = form.elements.prompt;
  if (!values.prompt.trim()) return;
  const message = show("user", values.prompt);
  messages.push({role: "user", content: values.prompt});
  field.value = "";
  if (await answer(values)) {
    addEdit(message);
    return;
  }
  field.value = messages.pop().content;
  message.parentElement.remove();
  setStopper(null);
}

// Takes a question back, with all that came after it, to be asked in other words.
function edit(message) {
  if (stopper !== null) return;
  const at = [...text.children].indexOf(message);
  const field = form.elements.prompt;
  field.value = messages[at].content;
  messages.length = at;
  while (text.children.length > at) text.lastChild.remove();
  setStopper(null);
  field.focus();
}

function newDialogue() {
  messages = [];
  answers = 0;
  text.replaceChildren();
  showStatus("");
  setStopper(null);
  form.elements.prompt.focus();
}

// Returns the messages so far, after the system message.
function dialogue() {
  const system = form.elements.system.value;
  return system ? [{role: "system", content: system}, ...messages] : messages;
}

// Writes the answer to the messages so far; returns whether there is one.
async function answer(values) {
  const place = show("assistant");
  const ended = await run({...values, seed: values.seed + answers, messages: dialogue()}, place);
  const isAnswer = ended || tokens > 0;
  if (isAnswer) {
    messages.push({role: "assistant", content: place.textContent});
    answers += 1;
    finishAnswer(place);
    setStopper(null);
  } else {
    place.parentElement.remove();
  }
  return isAnswer;
}

function finishAnswer(place) {
  const content = place.textContent;
  addAction(place, "Copy", () => copy(content));
  if (IS_MARKDOWN.test(content)) showMarkdown(place, content);
}

// Shows an answer as Markdown; a button shows its tokens again, and one copies a block of code.
function showMarkdown(place, content) {
  const markdown = rendered(content);
  for (const code of markdown.querySelectorAll("pre code")) {
    const button = make("button", "", "Copy");
    button.type = "button";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", () => copy(code.textContent));
    code.before(button);
  }
  place.before(markdown);
  place.hidden = true;
  addAction(place, "Tokens", button => {
    place.hidden = !place.hidden;
    markdown.hidden = !place.hidden;
    button.textContent = place.hidden ? "Tokens" : "Text";
    button.setAttribute("aria-label", `${button.textContent} of this answer`);
  });
}

async function again() {
  if (!form.reportValidity()) return;
  if (messages.at(-1).role === "assistant") {
    messages.pop();
    text.lastChild.remove();
  }
  await answer(requested());
}

async function run(values, place) {
  hideTip();
  setStopper(new AbortController());
  main.scrollIntoView({block: "nearest"}); // on a phone the settings may fill the window
  const ended = await write(values, place, stopper.signal);
  setStopper(null);
  return ended;
}

function setStopper(controller) {
  stopper = controller;
  generateButton.disabled = controller !== null;
  stopButton.disabled = controller === null;
  againButton.disabled = controller !== null || messages.length === 0;
  newButton.disabled = againButton.disabled;
  saveButton.disabled = againButton.disabled;
  keepState();
  copyButton.disabled = controller !== null || text.firstChild === null;
}

function stop() {
  if (stopper !== null) stopper.abort();
}

// ---- probabilities ----

text.addEventListener("pointerover", event => {
  if (event.target.about) showTip(event.target);
  else hideTip();
});
text.addEventListener("pointerleave", event => {
  if (event.pointerType === "mouse") hideTip();
});
text.addEventListener("focusin", event => {
  if (event.target.about) showTip(event.target);
});
text.addEventListener("focusout", hideTip);
text.addEventListener("scroll", placeTip);
text.addEventListener("keydown", event => {
  const all = [...text.querySelectorAll(".token")];
  const at = all.indexOf(event.target);
  const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1}[event.key];
  if (at < 0 || !all[to]) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  all[to].tabIndex = 0;
  all[to].focus();
});

function tipRow(name, p, className) {
  const row = make("tr", className);
  const bar = make("div", "bar");
  bar.style.width = `${100 * p}%`;
  const cell = make("td");
  cell.append(bar);
  row.append(make("th", "", name), cell, make("td", "", percent(p)));
  return row;
}

function showTip(span) {
  hideTip();
  const {id, rank, top_logprobs: top} = span.about;
  const name = nameOf(span.about);
  const p = Math.exp(span.about.logprob);
  const isListed = top.some(other => other.id === id);
  const rest = Math.max(0, top.reduce((left, other) => left - Math.exp(other.logprob), isListed ? 1 : 1 - p));
  const table = make("table");
  for (const other of top) {
    table.append(tipRow(nameOf(other), Math.exp(other.logprob), other.id === id ? "drawn" : ""));
  }
  if (!isListed) table.append(tipRow(name, p, "drawn"));
  table.append(tipRow("all others", rest, "others"));
  const place = rank === 1 ? "the likeliest" : `rank ${grouped(rank)}`;
  tip.replaceChildren(
    make("h3", "", name),
    make("div", "", `${percent(p)}, ${place}; token ${id}`),
    table,
    make("p", "", "At temperature 1, before top-k and top-p."),
  );
  tip.hidden = false;
  span.classList.add("current");
  span.setAttribute("aria-describedby", "tip");
  placeTip();
}

// Below the current token, above where there is no room; never beyond the window or over the buttons below the text.
function placeTip() {
  const span = document.querySelector(".current");
  if (span === null) return;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const buttons = generateButton.parentElement.getBoundingClientRect();
  const end = buttons.right > at.left ? buttons.top : innerHeight;
  const below = at.bottom + 6;
  const above = Math.min(at.top, end) - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below + tip.offsetHeight < end ? below : Math.max(8, above)}px`;
}

function hideTip() {
  tip.hidden = true;
  for (const span of document.querySelectorAll(".current")) {
    span.classList.remove("current");
    span.removeAttribute("aria-describedby");
  }
}

// ---- start ----

form.addEventListener("submit", event => {
  event.preventDefault();
  generate();
});
stopButton.addEventListener("click", stop);
againButton.addEventListener("click", again);
newButton.addEventListener("click", newDialogue);
saveButton.addEventListener("click", save);
copyButton.addEventListener("click", () => copy(text.textContent));
document.getElementById("heat").addEventListener("change", event => {
  text.classList.toggle("heat", event.target.checked);
});
form.elements.prompt.addEventListener("keydown", event => {
  if (page.system === null || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  generate();
});
document.getElementById("new-seed").addEventListener("click", () => {
  form.elements.seed.value = Math.floor(Math.random() * 1_000_000);
});
addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
  if (event.key === "Escape") {
    hideTip();
    stop();
  }
});
addEventListener("scroll", placeTip);
addEventListener("resize", placeTip);
addEventListener("change", keepState);

fetch("/v1/models", CALL)
  .then(response => response.json())
  .then(found => {
    page = found.data[0];
    fill();
  })
  .catch(() => showStatus(GONE, true));
