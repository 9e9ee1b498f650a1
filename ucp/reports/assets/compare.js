// The differences from another checkpoint.

const [D_ELEMENTS, D_DIFFERING, D_ABS, D_REL, D_ULP, D_NAN, D_FIRST, D_WORST, D_SHAPES, D_DTYPES] = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
const magnitude = (value) => (value === 'inf' || value === 'nan' ? Infinity : value);

/** What else is to be said of a difference than its numbers. */
function differenceText(one) {
  const said = [];
  if (one[D_DIFFERING] === null) said.push(`shape ${shapeText(one[D_SHAPES][0])} here, ${shapeText(one[D_SHAPES][1])} there`);
  if (one[D_DTYPES] && one[D_DTYPES][0] !== one[D_DTYPES][1]) said.push(`${one[D_DTYPES][0]} here, ${one[D_DTYPES][1]} there`);
  if (one[D_NAN]) said.push(`${countText(one[D_NAN])} NaN on one side`);
  if (one[D_FIRST] && one[D_FIRST].length) said.push(`first at [${one[D_FIRST].join(', ')}]`);
  if (one[D_WORST] && one[D_WORST].length) said.push(`largest at [${one[D_WORST].join(', ')}]`);
  return said.join('; ');
}

const shareOf = (one) => (one[D_DIFFERING] === null ? null : one[D_DIFFERING] / Math.max(1, one[D_ELEMENTS]));

function drawComparison() {
  const other = facts.comparison;
  if (!other) return;
  byId('compare').hidden = false;
  const body = byId('compare-body');
  const moved = new Map(other.moved);
  body.append(make('p', { className: 'lead' }, `Compared with ${other.root}: `, make('b', {
    textContent: other.same ? `the same in all ${plural(other.atoms, 'state')}`
      : `${plural(other.differences.length, 'state')} of ${countText(other.atoms)} in ${plural(differences.size, 'parameter')} differ` })));
  const sides = (key, mine, theirs) => [key, mine, theirs];
  body.append(tableOf(['', 'this checkpoint', 'the other'], [
    sides('Format', `${facts.format}, ${facts.framework}`, `${other.format}, ${other.framework}`),
    sides('Mesh', `${countText(facts.world)} ranks: ${meshText(facts.mesh)}`, `${countText(other.world)} ranks: ${meshText(other.mesh)}`),
    sides('Step', facts.step === null ? 'unknown' : countText(facts.step), other.step === null ? 'unknown' : countText(other.step)),
    sides('Parameters', countText(total), countText(other.parameters))]));
  if (other.differences.length) {
    const share = (one) => {
      const node = make('div', { className: 'share' }, make('span'));
      node.firstChild.style.width = `${100 * (shareOf(one) ?? 1)}%`;
      return make('div', { className: 'with-share' }, node, make('span', { textContent: shareOf(one) === null ? 'shape' : percentText(shareOf(one)) }));
    };
    const table = virtualTable({
      label: 'Differences',
      minWidth: 980,
      open: (one) => openDetail(one[0]),
      isOpen: (one) => one[0] === view.open,
      shownColumns: [
        { head: 'Parameter', width: 'minmax(170px, 3fr)', mono: true, narrow: true, value: (one) => columns.name[one[0]], text: (one) => columns.name[one[0]] },
        { head: 'State', width: '90px', value: (one) => kinds[one[1]], text: (one) => kinds[one[1]] },
        { head: 'Elements that differ', width: '160px', value: shareOf, number: true, node: share },
        { head: 'Max abs', width: '78px', number: true, narrow: true, value: (one) => magnitude(one[D_ABS]), text: (one) => numberText(one[D_ABS]) },
        { head: 'Max rel', width: '78px', number: true, value: (one) => magnitude(one[D_REL]), text: (one) => numberText(one[D_REL]) },
        { head: 'Max ulp', width: '84px', number: true, value: (one) => one[D_ULP], text: (one) => (one[D_ULP] === null ? '–' : bigText(one[D_ULP])) },
        { head: '‖Δ‖ / ‖a‖', width: '78px', number: true, value: (one) => magnitude(moved.get(one[0])), text: (one) => numberText(moved.get(one[0])) },
        { head: '', width: 'minmax(140px, 1.5fr)', text: differenceText },
      ],
    });
    body.append(make('h3', { textContent: 'States that differ' }), ...table.nodes);
    table.show(other.differences);
  }
  const lists = [
    ['Only here', other.only_a, ['parameter', 'state']], ['Only there', other.only_b, ['parameter', 'state']],
    ['Settings', other.settings.map(([key, a, b, n]) => [key, a, b, n ? countText(n) : '–']), ['setting', 'here', 'there', 'parameters']],
    ['Other values', other.extras, ['value', 'here', 'there']],
    ['Notes', other.notes.map((note) => [note]), ['']],
  ];
  for (const [name, rows, heads] of lists) {
    if (rows.length) body.append(make('details', {}, make('summary', { textContent: `${name} (${countText(rows.length)})` }), tableOf(heads, rows.slice(0, 500))));
  }
}
