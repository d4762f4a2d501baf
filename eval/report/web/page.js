"use strict";
// What is shown is what the address says (#protocol=...&budget=...&method=...), so that a
// view can be sent, and the browser's back and forward go through views. Names in an address that
// this page does not know mean the default.
const form = document.querySelector("form.view");
const selects = [...form.querySelectorAll("select")];
const boxes = [...form.querySelectorAll("input[name=method]")];
const methods = boxes.map((box) => box.value);
const defaults = Object.fromEntries(selects.map((one) => [one.name, one.value]));
const browsers = [];
let view;

function read() {
  const given = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const found = { ...defaults, ...Object.fromEntries(given) };
  for (const one of selects) {
    const known = [...one.options].some((option) => option.value === found[one.name]);
    if (!known) found[one.name] = defaults[one.name];
  }
  const chosen = methods.filter((method) => given.getAll("method").includes(method));
  found.method = new Set(chosen.length || given.get("method") === "" ? chosen : methods);
  return found;
}

function go(changes) {
  const { method, ...others } = { ...view, ...changes };
  const address = new URLSearchParams();
  for (const [name, value] of Object.entries(others)) {
    if (value !== (defaults[name] ?? "")) address.set(name, value);
  }
  const named = method.size ? [...method] : [""];
  if (method.size < methods.length) for (const one of named) address.append("method", one);
  history.pushState(null, "", `#${address}`);
  show();
}

function fits({ protocol, budget, method }) {
  return (
    (protocol === undefined || view.protocol === "" || view.protocol === protocol) &&
    (budget === undefined || budget === (view.budget || defaults.budget)) &&
    (method === undefined || view.method.has(method))
  );
}

// What a template holds compressed, in base64.
function inflate(template) {
  const letters = atob(template.content.textContent.trim());
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

function show() {
  view = read();
  for (const one of selects) one.value = view[one.name];
  for (const box of boxes) box.checked = view.method.has(box.value);
  form.querySelector("summary").textContent = `Methods: ${view.method.size} of ${methods.length}`;
  for (const one of document.querySelectorAll('svg [id^="method="]')) one.dataset.method = one.id.slice(7);
  const parts = "[data-protocol], [data-budget], [data-method]";
  for (const one of document.querySelectorAll(parts)) {
    one.toggleAttribute("hidden", !fits(one.dataset));
  }
  for (const draw of browsers) draw();
}

function make(tag, attributes, ...children) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) one.setAttribute(name, value === true ? "" : value);
  }
  one.append(...children);
  return one;
}

// The full cache and sizes that methods chose are no budgets of the form: they are always shown.
const budgets = [...form.elements.budget.options].map((option) => option.value);
const chosen = ({ budget_spec: budget }) => !view.budget || budget === view.budget || !budgets.includes(budget);

function outcome(one) {
  if (one.nll !== null) return [Math.exp(one.nll / one.reply_tokens).toFixed(2), ""];
  if (one.score > 0 && one.score < 1) return [one.score.toFixed(2), ""];
  return one.score ? ["right", "right"] : ["wrong", "wrong"];
}

async function browse(section) {
  const prompts = await inflate(section.querySelector("template")).json();
  section.hidden = false;
  const part = (name) => section.querySelector(`.${name}`);
  const step = (by) => {
    const ids = [...part("prompt").options].map((option) => option.value);
    go({ prompt: ids.at((part("prompt").selectedIndex + by) % ids.length) });
  };
  part("prompt").addEventListener("change", (event) => go({ prompt: event.target.value }));
  part("previous").addEventListener("click", () => step(-1));
  part("next").addEventListener("click", () => step(1));

  function row(one, name) {
    const [word, style] = outcome(one);
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, name(one)),
      make("td", {}, one.budget_spec ?? "all"),
      make("td", { class: style }, word),
      make("td", {}, one.evidence === null ? "–" : `${(100 * one.evidence).toFixed(0)} %`),
      make("td", { class: "text" }, one.text.trim().replaceAll("\n", " ↵ ")),
    );
  }

  function draw() {
    const found = prompts.filter((one) => !view.protocol || one.protocol === view.protocol);
    const ids = found.map((one) => `${one.protocol}|${one.task}|${one.example}`);
    const index = Math.max(0, ids.indexOf(view.prompt));
    part("prompt").replaceChildren(
      ...found.map((one, at) => make("option", { value: ids[at] }, one.title)),
    );
    part("prompt").selectedIndex = index;
    part("count").textContent = found.length ? `${index + 1} of ${found.length}` : "no prompt";
    part("shown").hidden = !found.length;
    if (!found.length) return;
    const prompt = found[index];
    const several = new Set(prompt.answers.map((one) => one.policy).filter(Boolean)).size > 1;
    const name = (one) => one.label + (several && one.policy ? ` (${one.policy})` : "");
    const rows = prompt.answers.filter((one) => view.method.has(one.family) && chosen(one));
    part("question").textContent = prompt.question || "none";
    part("reference").textContent = prompt.reply ?? prompt.references.join(" | ");
    part("result").textContent = prompt.nll === null ? "score" : "perplexity";
    part("rows").replaceChildren(...rows.map((one) => row(one, name)));
  }
  browsers.push(draw);
  draw();
}

// Rows by a column, largest or last first; again: the other way round. What is no number comes last.
function sort(head) {
  const down = head.ariaSort !== "descending";
  for (const one of head.parentNode.cells) one.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  const text = (row) => row.cells[head.cellIndex].textContent.trim();
  const number = (row) => {
    const value = Number.parseFloat(text(row).replaceAll(",", ""));
    return Number.isNaN(value) ? (down ? -1 : 1) * Number.MAX_VALUE : value;
  };
  const order = (one, other) =>
    head.cellIndex ? number(other) - number(one) : text(other).localeCompare(text(one), "en", { numeric: true });
  const body = head.closest("table").tBodies[0];
  body.append(...[...body.rows].sort((one, other) => (down ? 1 : -1) * order(one, other)));
}

document.addEventListener("click", ({ target }) => {
  if (target.matches(".sort")) sort(target.parentNode);
});
for (const one of selects) one.addEventListener("change", () => go({ [one.name]: one.value }));
for (const box of boxes) {
  box.addEventListener("change", () => {
    go({ method: new Set(boxes.filter((one) => one.checked).map((one) => one.value)) });
  });
}
for (const button of form.querySelectorAll("button")) {
  button.addEventListener("click", () => go({ method: new Set(button.value ? methods : []) }));
}
form.hidden = false;
addEventListener("hashchange", show);
show();
for (const section of document.querySelectorAll(".answers")) browse(section);
const numbers = document.querySelector("a[download]");
inflate(numbers.nextElementSibling).blob().then((blob) => {
  numbers.href = URL.createObjectURL(new Blob([blob], { type: "text/csv" }));
});
