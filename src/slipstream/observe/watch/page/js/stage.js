// The picture of the loop: stations are elements of the page, what moves between them is drawn over them.

import { byId, el, key, prefersStill, say, svg } from './dom.js';
import { GROUP, PHASES } from './api.js';
import { age, number, plural } from './format.js';

export const AGES = 5; // colours; older ones share the last
const SETTLE_S = 0.16; // a dot covers most of its way in this time of the viewer's
const MAX_REPLICAS = 8;
const HINT = 'Point at a dot to see which group it is; a click opens it under Rollouts.';
const EMPTY = 'Nothing is on its way any more: play, or move the slider, to go through the run.';
const FULL = 'M0,-1A1,1 0 1 1 0,1A1,1 0 1 1 0,-1Z';

export const ageClass = (versions) => `age-${Math.min(Math.max(0, versions), AGES - 1)}`;

/** The share of a disc from the top on, clockwise, as a path of radius 1. */
export function slicePath(share) {
  if (share <= 0) return '';
  if (share >= 1) return FULL;
  const angle = 2 * Math.PI * share;
  return `M0,0L0,-1A1,1 0 ${share > 0.5 ? 1 : 0} 1 ${Math.sin(angle).toFixed(3)},${(-Math.cos(angle)).toFixed(3)}Z`;
}

/** Where dot `slot` of `count` lies in a box, and how large dots may be there. */
export function slotPlace(slot, count, box) {
  const pitchOf = (radius) => 2 * radius + Math.min(3, radius);
  const fitting = (length, radius) => Math.max(1, Math.floor(length / pitchOf(radius)));
  let radius = 8;
  while (radius > 0.5 && fitting(box.width, radius) * fitting(box.height, radius) < count) radius -= 0.5;
  const [pitch, columns] = [pitchOf(radius), fitting(box.width, Math.max(1, radius))];
  return {
    x: box.x + pitch / 2 + (slot % columns) * pitch,
    y: box.y + pitch / 2 + Math.floor(slot / columns) * pitch,
    radius,
  };
}

/** Where a group is drawn. */
export function placeOf(row, numReplicas) {
  const phase = PHASES[row[GROUP.phase]];
  if (phase === 'sampling') return `replica-${row[GROUP.replica] < numReplicas ? row[GROUP.replica] : 'more'}`;
  return phase === 'waiting' ? 'prompts' : phase;
}

class Dot {
  constructor(ordinal) {
    this.whole = svg('path', { d: FULL, class: 'whole' });
    this.part = svg('path', { class: 'part' });
    this.element = svg('g', { class: 'dot', 'data-ordinal': ordinal }, this.whole, this.part);
    this.x = this.y = this.radius = 0;
    this.target = null;
    this.place = '';
    this.slot = -1;
    this.filled = -1;
    this.kind = '';
  }

  show(share, kind) {
    if (share !== this.filled) {
      this.part.setAttribute('d', slicePath(share));
      this.filled = share;
    }
    if (kind !== this.kind) {
      this.element.setAttribute('class', `dot ${kind}`);
      this.kind = kind;
    }
  }

  put() {
    const { x, y, radius } = this;
    this.element.setAttribute('transform', `translate(${x.toFixed(1)},${y.toFixed(1)}) scale(${radius.toFixed(2)})`);
  }
}

export class Stage {
  /** `onOpen(ordinal)`: somebody wants to read that group. */
  constructor(onOpen) {
    this.stage = byId('stage');
    this.overlay = byId('overlay');
    this.paths = svg('g', { class: 'paths' });
    this.chips = svg('g');
    this.dots = svg('g', { class: 'dots-layer' });
    this.arcs = svg('g', { class: 'arcs' });
    this.clip = svg('clipPath', { id: 'open-ground' });
    this.overlay.append(this.clip, this.paths, this.arcs, this.dots, this.chips);
    this.byOrdinal = new Map();
    this.leaving = [];
    this.slots = new Map(); // place -> ordinals by slot, null where it is free
    this.chipOf = new Map();
    this.boxes = new Map();
    this.numReplicas = 0;
    this.state = null;
    this.waits = [];
    new ResizeObserver(() => this.measure()).observe(this.stage);
    this.stage.addEventListener('pointermove', (event) => this.tell(event));
    this.stage.addEventListener('pointerleave', () => this.hint());
    this.hint();
    this.stage.addEventListener('click', (event) => {
      const ordinal = this.at(event);
      if (ordinal !== null) onOpen(ordinal);
    });
  }

  /** Once per run: its processes and dials. */
  setUp(info) {
    const replicas = info.processes.filter((one) => one.side === 'generator' && !one.name.includes('@'));
    const names = replicas.map((one) => one.name);
    this.completions = info.dials?.completions_per_group ?? 1;
    this.perStep = info.dials?.groups_per_step ?? 1;
    this.numSteps = info.dials?.steps ?? Infinity;
    this.bound = info.dials?.max_staleness ?? 0;
    this.isKnown = info.dials !== null;
    say(byId('tagline-generator'), info.dials ? `sample ${plural(this.completions, 'answer')} to each prompt` : 'sample answers');
    say(byId('tagline-trainer'), info.dials ? `a step takes ${plural(this.perStep, 'group')}` : 'one step, one new version');
    if (names.join() !== this.names) {
      this.names = names.join();
      this.numReplicas = Math.min(names.length, MAX_REPLICAS);
      const rows = names.slice(0, MAX_REPLICAS).map((name, replica) => this.replica(name, replica));
      if (names.length > MAX_REPLICAS) rows.push(this.replica(`${names.length - MAX_REPLICAS} more`, 'more'));
      byId('replicas').replaceChildren(...rows);
      byId('replicas').classList.toggle('many', names.length > 3);
    }
    for (const box of this.stage.querySelectorAll('.processes')) {
      const sides = box.dataset.sides.split(' ');
      const own = info.processes.filter((one) => sides.includes(one.side) && !one.name.includes('@'));
      const known = [...box.children].map((child) => child.dataset.process).join();
      if (known !== own.map((one) => one.name).join()) {
        box.replaceChildren(...own.map((one) => stateLine(one.name, own.length > 1)));
      }
    }
    byId('age-legend').replaceChildren(...this.legend());
    this.measure();
  }

  replica(name, replica) {
    return el(
      'div',
      { class: 'replica', 'data-replica': replica },
      el('p', { class: 'replica-head' }, name, ' ', el('span', { class: 'held', 'data-held': replica })),
      el('div', { class: 'dots', 'data-place': `replica-${replica}` }),
      stateLine(name, false),
    );
  }

  legend() {
    const top = Math.min(AGES - 1, Math.max(this.bound, 1) + 1);
    const items = [el('span', {}, 'Colour: ')];
    for (let versions = 0; versions <= top; versions++) {
      items.push(key(ageClass(versions), versions < top ? age(versions) : `${age(versions)} or more`));
    }
    items.push(key('half', 'half of its answers finished'));
    if (this.isKnown) items.push(el('span', {}, `This run's bound: ${age(this.bound)}.`));
    return items;
  }

  measure() {
    const origin = this.stage.getBoundingClientRect();
    if (!origin.width) return;
    this.overlay.setAttribute('width', origin.width);
    this.overlay.setAttribute('height', origin.height);
    const relative = (element) => {
      const box = element.getBoundingClientRect();
      return { x: box.left - origin.left, y: box.top - origin.top, width: box.width, height: box.height };
    };
    this.boxes = new Map(
      [...this.stage.querySelectorAll('.dots')].map((element) => [element.dataset.place, relative(element)]),
    );
    this.stations = new Map(
      [...this.stage.querySelectorAll('.station')].map((element) => [element.dataset.station, relative(element)]),
    );
    this.bin = relative(byId('dropped').querySelector('.bin'));
    this.drawPaths();
    this.fence();
    this.arcsKey = '';
    if (this.state) this.update(this.state, true);
    this.drawWaits();
  }

  get isUpright() {
    const { prompts, generator } = Object.fromEntries(this.stations ?? []);
    return generator !== undefined && generator.y > prompts.y + prompts.height / 2;
  }

  /** Where stations lie under each other, dots are seen where there is no text: in their boxes, and between stations. */
  fence() {
    const ground = [...this.boxes.values(), grown(this.bin, 2)];
    const stations = [...this.stations.values()].sort((a, b) => a.y - b.y);
    for (let i = 0; i + 1 < stations.length; i++) {
      const [{ x, y, width, height }, below] = [stations[i], stations[i + 1]];
      ground.push({ x, y: y + height, width, height: Math.max(0, below.y - y - height) });
    }
    this.clip.replaceChildren(...ground.map((box) => svg('rect', box)));
    if (this.isUpright) this.dots.setAttribute('clip-path', 'url(#open-ground)');
    else this.dots.removeAttribute('clip-path');
  }

  drawPaths() {
    const s = Object.fromEntries(this.stations);
    const order = ['prompts', 'generator', 'rewards', 'batching', 'trainer'];
    const found = [];
    for (let i = 0; i + 1 < order.length; i++) {
      const [a, b] = [s[order[i]], s[order[i + 1]]];
      found.push(
        this.isUpright
          ? arrow(a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y)
          : arrow(a.x + a.width, a.y + 34, b.x, b.y + 34),
      );
    }
    this.returnPath = svg('path', { class: 'return', d: this.returnRoute(s) });
    this.paths.replaceChildren(...found.flat(), this.returnPath, ...head(this.returnPath));
  }

  /** From the trainer, by way of weight sync, to the generators. */
  returnRoute({ trainer: t, weights: w, generator: g }) {
    if (this.isUpright) {
      const x = Math.max(t.x + t.width, g.x + g.width) + 14;
      const [from, middle, to] = [t.y + 30, g.y + 40, g.y + 40];
      return `M${t.x + t.width},${from}H${x - 8}Q${x},${from} ${x},${from - 8}V${middle + 8}Q${x},${to} ${x - 8},${to}H${g.x + g.width}`;
    }
    const y = w.y + w.height / 2;
    const [from, to] = [t.x + t.width / 2, g.x + g.width / 2];
    return `M${from},${t.y + t.height}V${y - 10}Q${from},${y} ${from - 10},${y}H${to + 10}Q${to},${y} ${to},${y - 10}V${g.y + g.height}`;
  }

  /** Show the state of a passage. `jump`: time has not just gone on, so nothing moves, it is there. */
  update(state, jump) {
    this.state = state;
    const still = jump || prefersStill();
    if (jump) this.clear();
    const rows = [...state.groups.values()];
    for (const [ordinal, dot] of this.byOrdinal) {
      if (!state.groups.has(ordinal)) this.leave(ordinal, dot, still);
    }
    if (jump) rows.sort((a, b) => a[GROUP.ordinal] - b[GROUP.ordinal]);
    for (const row of rows) this.place(row, state, still);
    for (const [place, slots] of this.slots) this.arrange(place, slots, still);
    this.tellCounts(state);
    if (!this.stage.classList.contains('pointing')) this.hint();
    this.moveChips(state, still);
  }

  clear() {
    for (const dot of [...this.byOrdinal.values(), ...this.leaving]) dot.element.remove();
    this.byOrdinal.clear();
    this.slots.clear();
    this.leaving = [];
  }

  place(row, state, still) {
    const ordinal = row[GROUP.ordinal];
    let dot = this.byOrdinal.get(ordinal);
    if (dot === undefined) {
      dot = new Dot(ordinal);
      this.byOrdinal.set(ordinal, dot);
      this.dots.append(dot.element);
      const prompts = this.boxes.get('prompts');
      if (prompts) Object.assign(dot, { x: prompts.x + prompts.width / 2, y: prompts.y + prompts.height / 2 });
      dot.radius = 2;
    }
    const place = placeOf(row, this.numReplicas);
    if (place !== dot.place) {
      this.free(dot);
      dot.place = place;
      dot.slot = this.take(place, ordinal);
    }
    const isSampled = row[GROUP.phase] !== 1;
    const isWaiting = row[GROUP.phase] === 0;
    const versions = state.version - row[GROUP.version];
    dot.row = row;
    dot.show(isWaiting ? 0 : isSampled ? 1 : row[GROUP.finished] / this.completions, ageClass(versions));
    dot.still = still;
  }

  take(place, ordinal) {
    if (!this.slots.has(place)) this.slots.set(place, []);
    const slots = this.slots.get(place);
    const free = slots.indexOf(null);
    if (free < 0) return slots.push(ordinal) - 1;
    slots[free] = ordinal;
    return free;
  }

  free(dot) {
    const slots = this.slots.get(dot.place);
    if (!slots) return;
    slots[dot.slot] = null;
    while (slots.length && slots[slots.length - 1] === null) slots.pop();
  }

  arrange(place, slots, still) {
    const box = this.boxes.get(place);
    if (!box) return;
    slots.forEach((ordinal, slot) => {
      if (ordinal === null) return;
      const dot = this.byOrdinal.get(ordinal);
      dot.target = slotPlace(slot, slots.length, box);
      if (still) this.arrive(dot);
    });
  }

  arrive(dot) {
    Object.assign(dot, dot.target);
    dot.target = null;
    dot.put();
  }

  leave(ordinal, dot, still) {
    this.free(dot);
    this.byOrdinal.delete(ordinal);
    if (still) {
      dot.element.remove();
      return;
    }
    const s = Object.fromEntries(this.stations);
    const isTrained = dot.place === 'training';
    dot.target = isTrained
      ? { x: s.trainer.x + s.trainer.width / 2, y: s.trainer.y + s.trainer.height - 4, radius: 1 }
      : { x: this.bin.x + this.bin.width / 2, y: this.bin.y + this.bin.height / 2, radius: 2.5 };
    dot.show(1, isTrained ? dot.kind : 'gone');
    this.leaving.push(dot);
  }

  /** Weights on their way: a chip for every replica that is behind. */
  moveChips(state, still) {
    for (const [replica, version] of state.versions) {
      const isShown = replica < MAX_REPLICAS;
      const isBehind = version < state.version;
      let chip = this.chipOf.get(replica);
      if (isBehind && isShown && (chip === undefined || chip.version !== state.version)) {
        chip?.element.remove();
        chip = newChip(state.version);
        chip.share = still ? 0.8 : 0;
        this.chipOf.set(replica, chip);
        this.chips.append(chip.element);
      }
      if (chip) chip.goal = isBehind ? 0.8 - 0.06 * replica : 1;
      if (still && !isBehind) this.dropChip(replica);
    }
    for (const replica of [...this.chipOf.keys()]) if (!state.versions.has(replica)) this.dropChip(replica);
    this.putChips();
  }

  dropChip(replica) {
    this.chipOf.get(replica)?.element.remove();
    this.chipOf.delete(replica);
  }

  putChips() {
    const length = this.returnPath.getTotalLength();
    for (const chip of this.chipOf.values()) {
      const point = this.returnPath.getPointAtLength(length * Math.min(1, chip.share));
      chip.element.setAttribute('transform', `translate(${point.x.toFixed(1)},${point.y.toFixed(1)})`);
    }
  }

  /** One frame: everything a little further on its way; whether there is more to go. */
  frame(seconds) {
    const part = 1 - Math.exp(-seconds / SETTLE_S);
    for (const dot of this.byOrdinal.values()) if (dot.target) step(dot, part);
    this.leaving = this.leaving.filter((dot) => {
      step(dot, part);
      if (dot.target) return true;
      dot.element.remove();
      return false;
    });
    for (const [replica, chip] of this.chipOf) {
      chip.share += (chip.goal - chip.share) * (1 - Math.exp(-seconds / 0.3));
      if (chip.goal === 1 && chip.share > 0.985) this.dropChip(replica);
    }
    if (this.chipOf.size) this.putChips();
    return this.leaving.length > 0 || [...this.byOrdinal.values(), ...this.chipOf.values()].some(isOnItsWay);
  }

  tellCounts(state) {
    const [waiting, sampling, scoring, ready, training] = state.counts();
    const next = `next: no. ${state.nextOrdinal.toLocaleString('en')}`;
    say(byId('count-prompts'), waiting ? `${plural(waiting, 'group')} to sample again` : next);
    say(byId('count-scoring'), scoring ? `${scoring.toLocaleString('en')} here or on the way on` : 'nothing to score');
    say(byId('count-ready'), this.isKnown ? `${ready.toLocaleString('en')} of ${this.perStep} ready` : 'nothing yet');
    say(byId('count-training'), training ? `step ${state.version} on ${plural(training, 'group')}` : `has made ${plural(state.version, 'step')}`);
    const { no_signal: same = 0, failed = 0, stale = 0 } = state.fates;
    const dropped = [`${same.toLocaleString('en')} without signal`];
    if (failed) dropped.push(`${failed} failed`);
    if (stale) dropped.push(`${stale} too old`);
    say(byId('count-dropped'), `dropped: ${dropped.join(', ')}`);
    const held = [...state.versions].sort((a, b) => a[0] - b[0]);
    for (const [replica, version] of held) {
      const element = this.stage.querySelector(`[data-held="${replica}"]`);
      if (element) say(element, `v${version}`);
    }
    const behind = held.filter(([, version]) => version < state.version).length;
    let lag = behind ? `${behind} of ${held.length} generators are behind` : 'all generators have it';
    if (!held.length) lag = 'no weights were sent yet';
    else if (behind && held.length === 1) lag = `the generator has v${held[0][1]}`;
    say(byId('count-weights'), `newest v${state.version}; ${lag}`);
    byId('loop').dataset.sampling = sampling;
  }

  /** Who waits: `waits` are [station that waits, station it waits for, words], of the last second or so. */
  setWaits(waits) {
    this.waits = waits;
    this.drawWaits();
  }

  drawWaits() {
    if (!this.stations) return;
    const key = this.waits.map(([from, to]) => `${from}>${to}`).join();
    if (key === this.arcsKey) return;
    this.arcsKey = key;
    for (const element of this.stage.querySelectorAll('.station')) {
      const own = this.waits.find(([from]) => from === element.dataset.station);
      element.classList.toggle('waits', own !== undefined);
      const title = element.querySelector('h3');
      if (own) title.dataset.waits = own[2];
      else delete title.dataset.waits;
      element.classList.toggle('awaited', this.waits.some(([, to]) => to === element.dataset.station));
    }
    this.arcs.replaceChildren(
      ...this.waits.flatMap(([from, to, words]) => {
        const [a, b] = [this.stations.get(from), this.stations.get(to)];
        if (!a || !b || a === b) return [];
        if (this.isUpright) {
          const [ya, yb] = [a.y + a.height / 2, b.y + b.height / 2];
          const path = svg('path', { class: 'wait', d: `M${a.x},${ya}C${a.x - 20},${ya} ${b.x - 20},${yb} ${b.x - 3},${yb}` });
          return [path, ...head(path, 'wait-head')];
        }
        const [xa, xb] = [a.x + a.width / 2, b.x + b.width / 2];
        const path = svg('path', { class: 'wait', d: `M${xa},${a.y}C${xa},${a.y - 34} ${xb},${b.y - 34} ${xb},${b.y - 3}` });
        const label = svg('text', { class: 'wait-label', x: (xa + xb) / 2, y: a.y - 30, 'text-anchor': 'middle' }, words);
        return [path, ...head(path, 'wait-head'), label];
      }),
    );
  }

  at(event) {
    const origin = this.stage.getBoundingClientRect();
    const [x, y] = [event.clientX - origin.left, event.clientY - origin.top];
    let best = null;
    let least = 14;
    for (const [ordinal, dot] of this.byOrdinal) {
      const distance = Math.hypot(dot.x - x, dot.y - y);
      if (distance < least) [best, least] = [ordinal, distance];
    }
    return best;
  }

  tell(event) {
    const ordinal = this.at(event);
    this.stage.classList.toggle('pointing', ordinal !== null);
    const row = ordinal === null ? null : this.byOrdinal.get(ordinal)?.row;
    if (row) say(byId('loop-readout'), this.inWords(row));
    else this.hint();
  }

  hint() {
    const isOver = this.state !== null && !this.byOrdinal.size && this.state.version >= this.numSteps;
    say(byId('loop-readout'), isOver ? EMPTY : HINT);
  }

  inWords(row) {
    const finished = `${row[GROUP.finished]} of ${this.completions} answers finished`;
    const words = {
      waiting: 'to be sampled again',
      sampling: `sampled on generator-${row[GROUP.replica]}, ${finished}`,
      scoring: 'sampled; being scored, or on its way to the trainer, which takes what is scored between two steps',
      ready: 'scored, waits for its step',
      training: `trained in step ${row[GROUP.step]}`,
    }[PHASES[row[GROUP.phase]]];
    const reward = row[GROUP.reward] === null ? '' : `, mean reward ${number(row[GROUP.reward])}`;
    const versions = this.state.version - row[GROUP.version];
    const from = row[GROUP.phase] ? `, from version ${row[GROUP.version]} (${age(versions)})` : '';
    return `Group ${row[GROUP.ordinal]}: ${words}${from}${reward}.`;
  }
}

const grown = ({ x, y, width, height }, by) => ({ x: x - by, y: y - by, width: width + 2 * by, height: height + 2 * by });

const isOnItsWay = (one) => Boolean(one.target) || Math.abs((one.goal ?? 0) - (one.share ?? 0)) > 0.005;

function step(dot, part) {
  const { x, y, radius } = dot.target;
  dot.x += (x - dot.x) * part;
  dot.y += (y - dot.y) * part;
  dot.radius += (radius - dot.radius) * part;
  if (Math.abs(x - dot.x) + Math.abs(y - dot.y) + Math.abs(radius - dot.radius) < 0.4) {
    Object.assign(dot, dot.target);
    dot.target = null;
  }
  dot.put();
}

function newChip(version) {
  const text = svg('text', { 'text-anchor': 'middle', y: 4 }, `v${version}`);
  const width = 14 + 7 * String(version).length + 8;
  const box = svg('rect', { x: -width / 2, y: -10, width, height: 20, rx: 10 });
  return { version, share: 0, goal: 0.8, element: svg('g', { class: 'chip' }, box, text) };
}

function arrow(x1, y1, x2, y2) {
  const path = svg('path', { class: 'way', d: `M${x1},${y1}L${x2},${y2}` });
  return [path, ...head(path)];
}

/** The head of an arrow at the end of `path`. */
function head(path, kind = 'head') {
  const length = path.getTotalLength();
  const end = path.getPointAtLength(length);
  const before = path.getPointAtLength(Math.max(0, length - 4));
  const angle = (Math.atan2(end.y - before.y, end.x - before.x) * 180) / Math.PI;
  return [svg('path', { class: kind, d: 'M0,0L-7,-4.5L-7,4.5Z', transform: `translate(${end.x},${end.y}) rotate(${angle})` })];
}

/** One process: its state now, and what it did in the last seconds as a bar. */
function stateLine(name, isNamed) {
  return el(
    'div',
    { class: 'process', 'data-process': name },
    el('p', { class: 'now' }, isNamed ? `${name}: ` : '', el('span', { class: 'state' }, '–')),
    el('div', { class: 'mix', 'aria-hidden': true }),
  );
}
