// All parameters in a table, of which only the visible rows exist, with statistics of the chosen state.

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

const parameterTable = (() => {
  const ROW = 34;
  const rows = make('div', { className: 'rows', attributes: { role: 'rowgroup' } });
  const title = make('div', { className: 'line title', attributes: { role: 'row' } });
  const pane = make('div', { className: 'pane grid', tabIndex: 0, attributes: { role: 'grid', 'aria-label': 'Parameters' } }, title, rows);
  const empty = make('p', { className: 'empty', textContent: 'No parameter matches the search.', hidden: true });
  let sorted = { by: null, down: false };
  let order = [];
  let cursor = -1;

  const odd = (p) => (statistic(p, view.kind, 'nan') || 0) + (statistic(p, view.kind, 'infinite') || 0);
  const measuredColumns = facts.statistics ? [
    ...[['Norm', 'norm'], ['Min', 'low'], ['Max', 'high'], ['Mean', 'mean'], ['Std', 'deviation']].map(([head, key]) => ({
      head, width: '74px', number: true, value: (p) => statistic(p, view.kind, key), text: (p) => numberText(statistic(p, view.kind, key)) })),
    { head: 'NaN/Inf', width: '58px', number: true, value: odd, text: (p) => (odd(p) ? countText(odd(p)) : statistic(p, view.kind, 'nan') === null ? '–' : '0'), alarm: odd },
    { head: 'Histogram', width: '112px', drawing: true },
  ] : [];
  const shownColumns = [
    { head: 'Parameter', width: 'minmax(270px, 3fr)', mono: true, value: (p) => columns.name[p], text: (p) => columns.name[p] },
    { head: 'Shape', width: 'minmax(104px, .7fr)', value: (p) => elementsOf(shapeOf(p)), text: (p) => shapeText(shapeOf(p)) },
    { head: 'Rule', width: 'minmax(88px, .8fr)', value: (p) => columns.rules[columns.rule[p]], text: (p) => columns.rules[columns.rule[p]] },
    { head: 'Role', width: '64px', value: (p) => columns.role[p], text: (p) => ROLES[columns.role[p]] },
    { head: 'Bytes', width: '78px', number: true, value: bytesOf, text: (p) => bytesText(bytesOf(p)) },
    ...measuredColumns,
  ];
  const template = shownColumns.map((column) => column.width).join(' ');
  rows.style.minWidth = title.style.minWidth = facts.statistics ? '1270px' : '720px';

  function sort() {
    order = [...view.shown];
    if (!sorted.by) return;
    const { value } = sorted.by;
    const keys = new Map(order.map((p) => [p, value(p)]));
    const sign = sorted.down ? -1 : 1;
    order.sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;  // missing values come last
      return x < y ? -sign : x > y ? sign : a - b;
    });
  }

  function row(parameter, number) {
    const line = make('div', { className: 'line', attributes: { role: 'row', 'aria-rowindex': number + 2, 'aria-selected': String(parameter === view.open) },
      onclick: () => { cursor = number; openDetail(parameter); } });
    line.style.top = `${number * ROW}px`;
    line.style.gridTemplateColumns = template;
    for (const column of shownColumns) {
      const cell = make('span', { className: [column.mono ? 'mono' : '', column.number ? 'number' : '', column.alarm && column.alarm(parameter) ? 'alarm' : ''].join(' '), attributes: { role: 'gridcell' } });
      if (column.drawing) {
        const state = stateOf(parameter, view.kind);
        if (state && Array.isArray(state.measured)) {
          const canvas = make('canvas', { attributes: { 'aria-hidden': 'true' } });
          drawHistogram(prepare(canvas, 112, 24), state.measured, 112, 24, kindColor(view.kind));
          cell.append(canvas);
        }
      } else {
        cell.textContent = column.text(parameter);
        cell.title = cell.textContent;
      }
      line.append(cell);
    }
    return line;
  }

  function draw() {
    pane.hidden = !order.length;
    empty.hidden = !!order.length;
    rows.style.height = `${order.length * ROW}px`;
    pane.setAttribute('aria-rowcount', order.length + 1);
    const first = Math.max(0, Math.floor(pane.scrollTop / ROW) - 4);
    const last = Math.min(order.length, Math.ceil((pane.scrollTop + pane.clientHeight) / ROW) + 4);
    rows.replaceChildren(...order.slice(first, last).map((parameter, i) => row(parameter, first + i)));
  }

  function heads() {
    title.style.gridTemplateColumns = template;
    title.replaceChildren(...shownColumns.map((column) => {
      const cell = make('span', { className: column.number ? 'number' : '', attributes: { role: 'columnheader' } });
      if (column.drawing) { cell.textContent = column.head; return cell; }
      if (sorted.by === column) cell.setAttribute('aria-sort', sorted.down ? 'descending' : 'ascending');
      cell.append(make('button', { type: 'button', textContent: column.head, onclick: () => {
        // Numbers are sorted from the largest, names from the first; a third click restores the order of the model.
        const begins = !!column.number;
        sorted = sorted.by !== column ? { by: column, down: begins } : sorted.down === begins ? { by: column, down: !begins } : { by: null, down: false };
        refresh();
      } }));
      return cell;
    }));
  }

  function refresh() { heads(); sort(); pane.scrollTop = 0; cursor = -1; later(draw); }

  function step(event) {
    if (event.target !== pane) return;
    const move = { ArrowUp: -1, ArrowDown: 1, PageUp: -15, PageDown: 15 }[event.key];
    if (event.key === 'Enter' && cursor >= 0) openDetail(order[cursor]);
    if (!move || !order.length) return;
    event.preventDefault();
    cursor = Math.max(0, Math.min(order.length - 1, cursor + move));
    const room = pane.clientHeight - ROW;
    if (cursor * ROW < pane.scrollTop) pane.scrollTop = cursor * ROW;
    if ((cursor + 1) * ROW > pane.scrollTop + room) pane.scrollTop = (cursor + 1) * ROW - room;
    openDetail(order[cursor]);
    announce(columns.name[order[cursor]]);
  }

  function start() {
    if (!total) { byId('parameters').hidden = true; return; }
    byId('parameters-controls').append(stateChooser('table-state'));
    const sampled = facts.sampled ? ` Measured on a sample of about ${countText(facts.sampled)} elements of each state.` : '';
    byId('parameters-lead').textContent = facts.statistics
      ? `Statistics of the chosen state. Histograms count magnitudes on both sides of zero, two bars per power of two.${sampled}`
      : 'Statistics were not measured (--quick or --no-stats).';
    byId('parameters-body').append(pane, empty);
    pane.addEventListener('scroll', () => later(draw));
    pane.addEventListener('keydown', step);
    listeners.push(refresh);
    redraws.push(draw);
  }
  return { start, draw: () => later(draw) };
})();
