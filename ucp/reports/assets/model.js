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
  return `pp ${pp} · tp ${tp} · dp ${dp}`;
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

// What is shown: the kind of state, the search, the parameters that match it, the one that is open.
const view = { kind: Math.max(0, kinds.indexOf('master') >= 0 ? kinds.indexOf('master') : 0), query: '', shown: [], open: -1 };
const listeners = [];
function changed() { listeners.forEach((listener) => listener()); }

const flagged = new Set(((facts.checks || {}).findings || []).map((finding) => finding.parameter).filter(Boolean));

function wordTest(word) {
  const rank = /^(rank|pp|tp|dp):(\d+)$/.exec(word);
  if (rank) {
    const number = Number(rank[2]);
    const axis = ['pp', 'tp', 'dp'].indexOf(rank[1]);
    const wanted = (r) => (axis < 0 ? r === number : ranks[r][axis] === number);
    const verdicts = new Map();  // by pattern: many parameters share one
    return (parameter) => {
      const state = stateOf(parameter, view.kind);
      if (!state || state.pattern < 0) return false;
      if (!verdicts.has(state.pattern)) verdicts.set(state.pattern, [...holdersOf(state.pattern).keys()].some(wanted));
      return verdicts.get(state.pattern);
    };
  }
  const flags = {
    'is:nan': (p) => kinds.some((_, kind) => statistic(p, kind, 'nan') || statistic(p, kind, 'infinite')),
    'is:tied': (p) => aliasesOf(p).length > 0,
    'is:buffer': (p) => columns.role[p] === 2,
    'is:frozen': (p) => columns.role[p] === 1,
    'is:found': (p) => flagged.has(columns.name[p]),
  };
  if (word in flags) return flags[word];
  const escaped = word.replace(/[.+?^${}()|[\]\\]/g, '\\$&').replace(/\*+/g, '.*');
  const pattern = new RegExp(escaped, 'i');
  return (parameter) => pattern.test(columns.name[parameter]) || aliasesOf(parameter).some((alias) => pattern.test(alias));
}

/** Show the parameters that match every word of the query. */
function search(query) {
  view.query = query;
  const tests = query.trim().split(/\s+/).filter(Boolean).map(wordTest);
  view.shown = [];
  for (let parameter = 0; parameter < total; parameter += 1) {
    if (tests.every((test) => test(parameter))) view.shown.push(parameter);
  }
  changed();
}
