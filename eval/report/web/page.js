"use strict";
// What is shown is what the address says (#protocol=...&task=...&budget=...&method=...), so that a
// view can be sent, and the browser's back and forward go through views. Names in an address that
// this page does not know mean the default.
const form = document.querySelector("form.view");
const selects = [...form.querySelectorAll("select")];
const boxes = [...form.querySelectorAll("input[name=method]")];
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
  const methods = boxes.map((box) => box.value);
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
  if (method.size < boxes.length) for (const one of named) address.append("method", one);
  history.pushState(null, "", `#${address}`);
  show();
}

function fits({ protocol, tasks, budget, method }) {
  return (
    (protocol === undefined || view.protocol === "" || view.protocol === protocol) &&
    (tasks === undefined || JSON.parse(tasks).includes(view.task)) &&
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

async function unpack(section) {
  const template = section.querySelector(":scope > template");
  if (!template) return;
  template.remove();
  section.insertAdjacentHTML("beforeend", await inflate(template).text());
  show();
}

function show() {
  view = read();
  for (const one of selects) one.value = view[one.name];
  for (const box of boxes) box.checked = view.method.has(box.value);
  form.querySelector("summary").textContent = `Methods: ${view.method.size} of ${boxes.length}`;
  const parts = "[data-protocol], [data-tasks], [data-budget], [data-method]";
  for (const one of document.querySelectorAll(parts)) {
    one.toggleAttribute("hidden", !fits(one.dataset));
  }
  document.querySelectorAll("details[data-tasks]:not([hidden])").forEach(unpack);
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

function options(select, named, value) {
  select.replaceChildren(...named.map(([id, text]) => make("option", { value: id }, text)));
  select.value = named.some(([id]) => id === value) ? value : (named[0] ?? [""])[0];
}

const SEEN = { query_aware: "question seen", query_agnostic: "question not seen" };
const nameOf = (one) => [one.label, one.policy && `(${one.policy})`].filter(Boolean).join(" ");

// What follows from the records of a prompt: values of answers (more is better), names, budgets.
function complete(prompt) {
  prompt.given = prompt.nll !== null;
  const several = new Set(prompt.answers.map((one) => one.policy).filter(Boolean)).size > 1;
  for (const one of prompt.answers) {
    one.method = one.family;
    one.budget = one.budget_spec ?? "";
    one.value = prompt.given ? -one.nll / one.reply_tokens : one.score;
    if (!several) one.policy = null;
  }
}

const keyOf = (one) => `${nameOf(one)}|${one.budget}`;
const idOf = (prompt) => `${prompt.protocol}|${prompt.example}`;

// Whether, at a chosen budget, the first method is right where the second is not: has the full
// score, or where both are named more than the other.
function told(prompt) {
  if (!view.right && !view.wrong) return true;
  const of = (method) =>
    prompt.answers.filter((one) => one.method === method && (!one.budget || chosen(one)));
  const full = prompt.given ? Infinity : 1;
  if (!view.wrong) return of(view.right).some((one) => one.value >= full);
  if (!view.right) return of(view.wrong).some((one) => one.value < full);
  return of(view.right).some((one) =>
    of(view.wrong).some(
      (other) =>
        (!one.budget || !other.budget || one.budget === other.budget) && one.value > other.value,
    ),
  );
}

const chosen = (one) => !one.budget || one.budget === "own" || !view.budget || one.budget === view.budget;

function outcome(prompt, value) {
  if (prompt.given) return [`${Math.exp(-value).toFixed(2)}`, ""];
  return value >= 1 ? ["right", "right"] : value <= 0 ? ["wrong", "wrong"] : [value.toFixed(2), ""];
}

// The excerpt, shaded by the share of heads that keep each character's token.
function marked(prompt, marks) {
  const letters = [...prompt.excerpt];
  const kept = prompt.runs.map((length, run) => (marks[run] ?? "-").repeat(length)).join("");
  const evidence = letters.map(() => "");
  for (const [start, stop] of prompt.excerpt_evidence) evidence.fill(" evidence", start, stop);
  const style = (place) => {
    const digit = kept[place] ?? "-";
    return (digit === "-" ? "fed" : `r${Math.round((15 * Number(digit)) / 9)}`) + evidence[place];
  };
  const parts = [];
  for (let start = 0, stop = 1; start < letters.length; start = stop, stop += 1) {
    const here = style(start);
    while (stop < letters.length && stop !== prompt.excerpt_question && style(stop) === here) stop += 1;
    if (start === prompt.excerpt_question) parts.push(make("b", { class: "soft" }, " ▸question: "));
    const text = letters.slice(start, stop).join("").replaceAll("\n", "↵\n");
    parts.push(make("span", { class: here }, text));
  }
  return parts;
}

async function browse(section) {
  const prompts = await inflate(section.querySelector("template")).json();
  prompts.forEach(complete);
  section.hidden = false;
  const part = (name) => section.querySelector(`.${name}`);
  const ids = () => [...part("prompt").options].map((option) => option.value);
  const step = (by) => go({ prompt: ids().at((part("prompt").selectedIndex + by) % ids().length) });
  for (const name of ["prompt", "right", "wrong"]) {
    part(name).addEventListener("change", (event) => go({ [name]: event.target.value }));
  }
  part("previous").addEventListener("click", () => step(-1));
  part("next").addEventListener("click", () => step(1));

  function draw() {
    part("right").value = view.right ?? "";
    part("wrong").value = view.wrong ?? "";
    const found = prompts.filter(
      (one) =>
        (!view.task || one.task === view.task) &&
        (!view.protocol || one.protocol === view.protocol) &&
        told(one),
    );
    const named = found.map((one) => [idOf(one), `${one.example}, ${SEEN[one.protocol]}`]);
    options(part("prompt"), named, view.prompt);
    const index = part("prompt").selectedIndex;
    part("count").textContent = found.length ? `${index + 1} of ${found.length}` : "no prompt";
    part("shown").hidden = !found.length;
    if (!found.length) return;
    const prompt = found[index];
    const rows = prompt.answers.filter((one) => view.method.has(one.method) && chosen(one));
    const evicted = rows.filter((one) => one.budget);
    const ours = evicted.find((one) => one.method === "kvp") ?? evicted[0] ?? rows[0];
    const mark = rows.find((one) => keyOf(one) === view.kept) ?? ours;
    part("question").textContent = prompt.question || "none";
    part("reference").textContent = prompt.reply ?? prompt.references.join(" | ");
    part("text").hidden = !prompt.excerpt;
    if (prompt.excerpt) {
      part("tokens").replaceChildren(...marked(prompt, mark?.kept ?? ""));
      const whose = mark ? `${nameOf(mark)}${mark.budget && ` at ${mark.budget}`}` : "no method";
      part("whose").textContent = `Kept by ${whose}`;
    }
    part("result").textContent = prompt.given ? "perplexity" : "score";
    const focused = part("rows").contains(document.activeElement);
    part("rows").replaceChildren(
      ...rows.map((one) => {
        const [word, style] = outcome(prompt, one.value);
        const radio = make("input", { type: "radio", name: section.id, checked: one === mark });
        radio.addEventListener("change", () => go({ kept: keyOf(one) }));
        return make(
          "tr",
          {},
          make("th", { scope: "row" }, make("label", {}, radio, ` ${nameOf(one)}`)),
          make("td", {}, one.budget || "all"),
          make("td", { class: style }, word),
          make("td", {}, one.evidence === null ? "–" : `${(100 * one.evidence).toFixed(0)} %`),
          make("td", { class: "text" }, one.text.trim().replaceAll("\n", " ↵ ")),
        );
      }),
    );
    if (focused) part("rows").querySelector("input:checked")?.focus();
  }
  browsers.push(draw);
  draw();
}

// Rows by a column, largest or last first; again: the other way round. What is no number comes last.
function sort(head) {
  const table = head.closest("table");
  const down = head.ariaSort !== "descending";
  for (const one of head.parentNode.cells) one.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  const text = (row) => row.cells[head.cellIndex].textContent.trim();
  const number = (row) => Number.parseFloat(text(row).replaceAll(",", ""));
  const order = (one, other) => {
    if (head.cellIndex === 0) return text(other).localeCompare(text(one), "en", { numeric: true });
    const [here, there] = [number(one), number(other)].map((value) => (Number.isNaN(value) ? (down ? -1 : 1) * Infinity : value));
    return here === there ? 0 : there - here;
  };
  const rows = [...table.tBodies[0].rows].sort((one, other) => (down ? 1 : -1) * order(one, other));
  table.tBodies[0].append(...rows);
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
  const named = button.value ? boxes.map((one) => one.value) : [];
  button.addEventListener("click", () => go({ method: new Set(named) }));
}
form.hidden = false;
addEventListener("hashchange", show);
show();
for (const section of document.querySelectorAll(".answers")) browse(section);
const numbers = document.querySelector("a[download]");
inflate(numbers.nextElementSibling).blob().then((blob) => {
  numbers.href = URL.createObjectURL(new Blob([blob], { type: "text/csv" }));
});
