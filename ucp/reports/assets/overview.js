// The overview, what failed first, the damage, and the findings of the checks.

function tile(title, value, small) {
  return make('div', { className: 'tile' }, make('dt', { textContent: title }),
    make('dd', { textContent: value }, small ? make('small', { textContent: small }) : null));
}

const meshText = (mesh) => `${[['tp', mesh.tp], ['pp', mesh.pp], ['dp', mesh.dp], ['ep', mesh.ep]]
  .filter(([axis, n]) => n > 1 || axis !== 'ep').map(([axis, n]) => `${axis} ${n}`).join(' × ')}, ZeRO ${mesh.zero}`;

const pairsOf = (pairs) => make('dl', { className: 'pairs' }, pairs.map(([key, value]) => [make('dt', { textContent: key }), make('dd', { textContent: value })]));

function tableOf(heads, rows, className = '') {
  return make('div', { className: 'scroll' }, make('table', { className },
    make('thead', {}, make('tr', {}, heads.map((text) => make('th', { textContent: text, scope: 'col' })))),
    make('tbody', {}, rows.map((cells) => make('tr', {}, cells.map((cell) => make('td', {}, cell)))))));
}

function drawOverview() {
  const body = byId('overview-body');
  drawFirstFailure(body);
  if (!facts.totals) {
    body.append(make('p', { className: 'empty', textContent: 'This checkpoint could not be opened. The findings below explain why.' }));
    return;
  }
  const { totals, mesh } = facts;
  const roles = Object.entries(totals.roles).map(([role, count]) => `${countText(count)} ${role}`).join(', ');
  const lost = facts.lost ? facts.lost.files.length : 0;
  body.append(make('dl', { className: 'tiles' },
    tile('Format', facts.format, facts.framework),
    tile('Ranks', countText(facts.world), meshText(mesh)),
    tile('Step', facts.step === null ? 'unknown' : countText(facts.step)),
    tile('Parameters', bigText(totals.elements), `${countText(totals.parameters)} tensors: ${roles}`),
    tile('States', bytesText(totals.bytes), kinds.join(', ')),
    tile('Files', countText(totals.files), `${bytesText(totals.file_bytes)}${lost ? `, ${countText(lost)} lost` : ''}`)));
  body.append(make('details', {}, make('summary', { textContent: 'Details' }),
    pairsOf([['source', facts.source], ...facts.details, ...facts.notes.map((note) => ['note', note])])));
  if (facts.groups.length) {
    const keys = [...new Set(facts.groups.flatMap((group) => Object.keys(group.hyper)))];
    body.append(make('details', {}, make('summary', { textContent: `Optimizer groups (${facts.groups.length})` }),
      tableOf(['group', 'parameters', ...keys], facts.groups.map((group, number) => [String(number), String(group.parameters), ...keys.map((key) => group.hyper[key] ?? '–')]))));
  }
}

const severityTag = (severity) => make('span', { className: `tag ${severity === 'note' ? '' : severity}`, textContent: severity });
const filesAndRanks = (some) => some.map((rank) => `rank ${rank} (${rankText(rank)})`).join(', ');

/** What to look at first: a lost rank, else the most important error. */
function drawFirstFailure(body) {
  const first = findings.find((finding) => finding.severity === 'error');
  if (!first && !lostRanks.size) return;
  const title = lostRanks.size
    ? `${[...lostRanks.keys()].slice(0, 3).map((rank) => `Rank ${rank} (${rankText(rank)})`).join(', ')}${lostRanks.size > 3 ? ` and ${plural(lostRanks.size - 3, 'more rank')}` : ''} ${lostRanks.size > 1 ? 'are' : 'is'} lost`
    : `${first.check} failed`;
  const links = make('p', { className: 'links' });
  if (first) {
    const known = first.parameter !== null ? columns.name.indexOf(first.parameter) : -1;
    if (known >= 0) links.append(button('Show the parameter', () => openDetail(known)));
  }
  if (lostStates.size) links.append(button(`Show the ${plural(lostStates.size, 'damaged parameter')}`, () => searchFor('is:lost', 'map')));
  links.append(button('All findings', () => byId('checks').scrollIntoView()));
  body.append(make('div', { className: 'first', attributes: { role: 'alert' } },
    make('h3', { textContent: 'What failed first' }), make('p', { className: 'what', textContent: title }),
    first ? make('p', { textContent: first.message }) : null,
    first && first.hint ? make('p', { className: 'muted', textContent: `→ ${first.hint}` }) : null, links));
}

/** The files that cannot be read, and every parameter that lost elements. */
function drawDamage() {
  if (!facts.lost) return;
  byId('damage').hidden = false;
  const body = byId('damage-body');
  const states = facts.lost.states;
  const elements = states.reduce((sum, [, , n]) => sum + n, 0);
  const all = columns.name.reduce((sum, _, p) => sum + kinds.reduce((n, __, k) => { const state = stateOf(p, k); return n + (state ? state.elements : 0); }, 0), 0);
  body.append(make('p', { className: 'lead' }, `${plural(facts.lost.files.length, 'file')} cannot be read. `, states.length
    ? `${plural(lostStates.size, 'parameter')} of ${countText(total)} lost ${plural(elements, 'element')}, ${percentText(elements / Math.max(1, all))} of all states. Elements that another file has a copy of are not counted.`
    : 'No parameter lost elements: other files have copies of everything that they held, or they held none.'));
  body.append(tableOf(['File', 'Ranks', 'Why'], facts.lost.files.map(([file, reason, of]) => [
    make('span', { className: 'mono', textContent: facts.partition.files[file] }),
    of.length > 4 ? `${of.length} ranks` : filesAndRanks(of.length ? of : [...lostRanks].filter(([, names]) => names.some((name) => name.endsWith(facts.partition.files[file]))).map(([rank]) => rank)) || '–',
    reason.startsWith('/') ? reason.slice(reason.indexOf(': ') + 2) : reason])));
  const rows = [...lostStates].map(([parameter, some]) => {
    const byCount = new Map();  // elements → names of states: those of one optimizer are lost together
    some.forEach(([kind, n]) => addTo(byCount, n, kind));
    const text = [...byCount].map(([n, of]) => `${of.map((kind) => kinds[kind]).join(', ')}: ${countText(n)} of ${countText(stateOf(parameter, of[0]).elements)} (${percentText(n / Math.max(1, stateOf(parameter, of[0]).elements))})`);
    return [button(columns.name[parameter], () => openDetail(parameter), 'link mono'), text.join(' · ')];
  });
  if (!rows.length) return;
  const shown = make('div', { className: 'spaced' }, tableOf(['Parameter', 'Lost elements'], rows.slice(0, 12)));
  body.append(shown);
  if (rows.length > 12) {
    const more = button(`List all ${countText(rows.length)}`, () => { shown.replaceChildren(tableOf(['Parameter', 'Lost elements'], rows.slice(0, 2000))); more.remove(); });
    body.append(make('p', { className: 'links' }, more));
  }
}

function findingNode(finding) {
  const known = finding.parameter !== null ? columns.name.indexOf(finding.parameter) : -1;
  const where = make('p', { className: 'hint' });
  if (finding.hint) where.append(`→ ${finding.hint} `);
  if (known >= 0) where.append(button('Show the parameter', () => openDetail(known), 'link'));
  return make('li', {}, severityTag(finding.severity),
    make('p', {}, make('b', { textContent: `${finding.check}: ` }), finding.message),
    where.textContent ? where : null);
}

function drawChecks() {
  const body = byId('checks-body');
  const checks = facts.checks;
  if (!checks) {
    body.append(make('p', { className: 'empty', textContent: 'No checks were run.' }));
    return;
  }
  const { error, warning, note } = checks.counts;
  const verdict = error ? ['error', plural(error, 'error')] : warning ? ['warning', plural(warning, 'warning')] : ['good', 'consistent'];
  byId('verdict').classList.add(verdict[0]);
  byId('verdict').textContent = verdict[1];
  const counts = [[error, 'error'], [warning, 'warning'], [note, 'note']].filter(([n]) => n).map(([n, what]) => plural(n, what));
  const scope = checks.format === null ? 'of files that cannot be opened together'
    : `of ${countText(checks.checked.atoms)} states in ${countText(checks.checked.files)} files`;
  body.append(make('p', { className: 'lead' }, `${checks.checks.length} checks (${checks.level}) ${scope}: `,
    make('b', { textContent: counts.join(', ') || 'nothing found' })));
  const list = make('ul', { className: 'findings' });
  let shown = 0;
  const more = button('', () => extend());
  const extend = () => {
    const count = shown ? 50 : 8;
    list.append(...checks.findings.slice(shown, shown + count).map(findingNode));
    shown = Math.min(checks.findings.length, shown + count);
    more.hidden = shown >= checks.findings.length;
    more.textContent = `Show more of ${countText(checks.findings.length)}`;
  };
  extend();
  if (checks.findings.length) body.append(list, more);
  if (checks.omitted) body.append(make('p', { className: 'lead', textContent: `${countText(checks.omitted)} more are in ucp verify --json.` }));
  body.append(make('details', {}, make('summary', { textContent: 'What was checked' }),
    make('ul', { className: 'chips' }, checks.checks.map((check) => make('li', {
      className: check.findings ? 'found' : '', title: check.meaning, textContent: check.findings ? `${check.id} ${check.findings}` : check.id,
    })))));
}
