// Returns the texts of the page whose contrast against their background is lower than arguments[0]: [ratio, text, colours].
const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((n) => { const c = n / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const backgroundOf = (node) => {
  const layers = [];
  for (let at = node; at; at = at.parentElement) {
    const color = parse(getComputedStyle(at).backgroundColor);
    layers.push(color);
    if (color[3] === 1) break;
  }
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const opacityOf = (node) => { let all = 1; for (let at = node; at; at = at.parentElement) all *= Number(getComputedStyle(at).opacity); return all; };
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
let checked = 0;
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim();
  const node = walker.currentNode.parentElement;
  if (!text || /^(SCRIPT|STYLE|NOSCRIPT)$/.test(node.tagName) || !node.getClientRects().length) continue;
  const behind = backgroundOf(node);
  const color = parse(getComputedStyle(node).color);
  color[3] *= opacityOf(node);
  const [high, low] = [luminance(over(color, behind)), luminance(behind)].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  checked += 1;
  if (ratio < arguments[0]) found.push([ratio.toFixed(2), text.slice(0, 40), color.join(), behind.map(Math.round).join()]);
}
return { checked, found };
