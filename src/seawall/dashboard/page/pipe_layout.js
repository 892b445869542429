// Where the nodes and pipes of a pipeline are: by the longest path from the sources.
//
// With room, columns go from left to right, and a pipe that passes a column has a place of its own in
// it. Without room, nodes are below each other, and the pipes run on rails to the left of them.

const NODE = 104; // Heights.
const SOURCE = 82;
const BRANCH = 58;
const TAP = 26;
const PASS = 20;
const APART = 16; // Between two in a column.
const TAPS_APART = 8;
const WIDEST = 204;
const NARROWEST = 112;
const GAP = 62; // Between two columns, at most and at least.
const LEAST_GAP = 34;
const TAP_WIDTH = 96;
const NARROW = 640; // Below it, nodes are below each other.
const RAIL = 16;
const JOINT = 9; // Half the height of a flange.
const LEVEL = 24; // Pixels of height over which a pipe counts as level.
const STEEP = 36; // More room for pipes that rise or fall a lot.
const MARGIN = 8; // Above and below, for pipes.

const heightOf = (kind) => ({ tap: TAP, source: SOURCE, branch: BRANCH, pass: PASS })[kind] ?? NODE;

/** The longest path to each node; what goes in a circle stops after as many steps as there are nodes. */
function depthsOf(nodes, first) {
  const depths = new Map(nodes.map((node) => [node.name, node.kind === "source" ? first : 0]));
  for (let round = 0; round < nodes.length; round++) {
    let moved = false;
    for (const node of nodes) {
      const next = depths.get(node.name) + 1;
      for (const to of node.to) {
        if (depths.has(to) && depths.get(to) < next && next <= nodes.length + first) {
          depths.set(to, next);
          moved = true;
        }
      }
    }
    if (!moved) break;
  }
  return depths;
}

/** Nodes, taps, and a place for each pipe in each column that it passes. */
function columnsOf(nodes) {
  const tapped = nodes.some((node) => node.readings.length > 0);
  const depths = depthsOf(nodes, tapped ? 1 : 0);
  const last = Math.max(...depths.values());
  for (const node of nodes) if (node.kind === "sink") depths.set(node.name, last);
  const columns = Array.from({ length: last + 1 }, () => []);
  const places = new Map();
  const add = (depth, place) => {
    columns[depth].push({ ...place, depth, into: [], height: heightOf(place.kind) });
    return columns[depth].at(-1);
  };
  const routes = [];
  for (const node of nodes) {
    const own = add(depths.get(node.name), { name: node.name, kind: node.kind });
    places.set(node.name, own);
  }
  for (const node of nodes) {
    for (const reading of node.readings) {
      const tap = add(0, { name: reading.name, source: node.name, kind: "tap" });
      places.get(node.name).into.push(tap);
      routes.push({ from: tap, to: places.get(node.name), by: [], tap: reading.name });
    }
    for (const name of node.to) {
      const to = places.get(name);
      const from = places.get(node.name);
      if (!to || to.depth <= from.depth) continue;
      const by = [];
      let before = from;
      for (let depth = from.depth + 1; depth < to.depth; depth++) {
        const pass = add(depth, { kind: "pass" });
        pass.into.push(before);
        by.push(pass);
        before = pass;
      }
      to.into.push(before);
      routes.push({ from, to, by });
    }
  }
  return { columns, routes };
}

const middle = (place) => place.y + place.height / 2;
const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;

/** Set y: near what leads to it, in the order in which that is, without covering each other. */
function stack(columns) {
  for (const column of columns) {
    let free = 0;
    for (const place of column) {
      place.wanted = place.into.length ? mean(place.into.map(middle)) : free + place.height / 2;
      free += place.height + (place.kind === "tap" ? TAPS_APART : APART);
    }
    const order = new Map(column.map((place, index) => [place, index]));
    column.sort((a, b) => a.wanted - b.wanted || order.get(a) - order.get(b));
    let below = -Infinity;
    let before = null;
    for (const place of column) {
      const apart = place.kind === "tap" && before?.kind === "tap" ? TAPS_APART : APART;
      place.y = Math.max(place.wanted - place.height / 2, below + (before === null ? 0 : apart));
      below = place.y + place.height;
      before = place;
    }
    // What was pushed down is moved up again with all of its column.
    const shift = column.length ? mean(column.map((place) => place.wanted - middle(place))) : 0;
    for (const place of column) place.y += shift;
  }
  const all = columns.flat();
  const top = Math.min(...all.map((place) => place.y));
  for (const place of all) place.y += MARGIN - top;
  return Math.max(...all.map((place) => place.y + place.height)) + MARGIN;
}

/** Where pipes leave and enter a side of a node: apart from each other, in the order of their other ends. */
function ports(routes) {
  const sides = new Map();
  const enter = (place, side, pipe, other) => {
    const key = side === "out" ? "outs" : "ins";
    if (!sides.has(place)) sides.set(place, { outs: [], ins: [] });
    sides.get(place)[key].push({ pipe, other });
  };
  for (const route of routes) {
    enter(route.from, "out", route, route.by[0] ?? route.to);
    enter(route.to, "in", route, route.by.at(-1) ?? route.from);
  }
  for (const [place, { outs, ins }] of sides) {
    for (const [key, list] of [["start", outs], ["end", ins]]) {
      list.sort((a, b) => middle(a.other) - middle(b.other));
      const apart = Math.min(18, (place.height - 24) / Math.max(1, list.length - 1));
      list.forEach(({ pipe }, index) => {
        pipe[key] = middle(place) + (index - (list.length - 1) / 2) * apart;
      });
    }
  }
}

/** A line that leaves and enters level. */
function curve(points) {
  let path = `M${points[0].x} ${points[0].y.toFixed(1)}`;
  for (let i = 1; i < points.length; i++) {
    const [from, to] = [points[i - 1], points[i]];
    const bend = Math.round((to.x - from.x) / 2);
    path += from.y === to.y ? `H${to.x}` : `C${from.x + bend} ${from.y.toFixed(1)} ${to.x - bend} ${to.y.toFixed(1)} ${to.x} ${to.y.toFixed(1)}`;
  }
  return path;
}

const sumOf = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** How much more room a column needs behind it, since a pipe rises or falls a lot there. */
function steepOf(routes, count) {
  const more = new Array(count).fill(0);
  for (const { from, to, by, tap } of routes) {
    const next = by[0] ?? to;
    if (!tap && Math.abs(middle(next) - middle(from)) > NODE) more[from.depth] = STEEP;
  }
  return more;
}

/** The flanges at both ends of a pipe. */
function joints(points) {
  const [from, to] = [points[0], points.at(-1)];
  return `M${from.x + 2} ${(from.y - JOINT).toFixed(1)}v${2 * JOINT}M${to.x - 2} ${(to.y - JOINT).toFixed(1)}v${2 * JOINT}`;
}

/** Where the rate of a pipe is written: above it, or at its end. None where many come together. */
function labelPlace(points, splits) {
  const [from, to] = splits ? points.slice(-2) : points;
  if (Math.abs(to.y - from.y) < LEVEL) return { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 - JOINT - 4 };
  return splits ? { x: to.x - 24, y: to.y < from.y ? to.y - JOINT - 3 : to.y + JOINT + 12 } : null;
}

function acrossLayout(nodes, room) {
  const { columns, routes } = columnsOf(nodes);
  const tapped = columns[0].length > 0 && columns[0].every((place) => place.kind === "tap");
  const count = columns.length - (tapped ? 1 : 0);
  const left = tapped ? TAP_WIDTH + LEAST_GAP : 0;
  const height = stack(columns);
  ports(routes);
  const steep = steepOf(routes, columns.length);
  const free = room - left - sumOf(steep);
  const gap = (free - (count - 1) * GAP) / count < NARROWEST ? LEAST_GAP : GAP;
  const width = Math.floor(Math.min(WIDEST, Math.max(NARROWEST, (free - (count - 1) * gap) / count)));
  const used = count * width + (count - 1) * gap;
  // Room that is left over makes the pipes longer.
  const wide = count > 1 ? Math.floor(gap + Math.max(0, Math.min(150, (free - used) / (count - 1)))) : gap;
  let x = 0;
  for (const [depth, column] of columns.entries()) {
    const own = tapped && depth === 0 ? TAP_WIDTH : width;
    for (const place of column) {
      place.x = x;
      place.width = own;
    }
    x += own + (tapped && depth === 0 ? LEAST_GAP : wide + steep[depth]);
  }
  const splits = new Map();
  for (const { from } of routes) splits.set(from, (splits.get(from) ?? 0) + 1);
  const pipes = routes.map((route) => {
    const { from, to, by } = route;
    const points = [{ x: from.x + from.width, y: route.start }];
    for (const pass of by) points.push({ x: pass.x, y: middle(pass) }, { x: pass.x + pass.width, y: middle(pass) });
    points.push({ x: to.x, y: route.end });
    return { ...named(route), path: curve(points), ends: joints(points), at: route.tap ? null : labelPlace(points, splits.get(from) > 1) };
  });
  const end = Math.max(...columns.flat().map((place) => place.x + (place.width ?? 0)));
  return { way: "across", width: end, height, pipes, ...boxes(columns.flat()) };
}

const named = ({ from, to, tap }) => ({ key: `${from.source ?? ""} ${from.name} ${to.name}`, from: from.name, to: to.name, tap });

function boxes(places) {
  const box = ({ x, y, width, height }) => ({ x, y, width, height });
  return {
    nodes: places.filter((place) => place.kind !== "tap" && place.kind !== "pass").map((place) => ({ name: place.name, box: box(place) })),
    taps: places.filter((place) => place.kind === "tap").map((place) => ({ key: `${place.source} ${place.name}`, name: place.name, source: place.source, box: box(place) })),
  };
}

function downLayout(nodes, room) {
  const { columns, routes } = columnsOf(nodes);
  const rails = Math.min(6, Math.max(...columns.map((column) => column.length)));
  const left = RAIL * rails + 10;
  let y = MARGIN;
  for (const column of columns) {
    for (const [index, place] of column.filter((one) => one.kind !== "pass").entries()) {
      place.x = left;
      place.y = y;
      place.width = room - left;
      place.rail = RAIL / 2 + RAIL * (index % rails);
      y += place.height + (place.kind === "tap" ? TAPS_APART : APART);
    }
  }
  const pipes = routes.map((route) => {
    const { from, to } = route;
    const [a, b] = [middle(from), middle(to)];
    const path = `M${left} ${a}H${from.rail + 6}q-6 0 -6 6V${b - 6 - Math.abs(to.rail - from.rail)}L${to.rail} ${b - 6}q0 6 6 6H${left}`;
    return { ...named(route), path: from.rail === to.rail ? `M${left} ${a}H${from.rail + 6}q-6 0 -6 6V${b - 6}q0 6 6 6H${left}` : path, ends: "", at: null };
  });
  return { way: "down", width: room, height: y - APART + MARGIN, pipes, ...boxes(columns.flat().filter((place) => place.kind !== "pass")) };
}

/**
 * Where everything is, in pixels: {way, width, height, nodes: [{name, box}], taps: [{key, name,
 * source, box}], pipes: [{key, from, to, tap, path, at}]}.
 */
export function layoutOf(nodes, room) {
  return room < NARROW ? downLayout(nodes, room) : acrossLayout(nodes, room);
}
