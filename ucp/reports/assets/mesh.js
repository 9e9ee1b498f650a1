// The ranks as a grid: one cell per rank, darker if it holds more bytes.

function drawRanks() {
  const body = byId('ranks-body');
  if (!ranks.length) { byId('ranks').hidden = true; return; }
  const bytes = ranks.map((_, rank) => kinds.reduce((sum, __, kind) => sum + facts.held[kind][rank], 0));
  const most = Math.max(1, ...bytes);
  const mean = bytes.reduce((sum, n) => sum + n, 0) / bytes.length;
  const idle = bytes.filter((n) => n === 0).length;
  byId('ranks-lead').textContent = ranks.length === 1 ? `One rank holds everything: ${bytesText(most)}.`
    : `What each rank wrote: ${bytesText(Math.min(...bytes))} to ${bytesText(most)}, ${bytesText(mean)} on average`
      + `${mean ? ` (the largest: ${(most / mean).toFixed(2)} × that)` : ''}${idle ? `; ${countText(idle)} hold nothing` : ''}.`
      + ' Columns are data-parallel ranks, rows tensor-parallel ranks. Click on a rank to see its parameters.';
  if (ranks.length === 1) return;
  const stages = new Map();
  ranks.forEach(([pp], rank) => { if (stages.has(pp)) stages.get(pp).push(rank); else stages.set(pp, [rank]); });
  const holder = make('div', { className: 'stages' });
  for (const [pp, members] of stages) {
    const canvas = make('canvas', { tabIndex: 0, attributes: { role: 'img', 'aria-label': `Pipeline stage ${pp}: ${members.length} ranks. Arrow keys move from rank to rank.` } });
    const block = stageDrawing(canvas, members, bytes, most, stages.size);
    redraws.push(block);
    holder.append(make('div', { className: 'stage' }, stages.size > 1 ? make('h3', { textContent: `Pipeline stage ${pp}` }) : null, canvas));
    later(block);
  }
  body.append(holder);
}

function stageDrawing(canvas, members, bytes, most, stages) {
  const tps = Math.max(...members.map((rank) => ranks[rank][1])) + 1;
  const dps = Math.max(...members.map((rank) => ranks[rank][2])) + 1;
  const at = new Map(members.map((rank) => [ranks[rank][2] * tps + ranks[rank][1], rank]));
  let [cell, across, cursor] = [12, 1, members[0]];

  const place = (rank) => {
    const [, tp, dp] = ranks[rank];
    return [(dp % across) * cell, (Math.floor(dp / across) * (tps + (dps > across && tps > 1 ? 0.5 : 0)) + tp) * cell];
  };
  const find = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    return members.find((rank) => { const [left, top] = place(rank); return x >= left && x < left + cell && y >= top && y < top + cell; });
  };
  const describe = (rank) => [`rank ${rank} holds ${bytesText(bytes[rank])}`,
    ...kinds.map((kind, k) => [kind, facts.held[k][rank]]).filter(([, n]) => n).map(([kind, n]) => `${kind} ${bytesText(n)}`)];
  const point = (rank, x, y) => { cursor = rank; showTip(x, y, rankText(rank), describe(rank)); later(draw); };

  function draw() {
    const room = Math.max(240, byId('ranks-body').clientWidth / Math.min(stages, 2) - 24);
    cell = Math.max(8, Math.min(26, Math.floor(room / Math.min(dps, 144))));
    across = Math.max(1, Math.min(dps, Math.floor(room / cell)));
    const bands = Math.ceil(dps / across);
    const height = (bands * tps + (bands > 1 && tps > 1 ? (bands - 1) * 0.5 : 0)) * cell;
    const context = prepare(canvas, across * cell, height);
    for (const rank of members) {
      const [x, y] = place(rank);
      context.globalAlpha = bytes[rank] ? 0.15 + 0.85 * Math.sqrt(bytes[rank] / most) : 1;
      context.fillStyle = bytes[rank] ? color('bar') : color('empty');
      context.fillRect(x + 0.75, y + 0.75, cell - 1.5, cell - 1.5);
    }
    context.globalAlpha = 1;
    if (at.size && (document.activeElement === canvas || !tip.hidden)) {
      const [x, y] = place(cursor);
      context.strokeStyle = color('hover');
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 0.75, cell - 1.5, cell - 1.5);
    }
  }
  const pick = (rank) => { byId('search').value = `rank:${rank}`; search(`rank:${rank}`); byId('map').scrollIntoView(); };
  canvas.addEventListener('pointermove', (event) => { const rank = find(event); if (rank === undefined) { hideTip(); later(draw); } else point(rank, event.clientX, event.clientY); });
  canvas.addEventListener('pointerleave', () => { hideTip(); later(draw); });
  canvas.addEventListener('blur', () => { hideTip(); later(draw); });
  canvas.addEventListener('click', (event) => { const rank = find(event); if (rank !== undefined) pick(rank); });
  canvas.addEventListener('keydown', (event) => {
    const move = { ArrowLeft: -tps, ArrowRight: tps, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === 'Enter') { pick(cursor); event.preventDefault(); }
    if (!move) return;
    event.preventDefault();
    const next = at.get(ranks[cursor][2] * tps + ranks[cursor][1] + move);
    if (next === undefined) return;
    const box = canvas.getBoundingClientRect();
    const [x, y] = place(next);
    point(next, box.left + x + cell / 2, box.top + y + cell / 2);
    announce([rankText(next), ...describe(next)].join(', '));
  });
  return draw;
}
