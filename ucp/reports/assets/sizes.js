// Bytes by layer and state, as a table with bars in it.

function drawSizes() {
  if (!total) { byId('sizes').hidden = true; return; }
  const layers = columns.layers.map(() => ({ parameters: 0, elements: 0, bytes: kinds.map(() => 0) }));
  for (let parameter = 0; parameter < total; parameter += 1) {
    const layer = layers[columns.layer[parameter]];
    layer.parameters += 1;
    layer.elements += elementsOf(shapeOf(parameter));
    kinds.forEach((_, kind) => {
      const state = stateOf(parameter, kind);
      if (state) layer.bytes[kind] += state.bytes;
    });
  }
  const sums = layers.map((layer) => layer.bytes.reduce((sum, n) => sum + n, 0));
  const most = Math.max(1, ...sums);
  const all = kinds.map((_, kind) => layers.reduce((sum, layer) => sum + layer.bytes[kind], 0));
  byId('sizes-legend').append(...kinds.map((kind, number) => {
    const swatch = make('span', { className: 'swatch' });
    swatch.style.background = `var(--k${number % 8})`;
    return make('span', {}, swatch, `${kind} ${bytesText(all[number])}`);
  }));
  const head = ['Layer', 'Tensors', 'Elements', 'Bytes', ''].map((title, i) => make('th', { textContent: title, scope: 'col', className: i && i < 4 ? 'number' : '' }));
  const rows = layers.map((layer, number) => {
    const stack = make('div', { className: 'stack' });
    stack.style.width = `${(100 * sums[number]) / most}%`;
    const words = kinds.map((kind, k) => `${kind} ${bytesText(layer.bytes[k])}`).filter((_, k) => layer.bytes[k]);
    stack.append(...layer.bytes.map((bytes, kind) => {
      const part = make('span');
      part.style.cssText = `width:${(100 * bytes) / Math.max(1, sums[number])}%;background:var(--k${kind % 8})`;
      return part;
    }));
    const name = make('button', { className: 'link mono', type: 'button', textContent: columns.layers[number],
      onclick: () => { byId('search').value = `${columns.layers[number]}.`; search(`${columns.layers[number]}.`); byId('parameters').scrollIntoView(); } });
    const row = make('tr', {}, make('td', {}, name), make('td', { className: 'number', textContent: countText(layer.parameters) }),
      make('td', { className: 'number', textContent: bigText(layer.elements) }), make('td', { className: 'number', textContent: bytesText(sums[number]) }),
      make('td', { className: 'bar' }, stack, make('span', { className: 'hidden', textContent: words.join(', ') })));
    row.addEventListener('pointermove', (event) => showTip(event.clientX, event.clientY, columns.layers[number], words));
    row.addEventListener('pointerleave', hideTip);
    return row;
  });
  byId('sizes-body').append(make('table', { className: 'sizes' }, make('thead', {}, make('tr', {}, head)), make('tbody', {}, rows)));
}
