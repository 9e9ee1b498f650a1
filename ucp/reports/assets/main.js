// Assemble the page: filters, keys, and links to a parameter.

const searchBox = byId('search');

/** Selects and buttons for the words of a query that filter. They and the search box show the same. */
function drawFilters() {
  const bar = byId('filters');
  if (!total) { bar.hidden = true; return; }
  const change = (key, value) => searchFor(withFilter(key, value));
  if (kinds.length > 1) bar.append(stateChooser('filter-state'));
  const inputs = AXES.map((axis, number) => [axis, axisSize(number)]).filter(([, size]) => size > 1).map(([axis, size]) => {
    const id = `filter-${axis}`;
    const node = size > 64
      ? make('input', { id, type: 'number', min: 0, max: size - 1, placeholder: 'all', oninput: () => change(axis, node.value) })
      : make('select', { id, onchange: () => change(axis, node.value) }, make('option', { value: '', textContent: 'all' }),
        Array.from({ length: size }, (_, i) => make('option', { value: i, textContent: i })));
    bar.append(make('label', { htmlFor: id, title: { pp: 'Pipeline stage', tp: 'Tensor-parallel rank', dp: 'Data-parallel rank' }[axis] }, axis, node));
    return [axis, node];
  });
  const chips = Object.entries(FLAGS).map(([flag, [title, test]]) => {
    const count = columns.name.reduce((sum, _, p) => sum + (test(p) ? 1 : 0), 0);
    if (!count) return null;
    const node = make('button', { type: 'button', className: `chip ${flag}`, title: `${title} (is:${flag})`, attributes: { 'aria-pressed': 'false' },
      onclick: () => searchFor(node.getAttribute('aria-pressed') === 'true' ? withFilter('is', '') : withFilter('is', flag)) }, flag === 'found' ? 'findings' : flag, make('span', { textContent: countText(count) }));
    bar.append(node);
    return [flag, node];
  }).filter(Boolean);
  const clear = button('Clear', () => searchFor(''), 'link');
  bar.append(clear);
  listeners.push(() => {
    const words = view.query.toLowerCase().split(/\s+/);
    for (const [axis, node] of inputs) {
      const found = words.find((word) => word.startsWith(`${axis}:`));
      if (document.activeElement !== node || !found) node.value = found ? found.slice(axis.length + 1) : '';
    }
    for (const [flag, node] of chips) node.setAttribute('aria-pressed', String(words.includes(`is:${flag}`)));
    clear.hidden = !view.query.trim();
  });
}

const KEYS = [['/', 'search'], ['Enter', 'open the first parameter found'], ['j, k', 'next and previous parameter'], ['Esc', 'close, clear'],
  ['← ↑ ↓ →', 'move in the ranks, the map and the tables'], ['t', 'light, dark or the system’s theme'], ['?', 'this list']];

function drawHelp() {
  const dialog = byId('help');
  const list = (rows) => make('dl', { className: 'pairs' }, rows.map(([key, text]) => [make('dt', {}, make('kbd', { textContent: key })), make('dd', { textContent: text })]));
  dialog.append(make('h2', { id: 'help-title', textContent: 'Keys and filters' }), list(KEYS), make('h3', { textContent: 'Words in the search' }),
    list([['attn *.bias', 'every word must occur in the name; a star matches anything'], ['rank:5', 'on this rank, of the chosen state'], ['pp:0 tp:1 dp:3', 'on ranks with these coordinates'],
      ...Object.entries(FLAGS).map(([flag, [title]]) => [`is:${flag}`, title])]),
    make('p', { className: 'links' }, button('Close', () => dialog.close())));
  byId('help-open').onclick = () => dialog.showModal();
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
}

/** The address of the page shows what is open, so that it can be sent: #param=…&state=…&q=… */
const link = (() => {
  function current() {
    const parts = [];
    if (view.open >= 0) parts.push(`param=${encodeURIComponent(columns.name[view.open])}`);
    if (view.open >= 0 && kinds.length) parts.push(`state=${encodeURIComponent(kinds[view.kind])}`);
    if (view.query.trim()) parts.push(`q=${encodeURIComponent(view.query.trim())}`);
    return parts.join('&');
  }
  function update() {
    const hash = current();
    if (hash || /^#(param|state|q)=/.test(location.hash)) history.replaceState(null, '', hash ? `#${hash}` : location.pathname + location.search);
  }
  function follow() {
    if (!/^#(param|state|q)=/.test(location.hash)) return;
    const asked = new URLSearchParams(location.hash.slice(1).replaceAll('+', '%2B'));
    if (kinds.includes(asked.get('state'))) view.kind = kinds.indexOf(asked.get('state'));
    searchFor(asked.get('q') || '');
    if (!asked.has('param')) return;
    const name = asked.get('param');
    const known = columns.name.findIndex((one, p) => one === name || aliasesOf(p).includes(name));
    if (known >= 0) openDetail(known);
    else announce(`This checkpoint has no parameter ${name}`);
  }
  return { update, follow };
})();

/** Open the parameter after or before the open one, in the order of the map. */
function stepDetail(move) {
  const at = view.shown.indexOf(view.open);
  const next = view.shown[at < 0 ? 0 : at + move];
  if (next !== undefined) openDetail(next);
}

byId('source-name').textContent = facts.source.replace(/\/+$/, '').split('/').pop() || facts.source;
byId('source-name').title = facts.source;
byId('foot').textContent = `Written by ucp ${facts.version}. This page is self-contained: it loads nothing and sends nothing.`;
drawFilters();
drawHelp();
drawOverview();
drawDamage();
drawComparison();
drawChecks();
drawRanks();
partitionMap.start();
drawSizes();
drawParameters();
for (const anchor of document.querySelectorAll('.top nav a')) anchor.hidden = byId(anchor.hash.slice(1)).hidden;

let pause = 0;
searchBox.addEventListener('input', () => { clearTimeout(pause); pause = setTimeout(() => search(searchBox.value), total > 3000 ? 120 : 0); });
searchBox.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') { searchFor(''); searchBox.blur(); }
  if (event.key === 'Enter' && view.shown.length) openDetail(view.shown[0]);
});
document.addEventListener('keydown', (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || byId('help').open) return;
  const act = { '/': () => { searchBox.focus(); searchBox.select(); }, '?': () => byId('help').showModal(), t: theme.next, Escape: closeDetail,
    j: () => stepDetail(1), k: () => stepDetail(-1) }[event.key];
  if (act) { event.preventDefault(); act(); }
});
listeners.push(() => {
  const found = byId('search-count');
  found.textContent = view.complaints.length ? 'unknown filter' : view.query.trim() ? `${countText(view.shown.length)} of ${countText(total)}` : '';
  found.title = view.complaints.join(' ');
  if (view.complaints.length) announce(view.complaints.join(' '));
});
const fitPanel = () => document.documentElement.style.setProperty('--top', `${document.querySelector('.top').offsetHeight}px`);
redraws.push(fitPanel);
later(fitPanel);
search('');
link.follow();  // before anything changes the address
listeners.push(link.update);
window.addEventListener('hashchange', link.follow);
requestAnimationFrame(() => requestAnimationFrame(() => {  // after the first frame was drawn
  performance.mark('ready');
  document.documentElement.dataset.ready = 'yes';
}));
