// The partition map: one row per parameter, one column per rank, coloured by the position of the rank's part in the tensor.

/** A list to choose the kind of state; all such lists show the same choice. */
function stateChooser(id) {
  const chooser = make('select', { id, onchange: () => { view.kind = Number(chooser.value); search(view.query); } },
    kinds.map((kind, number) => make('option', { value: number, textContent: kind })));
  listeners.push(() => { chooser.value = String(view.kind); });
  return make('label', { htmlFor: id }, 'State', chooser);
}

const partitionMap = (() => {
  const ROW = 18;
  const BAND = 17;  // height of one axis in the header
  // Every axis with several ranks has a band in the header, the slowest on top.
  const axes = [['pp', (rank) => ranks[rank][0]], ['dp', (rank) => ranks[rank][2]], ['ep', (rank) => facts.partition.experts[rank]], ['tp', (rank) => ranks[rank][1]]]
    .filter(([, of]) => new Set(ranks.map((_, rank) => of(rank))).size > 1);
  const HEAD = BAND * Math.max(1, axes.length) + 3;
  const canvas = make('canvas', { tabIndex: 0, attributes: { role: 'img', 'aria-label': 'Partition map. Arrow keys move over parameters and ranks, Enter opens the parameter.' } });
  const spacer = make('div', {}, canvas);
  const pane = make('div', { className: 'pane' }, spacer);
  const empty = make('p', { className: 'empty', hidden: true });
  const hover = { row: -1, rank: -1 };
  let zoom = 0;  // pixels per rank; 0 fits all ranks into the width

  const gutter = () => Math.round(Math.min(340, Math.max(150, pane.clientWidth * 0.28)));
  const columnWidth = () => zoom || Math.min(280, (pane.clientWidth - gutter()) / Math.max(1, ranks.length));

  function measure() {
    spacer.style.height = `${HEAD + view.shown.length * ROW}px`;
    spacer.style.width = zoom ? `${gutter() + ranks.length * zoom}px` : '100%';
  }

  function draw() {
    if (!ranks.length) return;
    pane.hidden = !view.shown.length;
    empty.hidden = !!view.shown.length;
    empty.textContent = emptyText();
    if (pane.hidden) return;
    measure();
    const [width, height] = [pane.clientWidth, Math.min(pane.clientHeight, HEAD + view.shown.length * ROW)];
    const context = prepare(canvas, width, height);
    const [left, column] = [gutter(), columnWidth()];
    const first = Math.max(0, Math.floor(pane.scrollLeft / column));
    const last = Math.min(ranks.length - 1, Math.ceil((pane.scrollLeft + width - left) / column));
    const toX = (rank) => left + rank * column - pane.scrollLeft;
    const begin = Math.floor(pane.scrollTop / ROW);
    const end = Math.min(view.shown.length, Math.ceil((pane.scrollTop + height - HEAD) / ROW) + 1);
    context.save();
    context.beginPath();
    context.rect(left, HEAD, width - left, height - HEAD);
    context.clip();
    for (let row = begin; row < end; row += 1) {
      drawRow(context, view.shown[row], HEAD + row * ROW - pane.scrollTop, first, last, toX, column);
    }
    drawCursor(context, toX, column, width, height);
    context.restore();
    drawNames(context, begin, end, left, height);
    drawHead(context, first, last, toX, column, left, width);
  }

  function drawRow(context, parameter, y, first, last, toX, column) {
    const state = stateOf(parameter, view.kind);
    const gap = column >= 6 ? 1 : 0;
    context.fillStyle = color('empty');
    if (!state || state.pattern < 0) {
      context.fillRect(toX(first), y + ROW / 2 - 0.5, (last - first + 1) * column, 1);
      return;
    }
    context.fillRect(toX(first), y + 1, (last - first + 1) * column, ROW - 2);
    const lost = [];
    for (const [rank, fragments] of holdersOf(state.pattern)) {
      if (rank < first || rank > last) continue;
      // On whole pixels, so that neighbours leave no seam.
      const x = Math.round(toX(rank));
      const wide = Math.max(1, Math.round(toX(rank + 1)) - x - gap);
      if (lostFiles.size && fragments.some((fragment) => lostFiles.has(fragment.file))) {
        lost.push([x, wide]);
        continue;
      }
      const position = positionOf(fragments[0], state.shape);
      context.fillStyle = position < 0 ? color('whole') : rampColor(position);
      context.fillRect(x, y + 1, wide, ROW - 2);
    }
    for (const [x, wide] of lost) drawLost(context, x - (wide < 4 ? 1 : 0), y + 1, Math.max(wide, 4), ROW - 2);  // over narrow neighbours
    for (const finding of findingsOf.get(columns.name[parameter]) || []) drawFinding(context, finding, y, toX, column);
  }

  /** A triangle in the cell of the rank that a finding names. */
  function drawFinding(context, finding, y, toX, column) {
    const at = finding.rank;
    if (!at || finding.severity === 'note') return;
    const rank = ranks.findIndex(([pp, tp, dp]) => pp === at.pp && tp === at.tp && dp === at.dp);
    if (rank < 0) return;
    const right = toX(rank) + Math.max(column, 6);
    context.beginPath();
    context.moveTo(right - 8, y + 1);
    context.lineTo(right, y + 1);
    context.lineTo(right, y + 9);
    context.closePath();
    context.fillStyle = color(MARK_COLORS[finding.severity]);
    context.strokeStyle = color('card');
    context.lineWidth = 1;
    context.fill();
    context.stroke();
  }

  function drawCursor(context, toX, column, width, height) {
    if (hover.row < 0) return;
    const y = HEAD + hover.row * ROW - pane.scrollTop;
    context.strokeStyle = color('hover');
    context.lineWidth = 1.5;
    context.strokeRect(toX(hover.rank) - 0.75, y + 0.25, Math.max(3, column) + 0.5, ROW - 0.5);
    context.globalAlpha = 0.25;
    context.fillStyle = color('hover');
    context.fillRect(toX(hover.rank) + column / 2 - 0.5, HEAD, 1, Math.max(0, y - HEAD));
    context.globalAlpha = 1;
  }

  function drawNames(context, begin, end, left, height) {
    context.fillStyle = color('card');
    context.fillRect(0, 0, left, height);
    context.font = `12px ${color('mono')}`;
    context.textBaseline = 'middle';
    context.textAlign = 'left';
    for (let row = begin; row < end; row += 1) {
      const y = HEAD + row * ROW - pane.scrollTop;
      if (y + ROW < HEAD) continue;
      if (row === hover.row || view.shown[row] === view.open) {
        context.fillStyle = color(view.shown[row] === view.open ? 'accent-soft' : 'sunk');
        context.fillRect(0, y, left, ROW);
      }
      const mark = markOf(view.shown[row]);
      if (mark) {
        context.beginPath();
        context.arc(8, y + ROW / 2, 3.5, 0, 7);
        context.fillStyle = color(MARK_COLORS[mark]);
        context.fill();
      }
      context.fillStyle = color('text');
      context.fillText(fitted(context, columns.name[view.shown[row]], left - 22), 16, y + ROW / 2 + 0.5);
    }
  }

  /** The end of a name, which says more than its start. */
  function fitted(context, name, width) {
    if (context.measureText(name).width <= width) return name;
    const letters = Math.max(4, Math.floor(width / context.measureText('m').width) - 1);
    return `…${name.slice(-letters)}`;
  }

  function drawHead(context, first, last, toX, column, left, width) {
    context.fillStyle = color('card');
    context.fillRect(0, 0, width, HEAD);
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'middle';
    context.textAlign = 'left';
    context.fillStyle = color('muted');
    context.fillText(plural(view.shown.length, 'parameter'), 8, BAND / 2 + 1);
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, HEAD);
    context.clip();
    axes.forEach(([, of], band) => drawBand(context, of, band, first, last, toX, column, left));
    if (!axes.length) context.fillText('rank 0', left + 4, BAND / 2 + 1);
    for (const rank of lostRanks.keys()) {
      context.fillStyle = color('lost');
      if (rank >= first && rank <= last) context.fillRect(Math.round(toX(rank)), HEAD - 4, Math.max(2, column - 1), 3);
    }
    context.restore();
    context.textAlign = 'right';
    context.fillStyle = color('muted');
    axes.forEach(([name], band) => context.fillText(name, left - 6, band * BAND + BAND / 2 + 1));
    context.fillStyle = color('line');
    context.fillRect(0, HEAD - 1, width, 1);
  }

  /** One axis: a box for each run of equal coordinates, with its number if that fits. */
  function drawBand(context, of, band, first, last, toX, column, left) {
    context.textAlign = 'center';
    const labels = [];  // wider than their boxes: drawn over the next ones
    let start = first;
    while (start > 0 && of(start - 1) === of(start)) start -= 1;
    for (let rank = start, odd = 0; rank <= last;) {
      let end = rank + 1;
      while (end < ranks.length && of(end) === of(rank)) end += 1;
      const [x, wide] = [toX(rank), (end - rank) * column];
      odd = Number(of(rank) || 0) % 2;
      if (wide >= 3 || odd) {
        context.fillStyle = color(odd ? 'band' : 'sunk');
        context.fillRect(Math.round(x), band * BAND + 1, Math.max(1, Math.round(wide) - (wide >= 6 ? 1 : 0)), BAND - 2);
      }
      const text = of(rank) === undefined ? '–' : String(of(rank));
      const every = wide >= 2 ? [4, 8, 16, 32, 64].find((n) => n * wide >= 36) : undefined;
      if (wide < context.measureText(text).width + 4 && every && of(rank) % every === 0 && x >= left) {
        labels.push([text, x + 2]);
      } else if (wide >= context.measureText(text).width + 4) {
        const [from, to] = [Math.max(left, x), Math.min(x + wide, pane.clientWidth)];
        context.fillStyle = color('text');
        context.fillText(text, (from + to) / 2, band * BAND + BAND / 2 + 1);
      }
      rank = end;
    }
    context.textAlign = 'left';
    context.fillStyle = color('text');
    for (const [text, x] of labels) context.fillText(text, x, band * BAND + BAND / 2 + 1);
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = Math.floor((y - HEAD + pane.scrollTop) / ROW);
    const rank = Math.floor((x - gutter() + pane.scrollLeft) / columnWidth());
    return { row: y < HEAD || row >= view.shown.length ? -1 : row, rank: x < gutter() || rank >= ranks.length ? -1 : rank };
  }

  function describe(parameter, rank) {
    const state = stateOf(parameter, view.kind);
    if (!state) return [`has no ${kinds[view.kind]}`];
    const held = holdersOf(state.pattern).get(rank) || [];
    if (!held.length) return [`rank ${rank} · ${rankText(rank)}`, `holds nothing of its ${kinds[view.kind]}`];
    const elements = held.reduce((sum, fragment) => sum + fragment.length, 0);
    const share = elements / Math.max(1, state.elements);
    const gone = held.some((fragment) => lostFiles.has(fragment.file));
    const found = (findingsOf.get(columns.name[parameter]) || []).slice(0, 2).map((finding) => `${finding.check}: ${finding.message.slice(0, 160)}`);
    return [`rank ${rank} · ${rankText(rank)}`, ...(gone ? ['lost: its file cannot be read'] : []),
      `${kinds[view.kind]}: ${countText(elements)} of ${countText(state.elements)} elements (${percentText(share)}), ${bytesText((state.bytes / Math.max(1, state.elements)) * elements)}`,
      ...held.slice(0, 3).map((fragment) => `${regionText(fragment)}${fragment.cover ? ' (copy)' : ''}`),
      ...(held.length > 3 ? [`and ${held.length - 3} more pieces`] : []),
      facts.partition.files[held[0].file], ...found];
  }

  function point(place, x, y) {
    Object.assign(hover, place);
    if (place.row < 0) hideTip();
    else if (place.rank < 0) {
      const parameter = view.shown[place.row];
      showTip(x, y, columns.name[parameter], [`${shapeText(shapeOf(parameter))} · ${columns.rules[columns.rule[parameter]]}`, bytesText(bytesOf(parameter))]);
    } else showTip(x, y, columns.name[view.shown[place.row]], describe(view.shown[place.row], place.rank));
    later(draw);
  }

  function leave() { Object.assign(hover, { row: -1, rank: -1 }); hideTip(); later(draw); }

  function step(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-20, 0], PageDown: [20, 0],
      Home: [0, -ranks.length], End: [0, ranks.length] }[event.key];
    if (event.key === 'Enter' && hover.row >= 0) { openDetail(view.shown[hover.row]); event.preventDefault(); }
    if (event.key === 'Escape') leave();
    if (!move || !view.shown.length) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(view.shown.length - 1, hover.row < 0 ? Math.ceil(pane.scrollTop / ROW) : hover.row + move[0]));
    const rank = Math.max(0, Math.min(ranks.length - 1, Math.max(0, hover.rank) + (hover.row < 0 ? 0 : move[1])));
    const top = row * ROW;
    if (top < pane.scrollTop) pane.scrollTop = top;
    if (top + ROW > pane.scrollTop + pane.clientHeight - HEAD) pane.scrollTop = top + ROW - pane.clientHeight + HEAD;
    const x = rank * columnWidth();
    if (x < pane.scrollLeft) pane.scrollLeft = x;
    if (x + columnWidth() > pane.scrollLeft + pane.clientWidth - gutter()) pane.scrollLeft = x + columnWidth() - pane.clientWidth + gutter();
    const box = canvas.getBoundingClientRect();
    point({ row, rank }, box.left + gutter() + x - pane.scrollLeft, box.top + HEAD + top - pane.scrollTop + ROW / 2);
    announce([columns.name[view.shown[row]], ...describe(view.shown[row], rank)].join(', '));
  }

  function start() {
    if (!ranks.length) { byId('map').hidden = true; return; }
    Object.assign(canvas.dataset, { head: HEAD, row: ROW });
    const zooms = [['Fit', 0], ['Wide', 8], ['Wider', 20]];
    const buttons = zooms.map(([title, pixels]) => make('button', {
      type: 'button', textContent: title, attributes: { 'aria-pressed': String(pixels === 0) },
      onclick: () => { zoom = pixels; buttons.forEach((node, i) => node.setAttribute('aria-pressed', String(zooms[i][1] === pixels))); pane.scrollLeft = 0; later(draw); },
    }));
    const ramp = make('span', { className: 'ramp' });
    ramp.style.background = rampGradient();
    const swatch = (name) => { const node = make('span', { className: 'swatch' }); node.style.background = `var(--${name})`; return node; };
    byId('map-controls').append(...[
      make('div', { className: 'legend' }, make('span', {}, 'start', ramp, 'end of the tensor'), make('span', {}, swatch('whole'), 'whole copy'), make('span', {}, swatch('empty'), 'nothing'), lostFiles.size ? make('span', {}, swatch('lost'), 'lost') : null),
      stateChooser('map-state'), ranks.length <= 24 ? null : make('div', { className: 'group', attributes: { role: 'group', 'aria-label': 'Width of a rank' } }, buttons)].filter(Boolean));
    byId('map-lead').textContent = 'Which rank holds which part of which parameter: one row per parameter, one column per rank (tensor-parallel ranks next to each other, then data, then pipeline). Hover, tap or use the arrow keys for details.';
    byId('map-body').append(pane, empty);
    canvas.addEventListener('pointermove', (event) => point(at(event), event.clientX, event.clientY));
    canvas.addEventListener('pointerleave', leave);
    canvas.addEventListener('blur', leave);
    canvas.addEventListener('click', (event) => { const { row } = at(event); if (row >= 0) openDetail(view.shown[row]); });
    canvas.addEventListener('keydown', step);
    pane.addEventListener('scroll', () => later(draw));
    listeners.push(() => { if (pane.scrollTop > view.shown.length * ROW) pane.scrollTop = 0; later(draw); });
    redraws.push(draw);
  }
  return { start };
})();
