// Tables of any length, of which only the visible rows exist, and histograms.

/** The bars of a histogram: heights from left to right, and whether there are bars left and right of zero. */
function sidesOf(measured) {
  const LEVELS = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_';
  const [, below, above] = measured.slice(STATISTICS.length);
  const [left, right] = [[...below].reverse(), [...above]].map((side) => side.map((letter) => LEVELS.indexOf(letter) / 63));
  const [some, others] = [left.some(Boolean), right.some(Boolean)];
  return { heights: [...(some ? left : []), ...(others ? right : [])], left: some, right: others };
}

/** A histogram of magnitudes on both sides of zero, into the given rectangle. */
function drawHistogram(context, measured, width, height, fill) {
  const { heights, left, right } = sidesOf(measured);
  const bar = width / Math.max(1, heights.length);
  context.fillStyle = color('line-strong');
  context.fillRect(0, height - 1, width, 1);
  context.fillStyle = fill;
  heights.forEach((value, i) => {
    if (value) context.fillRect(i * bar, height - 1 - Math.max(1, value * (height - 2)), Math.max(1, bar - (bar > 4 ? 1 : 0)), Math.max(1, value * (height - 2)));
  });
  if (left && right) { context.fillStyle = color('line-strong'); context.fillRect(width / 2 - 0.5, 0, 1, height); }
}

/**
 * A sortable table. A column has `head`, `width` (of the grid), `value(item)` to sort by and `text(item)` or `node(item)`;
 * `number` aligns it right, `narrow` keeps it on a phone. `open(item)` is called for the row that is clicked.
 */
function virtualTable({ label, shownColumns, open, isOpen = () => false, minWidth = 0, onHover = null }) {
  const ROW = 34;
  const rows = make('div', { className: 'rows', attributes: { role: 'rowgroup' } });
  const title = make('div', { className: 'line title', attributes: { role: 'row' } });
  const pane = make('div', { className: 'pane grid', tabIndex: 0, attributes: { role: 'grid', 'aria-label': label } }, title, rows);
  const empty = make('p', { className: 'empty', hidden: true });
  let sorted = { by: null, down: false };
  let [items, order, cursor, used] = [[], [], -1, shownColumns];

  function sort() {
    order = [...items];
    if (!sorted.by) return;
    const { value } = sorted.by;
    const keys = new Map(order.map((item) => [item, value(item)]));
    const position = new Map(order.map((item, i) => [item, i]));
    const sign = sorted.down ? -1 : 1;
    const missing = (key) => key === null || key === undefined;
    order.sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y) || position.get(a) - position.get(b);  // missing values come last
      return x < y ? -sign : x > y ? sign : position.get(a) - position.get(b);
    });
  }

  function row(item, number) {
    const line = make('div', { className: 'line', attributes: { role: 'row', 'aria-rowindex': number + 2, 'aria-selected': String(isOpen(item)) },
      onclick: () => { cursor = number; open(item); } });
    line.style.top = `${number * ROW}px`;
    line.style.gridTemplateColumns = template();
    if (onHover) {
      line.addEventListener('pointermove', (event) => onHover(item, event.clientX, event.clientY));
      line.addEventListener('pointerleave', hideTip);
    }
    for (const column of used) {
      const cell = make('span', { className: [column.mono ? 'mono' : '', column.number ? 'number' : '', column.alarm && column.alarm(item) ? 'alarm' : ''].join(' '), attributes: { role: 'gridcell' } });
      if (column.node) cell.append(...[column.node(item)].filter(Boolean));
      else {
        cell.textContent = column.text(item);
        cell.title = cell.textContent;
      }
      line.append(cell);
    }
    return line;
  }

  const template = () => used.map((column) => column.width).join(' ');

  function draw() {
    const isNarrow = pane.parentElement && pane.parentElement.clientWidth < 640;
    const wanted = isNarrow ? shownColumns.filter((column) => column.narrow) : shownColumns;
    if (wanted.length !== used.length) { used = wanted; heads(); }
    rows.style.minWidth = title.style.minWidth = isNarrow ? '' : `${minWidth}px`;
    pane.hidden = !order.length;
    empty.hidden = !!order.length;
    rows.style.height = `${order.length * ROW}px`;
    pane.setAttribute('aria-rowcount', order.length + 1);
    const first = Math.max(0, Math.floor(pane.scrollTop / ROW) - 4);
    const last = Math.min(order.length, Math.ceil((pane.scrollTop + pane.clientHeight) / ROW) + 4);
    rows.replaceChildren(...order.slice(first, last).map((item, i) => row(item, first + i)));
  }

  function heads() {
    title.style.gridTemplateColumns = template();
    title.replaceChildren(...used.map((column) => {
      const cell = make('span', { className: column.number ? 'number' : '', attributes: { role: 'columnheader' } });
      if (!column.value) { cell.textContent = column.head; return cell; }
      if (sorted.by === column) cell.setAttribute('aria-sort', sorted.down ? 'descending' : 'ascending');
      cell.append(make('button', { type: 'button', textContent: column.head, onclick: () => {
        // Numbers are sorted from the largest, names from the first; a third click restores the original order.
        const begins = !!column.number;
        sorted = sorted.by !== column ? { by: column, down: begins } : sorted.down === begins ? { by: column, down: !begins } : { by: null, down: false };
        refresh();
      } }));
      return cell;
    }));
  }

  function refresh() { heads(); sort(); pane.scrollTop = 0; cursor = -1; later(draw); }

  pane.addEventListener('scroll', () => later(draw));
  pane.addEventListener('keydown', (event) => {
    if (event.target !== pane) return;
    const move = { ArrowUp: -1, ArrowDown: 1, PageUp: -15, PageDown: 15 }[event.key];
    if (event.key === 'Enter' && cursor >= 0) open(order[cursor]);
    if (!move || !order.length) return;
    event.preventDefault();
    cursor = Math.max(0, Math.min(order.length - 1, cursor + move));
    const room = pane.clientHeight - ROW;
    if (cursor * ROW < pane.scrollTop) pane.scrollTop = cursor * ROW;
    if ((cursor + 1) * ROW > pane.scrollTop + room) pane.scrollTop = (cursor + 1) * ROW - room;
    open(order[cursor]);
    announce(used[0].text(order[cursor]));
  });
  redraws.push(draw);
  return { nodes: [pane, empty], empty, show: (some) => { items = some; refresh(); } };
}

/** All parameters, with statistics of the chosen state. */
function drawParameters() {
  if (!total) { byId('parameters').hidden = true; return; }
  const measured = (name) => (p) => statistic(p, view.kind, name);
  const count = (head, name) => ({ head, width: '52px', number: true, value: measured(name), alarm: measured(name),
    text: (p) => { const n = measured(name)(p); return n === null ? '–' : countText(n); } });
  const histogram = (p) => {
    const state = stateOf(p, view.kind);
    if (!state || !Array.isArray(state.measured)) return null;
    const canvas = make('canvas', { attributes: { 'aria-hidden': 'true' } });
    drawHistogram(prepare(canvas, 112, 24), state.measured, 112, 24, kindColor(view.kind));
    return canvas;
  };
  const mark = (p) => {
    const found = markOf(p);
    return found ? make('span', { className: `dot ${found}`, title: found === 'lost' ? 'lost elements' : found, attributes: { role: 'img', 'aria-label': found } }) : null;
  };
  const isMarked = lostStates.size || findingsOf.size;
  const largest = (p) => (differences.get(p) || []).reduce((most, one) => Math.max(most, one[4] === 'inf' ? Infinity : one[4] || 0), 0);
  const table = virtualTable({
    label: 'Parameters',
    minWidth: facts.statistics ? 1240 : 720,
    open: openDetail,
    isOpen: (p) => p === view.open,
    shownColumns: [
      { head: 'Parameter', width: 'minmax(200px, 3fr)', mono: true, narrow: true, value: (p) => columns.name[p], text: (p) => columns.name[p] },
      ...(isMarked ? [{ head: '', width: '12px', narrow: true, node: mark }] : []),
      { head: 'Shape', width: 'minmax(104px, .7fr)', value: (p) => elementsOf(shapeOf(p)), text: (p) => shapeText(shapeOf(p)) },
      { head: 'Rule', width: 'minmax(88px, .8fr)', value: (p) => columns.rules[columns.rule[p]], text: (p) => columns.rules[columns.rule[p]] },
      { head: 'Role', width: '64px', value: (p) => columns.role[p], text: (p) => ROLES[columns.role[p]] },
      { head: 'Bytes', width: '78px', number: true, narrow: true, value: bytesOf, text: (p) => bytesText(bytesOf(p)) },
      ...(facts.comparison ? [{ head: 'Max diff', width: '74px', number: true, value: largest, text: (p) => (differences.has(p) ? numberText(largest(p)) : '='), alarm: (p) => differences.has(p) }] : []),
      ...(facts.statistics ? [
        ...[['Norm', 'norm'], ['Min', 'low'], ['Max', 'high'], ['Mean', 'mean'], ['Std', 'deviation']].map(([head, name]) => ({
          head, width: '74px', number: true, narrow: name === 'norm', value: measured(name), text: (p) => numberText(measured(name)(p)) })),
        count('NaN', 'nan'), count('Inf', 'infinite'),
        { head: 'Histogram', width: '112px', node: histogram },
      ] : []),
    ],
  });
  byId('parameters-controls').append(stateChooser('table-state'));
  const sampled = facts.sampled ? ` Measured on a sample of about ${countText(facts.sampled)} elements of each state.` : '';
  byId('parameters-lead').textContent = facts.statistics
    ? `Statistics of the chosen state. Histograms count magnitudes on both sides of zero, two bars per power of two.${sampled}`
    : 'Statistics were not measured (--quick or --no-stats).';
  byId('parameters-body').append(...table.nodes);
  listeners.push(() => { table.empty.textContent = emptyText(); table.show(view.shown); });
}
