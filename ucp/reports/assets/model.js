// The data as a model: parameters, their states, the ranks, and what each rank holds.

const kinds = facts.kinds || [];
const columns = facts.parameters || { name: [], shapes: [], layers: [], states: [] };
const total = columns.name.length;
const ranks = facts.partition ? facts.partition.ranks : [];
const ITEM_BYTES = { float64: 8, int64: 8, uint64: 8, complex64: 8, complex128: 16, float32: 4, int32: 4, uint32: 4, complex32: 4,
  float16: 2, bfloat16: 2, int16: 2, uint16: 2 };
const ROLES = ['trained', 'frozen', 'buffer'];

const shapeOf = (parameter) => columns.shapes[columns.shape[parameter]];
const layerOf = (parameter) => columns.layers[columns.layer[parameter]];
const aliasesOf = (parameter) => columns.aliases[parameter] || [];

/** A state of a parameter: dtype, shape, bytes, pattern and statistics; null if it has none of this kind. */
function stateOf(parameter, kind) {
  const entry = columns.states[kind][parameter];
  if (!entry) return null;
  const dtype = columns.dtypes[entry[0]];
  const shape = entry.length > 2 ? columns.shapes[entry[2]] : shapeOf(parameter);
  const elements = elementsOf(shape);
  const measured = facts.statistics ? facts.statistics[kind][parameter] : 0;
  return { dtype, shape, elements, pattern: entry[1], bytes: elements * (ITEM_BYTES[dtype] || 1), measured };
}

const STATISTICS = ['norm', 'low', 'high', 'mean', 'deviation', 'nan', 'infinite', 'zeros'];
function statistic(parameter, kind, name) {
  const measured = facts.statistics && kind >= 0 ? facts.statistics[kind][parameter] : 0;
  return Array.isArray(measured) ? measured[STATISTICS.indexOf(name)] : null;
}

const bytesOf = (() => {
  const known = new Float64Array(total).fill(-1);
  return (parameter) => {
    if (known[parameter] < 0) {
      known[parameter] = kinds.reduce((sum, _, kind) => {
        const state = stateOf(parameter, kind);
        return sum + (state ? state.bytes : 0);
      }, 0);
    }
    return known[parameter];
  };
})();

function rankText(rank) {
  const [pp, tp, dp] = ranks[rank];
  const ep = facts.partition.experts[rank];
  return `pp ${pp} · tp ${tp} · dp ${dp}${ep === undefined ? '' : ` · ep ${ep}`}`;
}

/** The fragments of a pattern: rank, file, number of the list of boxes, first element and length in it, cover. */
function* fragmentsOf(pattern) {
  for (const run of facts.partition.patterns[pattern]) {
    const [count, ...first] = run;
    const step = first.slice(6);
    for (let i = 0; i < count; i += 1) {
      const [rank, file, boxes, start, length, cover] = i ? first.slice(0, 6).map((n, at) => n + i * step[at]) : first;
      yield { rank, file, boxes, start, length, cover };
    }
  }
}

const holdersOf = (() => {
  const known = new Map();
  return (pattern) => {
    if (pattern < 0) return new Map();
    if (!known.has(pattern)) {
      const held = new Map();
      for (const fragment of fragmentsOf(pattern)) {
        if (held.has(fragment.rank)) held.get(fragment.rank).push(fragment);
        else held.set(fragment.rank, [fragment]);
      }
      known.set(pattern, held);
    }
    return known.get(pattern);
  };
})();

/** The boxes of a list as {start, shape}, and their total number of elements. */
const boxesOf = (() => {
  const known = new Map();
  return (number) => {
    if (!known.has(number)) {
      const boxes = facts.partition.boxes[number].map((flat) => ({ start: flat.slice(0, flat.length / 2), shape: flat.slice(flat.length / 2) }));
      const elements = boxes.reduce((sum, box) => sum + elementsOf(box.shape), 0);
      known.set(number, { boxes, elements, clipped: facts.partition.clipped[number] || 0 });
    }
    return known.get(number);
  };
})();

/** Position of a fragment in the tensor, from 0 to 1; -1 for a whole copy. */
function positionOf(fragment, shape) {
  const { boxes, elements } = boxesOf(fragment.boxes);
  if (!boxes.length || !shape.length) return -1;
  let [from, extent] = [0, 1];
  shape.forEach((size, dim) => {
    const low = Math.min(...boxes.map((box) => box.start[dim])) / size;
    const high = Math.max(...boxes.map((box) => box.start[dim] + box.shape[dim])) / size;
    if (high - low < extent) [from, extent] = [low, high - low];
  });
  if (extent >= 1 && fragment.start === 0 && fragment.length >= elements) return -1;
  return from + extent * ((fragment.start + fragment.length / 2) / Math.max(1, elements));
}

const boxText = (box) => `[${box.start.map((a, d) => `${a}:${a + box.shape[d]}`).join(', ')}]`;

/** The region of a fragment as text. */
function regionText(fragment) {
  const { boxes, elements, clipped } = boxesOf(fragment.boxes);
  const more = (clipped || boxes.length) > 3 ? ` + ${(clipped || boxes.length) - 3} more` : '';
  const where = boxes.length && boxes[0].start.length ? boxes.slice(0, 3).map(boxText).join(' + ') + more : 'the scalar';
  if (fragment.start === 0 && (clipped || fragment.length >= elements)) return where;
  return `elements ${countText(fragment.start)}:${countText(fragment.start + fragment.length)} of ${where}`;
}

/** The flat interval [start, stop) of a block of this shape, as boxes in it. */
function intervalBoxes(shape, start, stop) {
  if (start >= stop) return [];
  if (!shape.length) return [{ start: [], shape: [] }];
  const row = elementsOf(shape.slice(1));
  let [first, last] = [Math.floor(start / row), Math.floor(stop / row)];
  const [head, tail] = [start % row, stop % row];
  const inRow = (at, from, to) => intervalBoxes(shape.slice(1), from, to)
    .map((box) => ({ start: [at, ...box.start], shape: [1, ...box.shape] }));
  if (head && first === last) return inRow(first, head, tail);
  const found = [];
  if (head) { found.push(...inRow(first, head, row)); first += 1; }
  if (last > first) found.push({ start: [first, ...shape.slice(1).fill(0)], shape: [last - first, ...shape.slice(1)] });
  if (tail) found.push(...inRow(last, 0, tail));
  return found;
}

/** The boxes of the tensor that a fragment holds. */
function piecesOf(fragment) {
  const found = [];
  let at = 0;
  for (const box of boxesOf(fragment.boxes).boxes) {
    const size = elementsOf(box.shape);
    const [low, high] = [Math.max(fragment.start, at) - at, Math.min(fragment.start + fragment.length, at + size) - at];
    for (const part of intervalBoxes(box.shape, low, high)) {
      found.push({ start: part.start.map((a, d) => a + box.start[d]), shape: part.shape });
    }
    at += size;
  }
  return found;
}


// What is wrong: files that cannot be read with their ranks, states that lost elements, and findings of checks.
const lostFiles = new Set((facts.lost ? facts.lost.files : []).map(([file]) => file));
const lostRanks = new Map();  // rank → files
const lostStates = new Map();  // parameter → [kind, elements]…
const findings = (facts.checks || {}).findings || [];
const findingsOf = new Map();  // name of a parameter → its findings
const findingsOfRank = new Map();  // rank → its findings
const differences = new Map();  // parameter → its differences from the other checkpoint

const addTo = (map, key, value) => { if (map.has(key)) map.get(key).push(value); else map.set(key, [value]); };

(() => {
  const numbers = new Map(ranks.map(([pp, tp, dp], rank) => [`${pp},${tp},${dp}`, rank]));
  for (const [file, , of] of facts.lost ? facts.lost.files : []) of.forEach((rank) => addTo(lostRanks, rank, facts.partition.files[file]));
  for (const [parameter, kind, elements] of facts.lost ? facts.lost.states : []) addTo(lostStates, parameter, [kind, elements]);
  for (const finding of findings) {
    if (finding.parameter !== null) addTo(findingsOf, finding.parameter, finding);
    const at = finding.rank;
    const rank = at ? numbers.get(`${at.pp},${at.tp},${at.dp}`) : undefined;
    if (rank === undefined) continue;
    addTo(findingsOfRank, rank, finding);
    if (facts.lost && finding.check === 'grid' && finding.severity === 'error' && !lostRanks.has(rank)) addTo(lostRanks, rank, finding.file);
  }
  for (const one of facts.comparison ? facts.comparison.differences : []) addTo(differences, one[0], one);
})();

const SEVERITIES = ['error', 'warning', 'note'];
const worst = (some) => SEVERITIES.find((severity) => (some || []).some((finding) => finding.severity === severity));
/** The most severe mark of a parameter: lost, error, warning, or nothing. Notes are not marked. */
function markOf(parameter) {
  if (lostStates.has(parameter)) return 'lost';
  const found = worst(findingsOf.get(columns.name[parameter]));
  return found === 'note' ? undefined : found;
}
const MARK_COLORS = { lost: 'lost', error: 'bad', warning: 'warn' };

// What is shown: the kind of state, the search, the parameters that match it, the one that is open.
const view = { kind: Math.max(0, kinds.indexOf('master')), query: '', shown: [], open: -1, complaints: [] };
if (facts.lost && facts.lost.states.length) view.kind = facts.lost.states.some(([, kind]) => kind === view.kind) ? view.kind : facts.lost.states[0][1];
const listeners = [];
function changed() { listeners.forEach((listener) => listener()); }

const anyState = (parameter, name) => kinds.some((_, kind) => statistic(parameter, kind, name));
const FLAGS = {
  lost: ['lost elements', (p) => lostStates.has(p)],
  found: ['has findings', (p) => findingsOf.has(columns.name[p])],
  different: ['differs from the other checkpoint', (p) => differences.has(p)],
  nan: ['has NaN', (p) => anyState(p, 'nan')],
  inf: ['has infinities', (p) => anyState(p, 'infinite')],
  tied: ['has several names', (p) => aliasesOf(p).length > 0],
  frozen: ['frozen', (p) => columns.role[p] === 1],
  buffer: ['buffer', (p) => columns.role[p] === 2],
};
const AXES = ['pp', 'tp', 'dp'];
const axisSize = (axis) => ranks.reduce((most, rank) => Math.max(most, rank[axis] + 1), 0);

/** Whether a parameter has a part of the chosen state on a rank that is wanted. */
function heldBy(wanted) {
  const verdicts = new Map();  // by pattern: many parameters share one
  return (parameter) => {
    const state = stateOf(parameter, view.kind);
    if (!state || state.pattern < 0) return false;
    if (!verdicts.has(state.pattern)) verdicts.set(state.pattern, [...holdersOf(state.pattern).keys()].some(wanted));
    return verdicts.get(state.pattern);
  };
}

/** The test for one word of a query. A word with a colon that means nothing adds a complaint. */
function wordTest(word) {
  const [, key, value] = /^(rank|pp|tp|dp|is):(.*)$/i.exec(word) || [];
  if (key === 'is') {
    if (value in FLAGS) return FLAGS[value][1];
    view.complaints.push(`is:${value} does not exist. Filters: ${Object.keys(FLAGS).map((flag) => `is:${flag}`).join(', ')}.`);
    return () => false;
  }
  if (key) {
    const axis = AXES.indexOf(key);
    const size = axis < 0 ? ranks.length : axisSize(axis);
    if (!/^\d+$/.test(value) || Number(value) >= size) {
      view.complaints.push(`${word} does not exist: ${key} is 0 to ${size - 1}.`);
      return () => false;
    }
    return null;  // ranks are tested together: pp:1 dp:3 is one rank's, not two ranks'
  }
  const pattern = new RegExp(word.replace(/[.+?^${}()|[\]\\]/g, '\\$&').replace(/\*+/g, '.*'), 'i');
  return (parameter) => pattern.test(columns.name[parameter]) || aliasesOf(parameter).some((alias) => pattern.test(alias));
}

function ranksTest(words) {
  const wanted = words.map((word) => /^(rank|pp|tp|dp):(\d+)$/i.exec(word)).filter(Boolean)
    .map(([, key, value]) => [AXES.indexOf(key), Number(value)]);
  if (!wanted.length) return [];
  return [heldBy((rank) => wanted.every(([axis, value]) => (axis < 0 ? rank === value : ranks[rank][axis] === value)))];
}

/** Show the parameters that match every word of the query. */
function search(query) {
  view.query = query;
  view.complaints = [];
  const words = query.trim().split(/\s+/).filter(Boolean);
  const tests = [...words.map(wordTest), ...ranksTest(words)].filter(Boolean);
  view.shown = [];
  for (let parameter = 0; parameter < total; parameter += 1) {
    if (tests.every((test) => test(parameter))) view.shown.push(parameter);
  }
  changed();
}

/** Search for `query`, as if it had been typed. */
function searchFor(query, section) {
  byId('search').value = query;
  search(query);
  if (section) byId(section).scrollIntoView();
}

/** The query with the word `key:…` replaced, or removed if `value` is empty. */
function withFilter(key, value) {
  const words = view.query.trim().split(/\s+/).filter((word) => word && !word.toLowerCase().startsWith(`${key}:`));
  return [...words, ...(value === '' ? [] : [`${key}:${value}`])].join(' ');
}

function emptyText() { return view.complaints.join(' ') || 'No parameter matches the search.'; }
