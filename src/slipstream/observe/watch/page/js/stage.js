// The picture of the loop: stations are elements of the page, what moves between them is drawn over them. The style
// sheet moves it: a dot or a chip is only told where to go.

import { byId, el, key, leave, say, set, svg } from './dom.js';
import { GROUP } from './api.js';
import { age, count, number, plural } from './format.js';

export const AGES = 5; // colours; older ones share the last
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

/** Where dot `slot` of `count` lies in a box, and how large dots may be there: [x, y, radius]. */
export function slotPlace(slot, count, box) {
  const pitchOf = (radius) => 2 * radius + Math.min(3, radius);
  const fitting = (length, radius) => Math.max(1, Math.floor(length / pitchOf(radius)));
  let radius = 8;
  while (radius > 0.5 && fitting(box.width, radius) * fitting(box.height, radius) < count) radius -= 0.5;
  const [pitch, columns] = [pitchOf(radius), fitting(box.width, Math.max(1, radius))];
  return [box.x + pitch / 2 + (slot % columns) * pitch, box.y + pitch / 2 + Math.floor(slot / columns) * pitch, radius];
}

/** Where a group is drawn. */
export function placeOf(row, numReplicas) {
  const phase = row[GROUP.phase];
  if (phase === 'sampling') return `replica-${row[GROUP.replica] < numReplicas ? row[GROUP.replica] : 'more'}`;
  return phase === 'waiting' ? 'prompts' : phase;
}

/** A group on the picture, at [x, y, radius], in a slot of its place. */
class Dot {
  constructor(ordinal) {
    this.part = svg('path', { class: 'part' });
    this.element = svg('g', { 'data-ordinal': ordinal }, svg('path', { d: FULL, class: 'whole' }), this.part);
    Object.assign(this, { ordinal, place: '', target: [0, 0, 0] });
  }

  show(share, kind) {
    set(this.part, 'd', slicePath(share));
    set(this.element, 'class', `dot ${kind}`);
    this.kind = kind;
  }

  put(target) {
    this.target = target;
    const [x, y, radius] = target;
    this.element.style.transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px) scale(${radius.toFixed(2)})`;
  }
}

export class Stage {
  /** `onOpen(ordinal)`: somebody wants to read that group. */
  constructor(onOpen) {
    this.stage = byId('stage');
    [this.clip, this.paths, this.arcs, this.dots, this.chips] = ['open-ground', 'paths', 'arcs', 'dots', 'chips'].map(byId);
    this.byOrdinal = new Map();
    this.slots = new Map(); // place -> ordinals by slot, null where it is free
    this.chipOf = new Map();
    this.boxes = {};
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

  /** Show the run's processes and dials, where these are not those that are shown. */
  setUp(info) {
    const shown = JSON.stringify([info.processes, info.dials]);
    if (shown === this.shown) return;
    this.shown = shown;
    const { completions_per_group: completions = 1, groups_per_step: perStep = 1 } = info.dials ?? {};
    const { steps = Infinity, max_staleness: bound = 0 } = info.dials ?? {};
    Object.assign(this, { completions, perStep, bound, numSteps: steps, isKnown: info.dials !== null });
    say(byId('tagline-generator'), info.dials ? `sample ${plural(completions, 'answer')} to each prompt` : 'sample answers');
    say(byId('tagline-trainer'), info.dials ? `a step takes ${plural(perStep, 'group')}` : 'one step, one new version');
    const own = (...sides) => info.processes.filter((one) => sides.includes(one.side) && !one.name.includes('@')).map((one) => one.name);
    const names = own('generator');
    if (names.join() !== this.names) {
      this.names = names.join();
      this.numReplicas = Math.min(names.length, MAX_REPLICAS);
      const rows = names.slice(0, MAX_REPLICAS).map((name, replica) => this.replica(name, replica));
      if (names.length > MAX_REPLICAS) rows.push(this.replica(`${names.length - MAX_REPLICAS} more`, 'more'));
      byId('replicas').replaceChildren(...rows);
      byId('replicas').classList.toggle('many', names.length > 3);
    }
    for (const box of this.stage.querySelectorAll('.processes')) {
      const found = own(...box.dataset.sides.split(' '));
      const known = [...box.children].map((child) => child.dataset.process).join();
      if (known !== found.join()) box.replaceChildren(...found.map((name) => stateLine(name, found.length > 1)));
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

  /** Where everything is on the screen: after a change of its size, or of what there is. */
  measure() {
    const origin = this.stage.getBoundingClientRect();
    if (!origin.width) return;
    const relative = (element) => {
      const { left, top, width, height } = element.getBoundingClientRect();
      return { x: left - origin.left, y: top - origin.top, width, height };
    };
    const found = (selector, name) =>
      Object.fromEntries([...this.stage.querySelectorAll(selector)].map((one) => [one.dataset[name], relative(one)]));
    this.boxes = found('.dots', 'place');
    this.stations = found('.station', 'station');
    this.bin = relative(byId('dropped').querySelector('.bin'));
    this.drawPaths();
    this.fence();
    this.arcsKey = null;
    if (this.state) this.update(this.state, true);
    this.drawWaits();
  }

  get isUpright() {
    const { prompts, generator } = this.stations;
    return generator.y > prompts.y + prompts.height / 2;
  }

  /** Where stations lie under each other, dots are seen where there is no text: in their boxes, and between stations. */
  fence() {
    const ground = [...Object.values(this.boxes), grown(this.bin, 2)];
    const stations = Object.values(this.stations).sort((a, b) => a.y - b.y);
    for (let i = 0; i + 1 < stations.length; i++) {
      const [{ x, y, width, height }, below] = [stations[i], stations[i + 1]];
      ground.push({ x, y: y + height, width, height: Math.max(0, below.y - y - height) });
    }
    this.clip.replaceChildren(...ground.map((box) => svg('rect', box)));
    if (this.isUpright) this.dots.setAttribute('clip-path', 'url(#open-ground)');
    else this.dots.removeAttribute('clip-path');
  }

  drawPaths() {
    const { prompts, generator, rewards, batching, trainer } = this.stations;
    const order = [prompts, generator, rewards, batching, trainer];
    const ways = order.slice(1).map((b, i) => {
      const a = order[i];
      if (this.isUpright) return `M${a.x + a.width / 2},${a.y + a.height}L${b.x + b.width / 2},${b.y}`;
      return `M${a.x + a.width},${a.y + 34}L${b.x},${b.y + 34}`;
    });
    const route = this.returnRoute(this.stations);
    const arrow = (kind, d) => svg('path', { class: kind, d, 'marker-end': 'url(#head)' });
    this.paths.replaceChildren(...ways.map((d) => arrow('way', d)), arrow('return', route));
    this.chips.style.setProperty('--route', `path("${route}")`);
  }

  /** From the trainer, by way of weight sync, to the generators. */
  returnRoute({ trainer: t, weights: w, generator: g }) {
    if (this.isUpright) {
      const x = Math.max(t.x + t.width, g.x + g.width) + 14;
      const [from, to] = [t.y + 30, g.y + 40];
      return `M${t.x + t.width},${from}H${x - 8}Q${x},${from} ${x},${from - 8}V${to + 8}Q${x},${to} ${x - 8},${to}H${g.x + g.width}`;
    }
    const y = w.y + w.height / 2;
    const [from, to] = [t.x + t.width / 2, g.x + g.width / 2];
    return `M${from},${t.y + t.height}V${y - 10}Q${from},${y} ${from - 10},${y}H${to + 10}Q${to},${y} ${to},${y - 10}V${g.y + g.height}`;
  }

  /** Show the state of a passage. `jump`: time has not just gone on, so nothing moves, it is there. */
  update(state, jump) {
    this.state = state;
    if (jump) this.clear();
    const gone = [...this.byOrdinal.values()].filter((dot) => !state.groups.has(dot.ordinal));
    for (const dot of gone) this.send(dot);
    const rows = [...state.groups.values()];
    if (jump) rows.sort((a, b) => a[GROUP.ordinal] - b[GROUP.ordinal]);
    const isNew = rows.map((row) => this.place(row, state, jump)).includes(true);
    if (isNew && !jump) this.dots.getBoundingClientRect(); // or the new ones would be where they belong at once
    for (const [place, slots] of this.slots) this.arrange(slots, this.boxes[place]);
    this.tellCounts(state);
    if (!this.stage.classList.contains('pointing')) this.hint();
    this.moveChips(state, jump);
    for (const dot of gone) leave(dot.element); // after all is put: the first one asks for the style of everything
  }

  clear() {
    this.dots.replaceChildren();
    this.byOrdinal.clear();
    this.slots.clear();
  }

  /** Give the dot of a group its place; whether it is a new one. */
  place(row, state, jump) {
    const ordinal = row[GROUP.ordinal];
    const known = this.byOrdinal.get(ordinal);
    const dot = known ?? new Dot(ordinal);
    if (!known) {
      this.byOrdinal.set(ordinal, dot);
      const { x, y, width, height } = this.boxes.prompts ?? {};
      if (!jump && width) dot.put([x + width / 2, y + height / 2, 2]);
      this.dots.append(dot.element);
    }
    const place = placeOf(row, this.numReplicas);
    if (place !== dot.place) {
      this.free(dot);
      dot.place = place;
      dot.slot = this.take(place, ordinal);
    }
    dot.row = row;
    const shares = { waiting: 0, sampling: row[GROUP.finished] / this.completions };
    dot.show(shares[row[GROUP.phase]] ?? 1, ageClass(state.version - row[GROUP.version]));
    return !known;
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
    while (slots.length && slots.at(-1) === null) slots.pop();
  }

  arrange(slots, box) {
    if (!box) return;
    slots.forEach((ordinal, slot) => {
      if (ordinal !== null) this.byOrdinal.get(ordinal).put(slotPlace(slot, slots.length, box));
    });
  }

  /** To the trainer's lower edge where it was trained, else to the bin. */
  send(dot) {
    this.free(dot);
    this.byOrdinal.delete(dot.ordinal);
    const isTrained = dot.place === 'training';
    const [box, radius] = isTrained ? [this.stations.trainer, 1] : [this.bin, 2.5];
    dot.put([box.x + box.width / 2, isTrained ? box.y + box.height - 4 : box.y + box.height / 2, radius]);
    dot.show(1, isTrained ? dot.kind : 'gone');
  }

  /** Weights on their way: a chip for every replica that is behind. */
  moveChips(state, jump) {
    const behind = [...state.versions].filter(([replica, version]) => version < state.version && replica < MAX_REPLICAS);
    const goals = new Map(behind.map(([replica]) => [replica, `${80 - 6 * replica}%`]));
    for (const [replica, chip] of this.chipOf) {
      if (goals.has(replica) && chip.textContent === `v${state.version}`) continue;
      this.chipOf.delete(replica);
      if (goals.has(replica) || jump || !state.versions.has(replica)) chip.remove();
      else chip.style.offsetDistance = '100%';
      leave(chip);
    }
    for (const [replica, goal] of goals) {
      if (this.chipOf.has(replica)) continue;
      const chip = el('span', { class: 'chip' }, `v${state.version}`);
      this.chipOf.set(replica, chip);
      this.chips.append(chip);
      if (!jump) chip.getBoundingClientRect(); // it begins at the trainer
      chip.style.offsetDistance = goal;
    }
  }

  tellCounts(state) {
    const [waiting, sampling, scoring, ready, training] = state.counts();
    const next = `next: no. ${count(state.nextOrdinal)}`;
    say(byId('count-prompts'), waiting ? `${plural(waiting, 'group')} to sample again` : next);
    say(byId('count-scoring'), scoring ? `${count(scoring)} here or on the way on` : 'nothing to score');
    say(byId('count-ready'), this.isKnown ? `${count(ready)} of ${this.perStep} ready` : 'nothing yet');
    say(byId('count-training'), training ? `step ${state.version} on ${plural(training, 'group')}` : `has made ${plural(state.version, 'step')}`);
    const { no_signal: same = 0, failed = 0, stale = 0 } = state.fates;
    const dropped = [`${count(same)} without signal`];
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
    this.waits = waits.map(([from, to, words]) => [from, this.stationOf(to), words]);
    this.drawWaits();
  }

  /** The station that a side is shown in: that of environments is that of rewards. */
  stationOf(side) {
    return this.stage.querySelector(`.processes[data-sides~="${side}"]`)?.closest('.station').dataset.station ?? side;
  }

  drawWaits() {
    const key = this.waits.map(([from, to]) => `${from}>${to}`).join();
    if (!this.stations || key === this.arcsKey) return;
    this.arcsKey = key;
    for (const element of this.stage.querySelectorAll('.station')) {
      const { station } = element.dataset;
      const own = this.waits.find(([from]) => from === station);
      element.classList.toggle('waits', own !== undefined);
      element.classList.toggle('awaited', this.waits.some(([, to]) => to === station));
      const title = element.querySelector('h3');
      if (own) title.dataset.waits = own[2];
      else delete title.dataset.waits;
    }
    this.arcs.replaceChildren(...this.waits.flatMap(([from, to, words]) => this.arc(this.stations[from], this.stations[to], words)));
  }

  arc(a, b, words) {
    if (!a || !b || a === b) return [];
    const arrow = (d) => svg('path', { class: 'wait', d, 'marker-end': 'url(#wait-head)' });
    if (this.isUpright) {
      const [ya, yb] = [a.y + a.height / 2, b.y + b.height / 2];
      return [arrow(`M${a.x},${ya}C${a.x - 20},${ya} ${b.x - 20},${yb} ${b.x - 3},${yb}`)];
    }
    const [xa, xb] = [a.x + a.width / 2, b.x + b.width / 2];
    const label = svg('text', { class: 'wait-label', x: (xa + xb) / 2, y: a.y - 30, 'text-anchor': 'middle' }, words);
    return [arrow(`M${xa},${a.y}C${xa},${a.y - 34} ${xb},${b.y - 34} ${xb},${b.y - 3}`), label];
  }

  /** The group whose dot is nearest to the pointer, if it is near. */
  at(event) {
    const origin = this.stage.getBoundingClientRect();
    const far = ([x, y]) => Math.hypot(x + origin.left - event.clientX, y + origin.top - event.clientY);
    const near = [...this.byOrdinal].map(([ordinal, dot]) => [far(dot.target), ordinal]).filter(([distance]) => distance < 14);
    return near.length ? near.sort((a, b) => a[0] - b[0])[0][1] : null;
  }

  tell(event) {
    const ordinal = this.at(event);
    this.stage.classList.toggle('pointing', ordinal !== null);
    if (ordinal === null) this.hint();
    else say(byId('loop-readout'), this.inWords(this.byOrdinal.get(ordinal).row));
  }

  hint() {
    const isOver = this.state !== null && !this.byOrdinal.size && this.state.version >= this.numSteps;
    say(byId('loop-readout'), isOver ? EMPTY : HINT);
  }

  inWords(row) {
    const phase = row[GROUP.phase];
    const words = {
      waiting: 'to be sampled again',
      sampling: `sampled on generator-${row[GROUP.replica]}, ${row[GROUP.finished]} of ${this.completions} answers finished`,
      scoring: 'sampled; being scored, or on its way to the trainer, which takes what is scored between two steps',
      ready: 'scored, waits for its step',
      training: `trained in step ${row[GROUP.step]}`,
    }[phase];
    const reward = row[GROUP.reward] === null ? '' : `, mean reward ${number(row[GROUP.reward])}`;
    const from = phase === 'waiting' ? '' : `, from version ${row[GROUP.version]} (${age(this.state.version - row[GROUP.version])})`;
    return `Group ${row[GROUP.ordinal]}: ${words}${from}${reward}.`;
  }
}

const grown = ({ x, y, width, height }, by) => ({ x: x - by, y: y - by, width: width + 2 * by, height: height + 2 * by });

/** One process: its state now, and what it did in the last seconds as a bar. */
function stateLine(name, isNamed) {
  return el(
    'div',
    { class: 'process', 'data-process': name },
    el('p', { class: 'now' }, isNamed ? `${name}: ` : '', el('span', { class: 'state' }, '–')),
    el('div', { class: 'mix', 'aria-hidden': true }),
  );
}
