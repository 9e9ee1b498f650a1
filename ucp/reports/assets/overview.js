// The overview and the findings of the checks.

function tile(title, value, small) {
  return make('div', { className: 'tile' }, make('dt', { textContent: title }),
    make('dd', { textContent: value }, small ? make('small', { textContent: small }) : null));
}

function drawOverview() {
  const body = byId('overview-body');
  if (!facts.totals) {
    body.append(make('p', { className: 'empty', textContent: 'This checkpoint could not be opened. The findings below explain why.' }));
    return;
  }
  const { totals, mesh } = facts;
  const roles = Object.entries(totals.roles).map(([role, count]) => `${countText(count)} ${role}`).join(', ');
  const degrees = [['tp', mesh.tp], ['pp', mesh.pp], ['dp', mesh.dp], ['ep', mesh.ep]].filter(([axis, n]) => n > 1 || axis !== 'ep');
  body.append(make('dl', { className: 'tiles' },
    tile('Format', facts.format, facts.framework),
    tile('Ranks', countText(facts.world), `${degrees.map(([axis, n]) => `${axis} ${n}`).join(' × ')}, ZeRO ${mesh.zero}`),
    tile('Step', facts.step === null ? 'unknown' : countText(facts.step)),
    tile('Parameters', bigText(totals.elements), `${countText(totals.parameters)} tensors: ${roles}`),
    tile('States', bytesText(totals.bytes), kinds.join(', ')),
    tile('Files', countText(totals.files), bytesText(totals.file_bytes))));
  const details = [['source', facts.source], ...facts.details, ...facts.notes.map((note) => ['note', note])];
  body.append(make('details', {}, make('summary', { textContent: 'Details' }),
    make('dl', { className: 'pairs' }, details.map(([key, value]) => [make('dt', { textContent: key }), make('dd', { textContent: value })]))));
  if (facts.groups.length) {
    const keys = [...new Set(facts.groups.flatMap((group) => Object.keys(group.hyper)))];
    const head = make('tr', {}, ['group', 'parameters', ...keys].map((key) => make('th', { textContent: key, scope: 'col' })));
    const rows = facts.groups.map((group, number) => make('tr', {}, make('td', { textContent: number }), make('td', { textContent: group.parameters }),
      keys.map((key) => make('td', { textContent: group.hyper[key] ?? '–' }))));
    body.append(make('details', {}, make('summary', { textContent: `Optimizer groups (${facts.groups.length})` }),
      make('div', { className: 'scroll' }, make('table', {}, make('thead', {}, head), make('tbody', {}, rows)))));
  }
}

function findingNode(finding) {
  const known = finding.parameter !== null ? columns.name.indexOf(finding.parameter) : -1;
  const where = make('p', { className: 'hint' });
  if (finding.hint) where.append(`→ ${finding.hint} `);
  if (known >= 0) where.append(make('button', { className: 'link', textContent: 'Show the parameter', onclick: () => openDetail(known) }));
  return make('li', {},
    make('span', { className: `tag ${finding.severity === 'note' ? '' : finding.severity}`, textContent: finding.severity }),
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
  const verdict = error ? ['error', `${error} error${error > 1 ? 's' : ''}`]
    : warning ? ['warning', `${warning} warning${warning > 1 ? 's' : ''}`] : ['good', 'consistent'];
  byId('verdict').classList.add(verdict[0]);
  byId('verdict').textContent = verdict[1];
  const counts = [[error, 'error'], [warning, 'warning'], [note, 'note']].filter(([n]) => n).map(([n, what]) => `${countText(n)} ${what}${n > 1 ? 's' : ''}`);
  body.append(make('p', { className: 'lead' },
    `${checks.checks.length} checks (${checks.level}) of ${countText(checks.checked.atoms)} states in ${countText(checks.checked.files)} files: `,
    make('b', { textContent: counts.join(', ') || 'nothing found' })));
  const list = make('ul', { className: 'findings' });
  let shown = 0;
  const more = make('button', { className: 'button', type: 'button' });
  const extend = () => {
    list.append(...checks.findings.slice(shown, shown + 50).map(findingNode));
    shown = Math.min(checks.findings.length, shown + 50);
    more.hidden = shown >= checks.findings.length;
    more.textContent = `Show more of ${countText(checks.findings.length)}`;
  };
  more.onclick = extend;
  extend();
  if (checks.findings.length) body.append(list, more);
  if (checks.omitted) body.append(make('p', { className: 'lead', textContent: `${countText(checks.omitted)} more are in ucp verify --json.` }));
  body.append(make('details', {}, make('summary', { textContent: 'What was checked' }),
    make('ul', { className: 'chips' }, checks.checks.map((check) => make('li', {
      className: check.findings ? 'found' : '', title: check.meaning, textContent: check.findings ? `${check.id} ${check.findings}` : check.id,
    })))));
}
