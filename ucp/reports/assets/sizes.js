// Bytes by layer and state, as a table with bars in it.

function drawSizes() {
  if (!total) { byId('sizes').hidden = true; return; }
  const layers = columns.layers.map((name, number) => ({ name, number, parameters: 0, elements: 0, sum: 0, bytes: kinds.map(() => 0) }));
  for (let parameter = 0; parameter < total; parameter += 1) {
    const layer = layers[columns.layer[parameter]];
    layer.parameters += 1;
    layer.elements += elementsOf(shapeOf(parameter));
    kinds.forEach((_, kind) => {
      const state = stateOf(parameter, kind);
      if (state) { layer.bytes[kind] += state.bytes; layer.sum += state.bytes; }
    });
  }
  const most = layers.reduce((top, layer) => Math.max(top, layer.sum), 1);
  const all = kinds.map((_, kind) => layers.reduce((sum, layer) => sum + layer.bytes[kind], 0));
  byId('sizes-legend').append(...kinds.map((kind, number) => {
    const swatch = make('span', { className: 'swatch' });
    swatch.style.background = `var(--k${number % 8})`;
    return make('span', {}, swatch, `${kind} ${bytesText(all[number])}`);
  }));
  const words = (layer) => kinds.map((kind, k) => `${kind} ${bytesText(layer.bytes[k])}`).filter((_, k) => layer.bytes[k]);
  const bar = (layer) => {
    const stack = make('div', { className: 'stack', attributes: { role: 'img', 'aria-label': words(layer).join(', ') } });
    stack.style.width = `${(100 * layer.sum) / most}%`;
    stack.append(...layer.bytes.map((bytes, kind) => {
      const part = make('span');
      part.style.cssText = `width:${(100 * bytes) / Math.max(1, layer.sum)}%;background:var(--k${kind % 8})`;
      return part;
    }));
    return stack;
  };
  const table = virtualTable({
    label: 'Sizes by layer',
    open: (layer) => searchFor(`${layer.name}.`, 'parameters'),
    onHover: (layer, x, y) => showTip(x, y, layer.name, words(layer)),
    shownColumns: [
      { head: 'Layer', width: 'minmax(120px, 1.2fr)', mono: true, narrow: true, value: (layer) => layer.number, text: (layer) => layer.name },
      { head: 'Tensors', width: '64px', number: true, value: (layer) => layer.parameters, text: (layer) => countText(layer.parameters) },
      { head: 'Elements', width: '78px', number: true, value: (layer) => layer.elements, text: (layer) => bigText(layer.elements) },
      { head: 'Bytes', width: '78px', number: true, narrow: true, value: (layer) => layer.sum, text: (layer) => bytesText(layer.sum) },
      { head: '', width: 'minmax(90px, 3fr)', narrow: true, node: bar },
    ],
  });
  byId('sizes-body').append(...table.nodes);
  table.show(layers);
}
