// The panel of one parameter: a drawing of its partition, the ranks that hold it, and statistics of its states.

function openDetail(parameter) {
  view.open = parameter;
  const aside = byId('detail');
  const name = columns.name[parameter];
  const close = make('button', { className: 'icon', type: 'button', textContent: '✕', onclick: closeDetail, attributes: { 'aria-label': 'Close' } });
  const command = `ucp inspect ${quoted(facts.source)} --param ${quoted(name)}`;
  const facts_ = [
    ['Shape', shapeText(shapeOf(parameter))],
    ['Role', ROLES[columns.role[parameter]]],
    ['Layer', layerOf(parameter)],
    ['Rule', `${columns.rules[columns.rule[parameter]]} (${columns.origins[columns.origin[parameter]]})`],
    ...(columns.group[parameter] >= 0 ? [['Group', String(columns.group[parameter])]] : []),
    ...(columns.expert[parameter] >= 0 ? [['Expert', String(columns.expert[parameter])]] : []),
    ...(aliasesOf(parameter).length ? [['Also called', aliasesOf(parameter).join(', ')]] : []),
  ];
  aside.replaceChildren(...[
    make('header', {}, make('h2', { id: 'detail-title', textContent: name }), close),
    ...problemsOf(parameter), pairsOf(facts_), comparedStates(parameter),
    pictureOf(parameter), holderTable(parameter),
    make('h3', { textContent: 'States' }), ...kinds.map((_, kind) => stateCard(parameter, kind)).filter(Boolean),
    make('h3', { textContent: 'Byte ranges' }),
    make('div', { className: 'command' }, make('pre', { textContent: command }), copyButton(command, 'Copy the command'))].filter(Boolean));
  aside.hidden = false;
  document.querySelector('main').classList.add('beside');
  aside.scrollTop = 0;
  link.update();
  redraws.forEach(later);
}

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function closeDetail() {
  view.open = -1;
  byId('detail').hidden = true;
  document.querySelector('main').classList.remove('beside');
  link.update();
  redraws.forEach(later);
}

/** What is lost of a parameter, and the findings about it. */
function problemsOf(parameter) {
  const lost = lostStates.get(parameter);
  const found = findingsOf.get(columns.name[parameter]) || [];
  return [
    lost ? make('div', { className: 'problem error' }, make('b', { textContent: 'Lost: ' }),
      lost.map(([kind, n]) => `${countText(n)} of ${countText(stateOf(parameter, kind).elements)} elements of ${kinds[kind]}`).join(', ')) : null,
    ...found.slice(0, 10).map((finding) => make('div', { className: `problem ${finding.severity}` }, make('b', { textContent: `${finding.check}: ` }), finding.message)),
  ].filter(Boolean);
}

/** How the states of a parameter differ from those of the other checkpoint. */
function comparedStates(parameter) {
  if (!facts.comparison) return null;
  const some = differences.get(parameter);
  if (!some) return make('p', { className: 'muted', textContent: 'The same in the other checkpoint.' });
  return make('div', {}, make('h3', { textContent: 'Differences' }), tableOf(['State', 'Differ', 'Max abs', 'Max rel', ''], some.map((one) => [
    kinds[one[1]], shareOf(one) === null ? '–' : percentText(shareOf(one)), numberText(one[D_ABS]), numberText(one[D_REL]), differenceText(one)])));
}

/** The tensor as a rectangle, rows downwards, with a block for each part; pointing at a block shows its ranks. */
function pictureOf(parameter) {
  const state = stateOf(parameter, view.kind);
  if (!state || state.pattern < 0 || !state.elements) return null;
  const shape = state.shape.length > 1 ? [state.shape[0], elementsOf(state.shape.slice(1))] : [1, state.elements];
  const rest = state.shape.slice(1);
  const flat = (index, sizes) => index.reduce((at, i, d) => at * sizes[d] + i, 0);
  const blocks = [];
  for (const fragment of fragmentsOf(state.pattern)) {
    const position = positionOf(fragment, state.shape);
    for (const piece of piecesOf(fragment)) {
      const columnsOf = state.shape.length > 1
        ? [flat(piece.start.slice(1), rest), flat(piece.start.slice(1).map((a, d) => a + piece.shape[d + 1] - 1), rest) + 1]
        : [piece.start[0] || 0, (piece.start[0] || 0) + (piece.shape[0] ?? 1)];
      const [top, high] = state.shape.length > 1 ? [piece.start[0], piece.shape[0]] : [0, 1];
      blocks.push({ fragment, position, left: columnsOf[0] / shape[1], right: Math.min(1, columnsOf[1] / shape[1]), top: top / shape[0], bottom: Math.min(1, (top + high) / shape[0]) });
    }
  }
  const canvas = make('canvas', { className: 'picture', attributes: { role: 'img', 'aria-label': `How ${kinds[view.kind]} is split over ranks; the table below has the same information` } });
  const draw = () => {
    if (!canvas.isConnected) return;
    const [width, height] = [canvas.parentElement.clientWidth, state.shape.length > 1 ? 220 : 48];
    const context = prepare(canvas, width, height);
    for (const block of blocks.filter(({ fragment }) => fragment.cover === 0)) {
      const [x, y] = [block.left * width, block.top * height];
      const [w, h] = [Math.max(1, (block.right - block.left) * width), Math.max(1, (block.bottom - block.top) * height)];
      context.fillStyle = block.position < 0 ? color('whole') : rampColor(block.position);
      if (lostFiles.has(block.fragment.file)) drawLost(context, x, y, w, h);
      else context.fillRect(x, y, w, h);
      if (w > 5 && h > 5) { context.strokeStyle = color('card'); context.lineWidth = 1; context.strokeRect(x, y, w, h); }
    }
  };
  canvas.addEventListener('pointermove', (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const here = blocks.filter((block) => x >= block.left && x < block.right && y >= block.top && y < block.bottom);
    if (!here.length) { hideTip(); return; }
    const lines = here.slice(0, 8).map(({ fragment }) => `rank ${fragment.rank} · ${rankText(fragment.rank)}${fragment.cover ? ' (copy)' : ''}`);
    showTip(event.clientX, event.clientY, regionText(here[0].fragment), [...lines, ...(here.length > 8 ? [`and ${here.length - 8} more`] : [])]);
  });
  canvas.addEventListener('pointerleave', hideTip);
  later(draw);
  return make('div', {}, make('h3', { textContent: `How ${kinds[view.kind]} is split` }), canvas);
}

function holderTable(parameter) {
  const state = stateOf(parameter, view.kind);
  if (!state) return make('p', { className: 'muted', textContent: `It has no ${kinds[view.kind]}.` });
  if (state.pattern < 0) return make('p', { className: 'alarm', textContent: (facts.unplaced.find(([p, kind]) => p === parameter && kind === kinds[view.kind]) || [])[2] });
  const all = [...fragmentsOf(state.pattern)];
  const rows = all.slice(0, 64).map((fragment) => make('tr', {}, make('td', { textContent: fragment.rank }), make('td', { textContent: rankText(fragment.rank) }),
    make('td', { className: lostFiles.has(fragment.file) ? 'mono alarm' : 'mono', textContent: regionText(fragment) + (fragment.cover ? ' (copy)' : '') + (lostFiles.has(fragment.file) ? ' (lost)' : ''), title: facts.partition.files[fragment.file] })));
  const head = ['Rank', '', 'Holds'].map((text) => make('th', { textContent: text, scope: 'col' }));
  return make('details', { open: all.length <= 16 }, make('summary', { textContent: `Held in ${countText(all.length)} piece${all.length > 1 ? 's' : ''}` }),
    make('table', {}, make('thead', {}, make('tr', {}, head)), make('tbody', {}, rows)),
    all.length > 64 ? make('p', { className: 'muted', textContent: `and ${countText(all.length - 64)} more` }) : null);
}

function stateCard(parameter, kind) {
  const state = stateOf(parameter, kind);
  if (!state) return null;
  const card = make('div', { className: 'state' }, make('b', { textContent: kinds[kind] }), make('span', { className: 'muted', textContent: ` ${state.dtype} · ${shapeText(state.shape)} · ${bytesText(state.bytes)}` }));
  if (typeof state.measured === 'string') card.append(make('p', { className: 'alarm', textContent: state.measured }));
  if (!Array.isArray(state.measured)) return card;
  const [norm, low, high, mean, deviation, nan, infinite, zeros, first, below] = state.measured;
  const shown = [['norm', numberText(norm)], ['min', numberText(low)], ['max', numberText(high)], ['mean', numberText(mean)], ['std', numberText(deviation)],
    ['zeros', countText(zeros)], ['NaN', countText(nan)], ['infinite', countText(infinite)]];
  card.append(make('dl', { className: 'few' }, shown.map(([key, value]) => make('div', {}, make('dt', { textContent: key }),
    make('dd', { textContent: value, className: (key === 'NaN' && nan) || (key === 'infinite' && infinite) ? 'alarm' : '' })))));
  if (below.length) {
    const canvas = make('canvas', { className: 'histogram', attributes: { role: 'img', 'aria-label': `Histogram of magnitudes of ${kinds[kind]}` } });
    later(() => { if (canvas.isConnected) { const width = canvas.parentElement.clientWidth - 24; drawHistogram(prepare(canvas, width, 84), state.measured, width, 84, kindColor(kind)); } });
    const edge = (bin) => numberText(2 ** (Math.floor(bin / 2) - 127) * (bin % 2 ? 1.5 : 1));
    const { left, right } = sidesOf(state.measured);
    const [small, large] = [edge(first), edge(first + below.length)];
    const labels = left && right ? [`−${large}`, `±${small}`, large] : right ? [small, large] : [`−${large}`, `−${small}`];
    card.append(canvas, make('div', { className: 'axis' }, labels.map((textContent) => make('span', { textContent }))));
  }
  return card;
}
