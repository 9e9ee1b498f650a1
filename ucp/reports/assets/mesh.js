// The mesh: one cell per rank, darker if it holds more bytes; lost ranks red, ranks with findings with a dot.

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
  if (ranks.length === 1 && !lostRanks.size) return;
  const swatch = (className) => make('span', { className: `swatch ${className}` });
  byId('ranks-legend').append(make('span', {}, swatch('few'), swatch('half'), swatch('many'), 'bytes'));
  if (lostRanks.size) byId('ranks-legend').append(make('span', {}, swatch('lost'), 'lost'));
  if ([...findingsOfRank.values()].some((some) => worst(some) !== 'note')) byId('ranks-legend').append(make('span', {}, swatch('dot'), 'has findings'));
  const stages = new Map();
  ranks.forEach(([pp], rank) => addTo(stages, pp, rank));
  const holder = make('div', { className: 'stages' });
  for (const [pp, members] of stages) {
    const canvas = make('canvas', { tabIndex: 0, attributes: { role: 'img', 'aria-label': `Pipeline stage ${pp}: ${members.length} ranks. Arrow keys move from rank to rank, Enter shows its parameters.` } });
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
  const LEFT = 34;  // of the cells: room for the tensor-parallel ranks
  const TOP = 18;  // of each band of cells: room for the data-parallel ranks
  let [cell, across, cursor] = [12, 1, members[0]];

  const place = (rank) => {
    const [, tp, dp] = ranks[rank];
    return [LEFT + (dp % across) * cell, Math.floor(dp / across) * (tps * cell + TOP) + TOP + tp * cell];
  };
  const find = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - LEFT, event.clientY - box.top];
    const band = Math.floor(y / (tps * cell + TOP));
    const [column, row] = [Math.floor(x / cell), Math.floor((y - band * (tps * cell + TOP) - TOP) / cell)];
    return x < 0 || row < 0 || column >= across ? undefined : at.get((band * across + column) * tps + row);
  };
  const describe = (rank) => [
    ...(lostRanks.has(rank) ? [`lost: ${lostRanks.get(rank).map((name) => name.split('/').pop()).join(', ')}`] : []),
    `rank ${rank} ${lostRanks.has(rank) ? 'held' : 'holds'} ${bytesText(bytes[rank])}`,
    ...kinds.map((kind, k) => [kind, facts.held[k][rank]]).filter(([, n]) => n).map(([kind, n]) => `${kind} ${bytesText(n)}`),
    ...(findingsOfRank.get(rank) || []).slice(0, 3).map((finding) => `${finding.check}: ${finding.message.slice(0, 120)}`)];
  const point = (rank, x, y) => { cursor = rank; showTip(x, y, rankText(rank), describe(rank)); later(draw); };

  function draw() {
    const room = Math.max(240, byId('ranks-body').clientWidth / Math.min(stages, 2) - 24) - LEFT;
    cell = Math.max(8, Math.min(members.length > 64 ? 32 : 48, Math.floor(room / Math.min(dps, 128))));
    across = Math.max(1, Math.min(dps, Math.floor(room / cell)));
    const bands = Math.ceil(dps / across);
    const context = prepare(canvas, LEFT + across * cell, bands * (tps * cell + TOP));
    drawLabels(context, bands);
    const gap = cell >= 16 ? 1.5 : 0.75;
    for (const rank of members) {
      const [x, y] = place(rank);
      const size = cell - 2 * gap;
      if (lostRanks.has(rank)) drawLost(context, x + gap, y + gap, size, size);
      else {
        context.globalAlpha = bytes[rank] ? 0.15 + 0.85 * Math.sqrt(bytes[rank] / most) : 1;
        context.fillStyle = bytes[rank] ? color('bar') : color('empty');
        context.beginPath();
        context.roundRect(x + gap, y + gap, size, size, cell >= 20 ? 4 : 1);
        context.fill();
        context.globalAlpha = 1;
      }
      const found = worst(findingsOfRank.get(rank));
      if (found && found !== 'note' && !lostRanks.has(rank)) drawDot(context, x + cell - gap, y + gap, Math.max(2.5, cell / 7), found);
    }
    if (document.activeElement === canvas || !tip.hidden) {
      const [x, y] = place(cursor);
      context.strokeStyle = color('hover');
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
    }
  }

  function drawDot(context, x, y, radius, severity) {
    context.beginPath();
    context.arc(x - radius, y + radius, radius, 0, 7);
    context.fillStyle = color(MARK_COLORS[severity]);
    context.strokeStyle = color('card');
    context.lineWidth = 1.5;
    context.fill();
    context.stroke();
  }

  function drawLabels(context, bands) {
    context.fillStyle = color('muted');
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'middle';
    const every = [1, 2, 4, 8, 16, 32, 64].find((n) => n * cell >= 30) || 64;
    for (let band = 0; band < bands; band += 1) {
      const top = band * (tps * cell + TOP);
      context.textAlign = 'left';
      context.fillText('dp', 4, top + TOP / 2);
      for (let dp = band * across; dp < Math.min(dps, (band + 1) * across); dp += 1) {
        if ((dp - band * across) % every) continue;
        context.textAlign = every === 1 ? 'center' : 'left';
        context.fillText(dp, LEFT + (dp % across) * cell + (every === 1 ? cell / 2 : 1), top + TOP / 2);
      }
      context.textAlign = 'right';
      for (let tp = 0; tp < tps && tps > 1; tp += 1) {
        if (cell >= 12 || tp === 0) context.fillText(tp === 0 ? `tp ${tp}` : tp, LEFT - 5, top + TOP + (tp + 0.5) * cell);
      }
    }
  }

  const pick = (rank) => searchFor(`rank:${rank}`, 'map');
  const leave = () => { hideTip(); later(draw); };
  canvas.addEventListener('pointermove', (event) => { const rank = find(event); if (rank === undefined) leave(); else point(rank, event.clientX, event.clientY); });
  canvas.addEventListener('pointerleave', leave);
  canvas.addEventListener('blur', leave);
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
