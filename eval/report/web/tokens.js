// The prompt's text: what a budget evicts, and the answer that was given at it.
'use strict';
const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';

// Shades of tokens, 0 to 15, null for evicted ones: by how many heads keep them, by rank in one head.
const shadesOfAll = (levels, step) => {
  const kept = new Array(levels[0].length).fill(0);
  levels.forEach((digits) => [...digits].forEach((digit, i) => { kept[i] += DIGITS.indexOf(digit) <= step; }));
  return kept.map((count) => (count ? Math.ceil(16 * count / levels.length) - 1 : null));
};
const shadesOfOne = (digits, step, steps) => [...digits].map((digit) => (DIGITS.indexOf(digit) > step ? null
  : 15 - Math.min(15, Math.floor(16 * DIGITS.indexOf(digit) / steps))));

const line = (what, [, setting, text, score]) => {
  const grade = score >= 1 ? '✓ right' : score > 0 ? `${Math.round(100 * score)} % right` : '✗ wrong';
  return `${what}: “${text.trim()}” ${grade}${setting ? ` (${setting})` : ''}`;
};
const answersAt = (content, method, step) => {
  const lines = [];
  const distance = (spec) => Math.abs(content.stops[spec] - step);
  const [spec] = Object.keys(content.stops).sort((a, b) => distance(a) - distance(b));
  if (spec !== undefined) {
    const where = `at ${spec}${distance(spec) ? ' (the nearest budget that was run)' : ''}`;
    const given = (content.answers[method] || []).filter((answer) => answer[0] === spec).slice(0, 4);
    lines.push(...given.map((answer) => line(where, answer)));
    if (!given.length) lines.push(`No answer of ${method} ${where}.`);
  }
  if (content.full) lines.push(line('full cache', content.full));
  return lines;
};

document.querySelectorAll('.token-map').forEach((root) => {
  const content = JSON.parse(root.querySelector('script').textContent);
  const [slider, head] = [root.querySelector('input'), root.querySelector('.head')];
  const all = content.sizes[content.sizes.length - 1];
  slider.max = content.sizes.length - 1;
  const stops = Object.values(content.stops);
  slider.value = stops.length ? stops[Math.floor(stops.length / 2)] : slider.max;
  const paint = () => {
    const step = Number(slider.value);
    const known = content.heads.indexOf(head.value);
    const kept = content.sizes[step];
    const words = `${Number((100 * kept / all).toPrecision(3))} % of the cache: ${kept} of ${all} tokens per head`;
    slider.setAttribute('aria-valuetext', words);
    root.querySelector('output').textContent = words;
    root.querySelectorAll('.pane').forEach((pane) => {
      const method = pane.querySelector('select').value;
      const levels = content.levels[method];
      const shades = known < 0 ? shadesOfAll(levels, step) : shadesOfOne(levels[known], step, content.sizes.length);
      pane.querySelectorAll('.tokens span').forEach((span, i) => {
        span.className = (shades[i] === null ? 'gone' : `r${shades[i]}`) + (span.classList.contains('kept') ? ' kept' : '');
      });
      pane.querySelector('.answer').replaceChildren(...answersAt(content, method, step).map((text) => {
        const one = document.createElement('span');
        one.textContent = text;
        return one;
      }));
    });
  };
  root.querySelectorAll('input, select').forEach((control) => control.addEventListener('input', paint));
  root.querySelector('.controls').hidden = false;
  paint();
});
