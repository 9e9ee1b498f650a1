// Used by all other scripts: the data of the page, elements, formatting of numbers, colours, the tooltip.

const facts = JSON.parse(document.getElementById('facts').textContent);
const byId = (id) => document.getElementById(id);

/** Create an element with properties, attributes (in `attributes`) and children. Strings become text, never markup. */
function make(tag, properties = {}, ...children) {
  const { attributes = {}, ...rest } = properties;
  const node = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function bytesText(count) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

const countText = (count) => count.toLocaleString('en-US');

function bigText(count) {
  for (const [unit, size] of [['T', 1e12], ['B', 1e9], ['M', 1e6]]) {
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  }
  return countText(count);
}

function numberText(value) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(4)));
  return value.toExponential(2);
}

const shapeText = (shape) => (shape.length ? shape.join('×') : 'scalar');
const elementsOf = (shape) => shape.reduce((product, n) => product * n, 1);

// Colours are those of the style sheet, so that canvases follow the theme.
let colors = {};
function color(name) {
  if (!(name in colors)) colors[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return colors[name];
}
const kindColor = (kind) => color(`k${kind % 8}`);

// Colours for positions in a tensor. They get lighter from start to end, so that they differ without hue too.
const RAMP = (() => {
  const stops = [[67, 56, 190], [118, 48, 196], [176, 42, 175], [220, 62, 128], [243, 115, 74], [250, 181, 48]];
  const steps = [];
  for (let i = 0; i < 96; i += 1) {
    const at = (i / 95) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(at));
    const mix = stops[low].map((from, c) => Math.round(from + (stops[low + 1][c] - from) * (at - low)));
    steps.push(`rgb(${mix.join(' ')})`);
  }
  return steps;
})();
const rampColor = (position) => RAMP[Math.max(0, Math.min(95, Math.floor(position * 96)))];
const rampGradient = () => `linear-gradient(90deg, ${RAMP.filter((_, i) => i % 19 === 0).join(', ')})`;

/** Size a canvas for the pixels of the screen and return its cleared context. Sizes are in CSS pixels. */
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Drawing is deferred to the next frame, and done once however often it is requested.
const pending = new Set();
function later(draw) {
  if (!pending.size) requestAnimationFrame(() => {
    const all = [...pending];
    pending.clear();
    for (const one of all) one();
  });
  pending.add(draw);
}

const tip = byId('tip');
function showTip(x, y, title, lines) {
  tip.replaceChildren(make('b', { textContent: title }), ...lines.map((line) => make('div', { textContent: line })));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(window.innerWidth - box.width - 8, x + 14))}px`;
  tip.style.top = `${y + 18 + box.height > window.innerHeight ? Math.max(8, y - box.height - 12) : y + 18}px`;
}
function hideTip() { tip.hidden = true; }

function announce(text) { byId('live').textContent = text; }

// Functions to call when colours or widths change.
const redraws = [];
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  colors = {};
  redraws.forEach(later);
});
window.addEventListener('resize', () => redraws.forEach(later));
