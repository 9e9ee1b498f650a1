// Used by all other scripts: the data of the page, elements, formatting of numbers, the theme, colours, the tooltip.

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

const button = (textContent, onclick, className = 'button') => make('button', { type: 'button', className, textContent, onclick });

function bytesText(count) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

const countText = (count) => count.toLocaleString('en-US');
const plural = (count, noun) => `${countText(count)} ${noun}${count === 1 ? '' : 's'}`;

function bigText(count) {
  for (const [unit, size] of [['T', 1e12], ['B', 1e9], ['M', 1e6]]) {
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  }
  return countText(count);
}

/** A number of the statistics. Infinite ones are text in the data. */
function numberText(value) {
  if (value === null || value === undefined) return '–';
  if (typeof value === 'string') return value;
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(4)));
  return value.toExponential(2);
}

function percentText(share) {
  if (share > 0 && share < 0.001) return '< 0.1 %';
  return `${share >= 0.9995 && share < 1 ? '99.9' : Number((100 * share).toPrecision(3))} %`;
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
  const stops = [[62, 56, 188], [110, 50, 200], [168, 44, 180], [214, 62, 132], [240, 118, 78], [250, 184, 56]];
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

/** A rectangle of something that is lost: red, with stripes that are visible without colour. */
function drawLost(context, x, y, width, height) {
  context.fillStyle = color('lost');
  context.fillRect(x, y, width, height);
  if (width < 5) return;
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let at = x - height; at < x + width; at += 6) { context.moveTo(at, y + height); context.lineTo(at + height, y); }
  context.strokeStyle = color('card');
  context.globalAlpha = 0.45;
  context.lineWidth = 1.5;
  context.stroke();
  context.restore();
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

/** A button that copies a text, and says so. */
function copyButton(text, title) {
  const node = button('Copy', async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // not permitted for this page
      const area = make('textarea', { value: text, className: 'hidden' });
      document.body.append(area);
      area.select();
      document.execCommand('copy');
      area.remove();
    }
    node.textContent = 'Copied';
    announce('Copied');
    setTimeout(() => { node.textContent = 'Copy'; }, 1500);
  }, 'button copy');
  node.setAttribute('aria-label', title);
  return node;
}

// Functions to call when colours or widths change.
const redraws = [];
window.addEventListener('resize', () => redraws.forEach(later));

// The theme is that of the system until the button chooses one.
const theme = (() => {
  const NAMES = { auto: '◐', light: '☀', dark: '☾' };
  const system = window.matchMedia('(prefers-color-scheme: dark)');
  let chosen = 'auto';
  try { chosen = localStorage.getItem('ucp-theme') in NAMES ? localStorage.getItem('ucp-theme') : 'auto'; } catch { /* not permitted for this page */ }
  const node = byId('theme');

  function apply() {
    document.documentElement.dataset.theme = chosen === 'auto' ? (system.matches ? 'dark' : 'light') : chosen;
    node.textContent = NAMES[chosen];
    node.title = `Theme: ${chosen} (t)`;
    node.setAttribute('aria-label', node.title);
    colors = {};
    redraws.forEach(later);
  }
  function next() {
    const names = Object.keys(NAMES);
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    try { localStorage.setItem('ucp-theme', chosen); } catch { /* not permitted for this page */ }
    apply();
  }
  node.onclick = next;
  system.addEventListener('change', apply);
  apply();
  return { next };
})();
