// What each process did around now: one lane each, and the state it is in.

import { byId, choices, context2d, el, key, say, style } from './dom.js';
import { clock, duration, percent } from './format.js';

export const ZOOMS = [5, 20, 60, 300];
const PAST = 0.72; // of a lane lies before the slider's time
const RECENT_S = 10;
const WAITS = 0.3; // of the last second: a side that waits so much is told of
const BAR = { start: 0, end: 1, state: 2, share: 3, args: 4, also: 5 };

/** Seconds by state within a window; what nothing covers is left out. */
export function secondsBy(bars, start, end) {
  const found = new Map();
  const add = (state, seconds) => found.set(state, (found.get(state) ?? 0) + seconds);
  for (const bar of bars) {
    const inside = Math.min(bar[BAR.end], end) - Math.max(bar[BAR.start], start);
    if (inside <= 0) continue;
    add(bar[BAR.state], inside * bar[BAR.share]);
    for (const [state, share] of Object.entries(bar[BAR.also])) add(state, inside * share);
  }
  return found;
}

/** The bar at `time`, or the last one that had ended no more than a second before. */
export function barAt(bars, time) {
  let found = null;
  for (const bar of bars) {
    if (bar[BAR.start] > time) break;
    if (bar[BAR.end] > time - 1) found = bar;
  }
  return found;
}

export class Lanes {
  constructor(onSeek) {
    Object.assign(this, { onSeek, zoom: 20, lanes: {}, window: { from: 0, to: 0 }, states: {}, time: 0, told: '' });
    this.rows = byId('lane-rows');
    const zoom = (seconds) => {
      this.zoom = seconds;
      this.forget();
      this.onZoom?.();
    };
    byId('zoom').append(...choices('zoom', ZOOMS.map((seconds) => [seconds, duration(seconds)]), this.zoom, zoom));
    new ResizeObserver(() => this.draw()).observe(this.rows);
  }

  setUp(info) {
    this.states = info.states;
    say(byId('waiting'), info.waiting);
    const names = info.processes.map((one) => one.name);
    if (names.join() === this.names) return;
    this.names = names.join();
    this.canvases = new Map();
    this.labels = new Map();
    const rows = names.map((name) => {
      const canvas = el('canvas', { class: 'lane', role: 'img', 'aria-label': `Timeline of ${name}` });
      const now = el('span', { class: 'lane-state' });
      this.canvases.set(name, canvas);
      this.labels.set(name, now);
      canvas.addEventListener('pointermove', (event) => this.tell(name, canvas, event));
      canvas.addEventListener('pointerleave', () => say(byId('lane-readout'), ''));
      canvas.addEventListener('click', (event) => this.onSeek(this.timeAt(canvas, event)));
      return el('div', { class: 'lane-row' }, el('p', { class: 'lane-label' }, el('b', {}, name), now), canvas);
    });
    this.axis = el('canvas', { class: 'axis', 'aria-hidden': true });
    this.rows.replaceChildren(...rows, el('div', { class: 'lane-row' }, el('p', { class: 'lane-label' }), this.axis));
  }

  span(time) {
    return { start: time - PAST * this.zoom, end: time + (1 - PAST) * this.zoom };
  }

  /** The window to ask for, where what is loaded does not reach; null where it does. */
  wanted(time, end) {
    const { start, end: stop } = this.span(time);
    const first = Math.max(0, Math.min(start, time - RECENT_S));
    const last = Math.min(stop, end);
    const { from, to } = this.window;
    if (from <= first && last <= to) return null;
    return { from: Math.max(0, first - this.zoom), to: last + this.zoom, parts: 700 };
  }

  load(answer) {
    this.lanes = answer.lanes;
    this.window = { from: answer.from, to: answer.to };
  }

  forget() {
    this.window = { from: 0, to: 0 };
  }

  show(time) {
    this.time = time;
    this.draw();
    const mixes = new Map();
    for (const [name, bars] of Object.entries(this.lanes)) {
      const bar = barAt(bars, time);
      const state = bar ? bar[BAR.state] : 'absent';
      const seconds = secondsBy(bars, time - RECENT_S, time);
      mixes.set(name, { state, seconds });
      const label = this.labels?.get(name);
      if (label) say(label, bar ? this.words(state) : 'not there');
    }
    return mixes;
  }

  words = (state) => this.states[state]?.words ?? state.replaceAll('_', ' ');

  colour = (state) => this.states[state]?.colour ?? '#8c8c6b';

  /** [station, station it waits for, words] of the sides that wait for another, by what they did in the last second. */
  waits(time, sideOf) {
    const found = new Map();
    for (const [name, bars] of Object.entries(this.lanes)) {
      const side = sideOf.get(name);
      const seconds = secondsBy(bars, time - 1, time);
      const total = [...seconds.values()].reduce((sum, one) => sum + one, 0);
      for (const [state, spent] of seconds) {
        const other = this.states[state]?.awaited;
        if (other && other !== side && total > 0.2 && spent / total > WAITS) found.set(`${side}>${other}`, [side, other, this.words(state)]);
      }
    }
    return [...found.values()];
  }

  draw() {
    if (!this.canvases || !this.rows.clientWidth) return;
    const { start, end } = this.span(this.time);
    for (const [name, canvas] of this.canvases) {
      const { context, width, height } = context2d(canvas);
      const scale = width / (end - start);
      for (const bar of this.lanes[name] ?? []) {
        const left = Math.max(0, (bar[BAR.start] - start) * scale);
        const right = Math.min(width, (bar[BAR.end] - start) * scale);
        if (right <= 0 || left >= width || bar[BAR.state] === 'absent') continue;
        context.globalAlpha = 0.35 + 0.65 * bar[BAR.share];
        context.fillStyle = this.colour(bar[BAR.state]);
        const isWait = this.states[bar[BAR.state]]?.kind === 'wait';
        const inset = isWait ? height * 0.3 : 0;
        context.fillRect(left, inset, Math.max(0.6, right - left), height - 2 * inset);
      }
      context.globalAlpha = 1;
      playhead(context, width * PAST, height);
    }
    this.drawAxis(start, end);
    this.tellStates(start, end);
  }

  drawAxis(start, end) {
    const { context, width, height } = context2d(this.axis);
    const apart = [0.5, 1, 2, 5, 10, 30, 60, 120].find((seconds) => (seconds / (end - start)) * width > 56) ?? 300;
    context.fillStyle = style('--muted');
    context.font = `11px ${style('--font')}`;
    context.textAlign = 'center';
    for (let tick = Math.ceil(Math.max(0, start) / apart) * apart; tick < end; tick += apart) {
      const x = ((tick - start) / (end - start)) * width;
      context.fillRect(x, 0, 1, 4);
      if (x > 16 && x < width - 16) context.fillText(clock(tick, apart < 1), x, height - 3);
    }
    playhead(context, width * PAST, 6);
  }

  /** Which colour is what, of the states that are to be seen. */
  tellStates(start, end) {
    const seen = new Map();
    for (const bars of Object.values(this.lanes)) {
      for (const [state, seconds] of secondsBy(bars, start, end)) seen.set(state, (seen.get(state) ?? 0) + seconds);
    }
    const least = 0.004 * (end - start);
    const states = [...seen].filter(([state, seconds]) => seconds > least && state !== 'absent').map(([state]) => state);
    states.sort((a, b) => this.words(a).localeCompare(this.words(b)));
    if (states.join() === this.told) return;
    this.told = states.join();
    byId('state-legend').replaceChildren(
      ...states.map((state) => {
        const entry = key(this.states[state]?.kind === 'wait' ? 'thin' : '', this.words(state));
        entry.firstChild.style.backgroundColor = this.colour(state);
        return entry;
      }),
    );
  }

  timeAt(canvas, event) {
    const box = canvas.getBoundingClientRect();
    const { start, end } = this.span(this.time);
    return start + ((event.clientX - box.left) / box.width) * (end - start);
  }

  tell(name, canvas, event) {
    const bar = barAt(this.lanes[name] ?? [], this.timeAt(canvas, event));
    if (!bar) return say(byId('lane-readout'), '');
    const args = Object.entries(bar[BAR.args]).map(([key, value]) => `, ${key} ${value}`);
    const also = Object.entries(bar[BAR.also]).map(([state, share]) => `, ${this.words(state)} ${percent(share)}`);
    const length = duration(bar[BAR.end] - bar[BAR.start]);
    const rest = bar[BAR.share] < 0.995 ? ` ${percent(bar[BAR.share])}` : '';
    return say(byId('lane-readout'), `${name}: ${this.words(bar[BAR.state])}${rest}${args.join('')}${also.join('')}; ${length}`);
  }
}

/** The mix of the last seconds as coloured parts of a bar. */
export function drawMix(element, seconds, colour) {
  const total = [...seconds.values()].reduce((sum, one) => sum + one, 0);
  const shares = [...seconds].filter(([state]) => state !== 'absent').map(([state, spent]) => [state, spent / (total || 1)]);
  shares.sort((a, b) => b[1] - a[1]);
  while (element.children.length < shares.length) element.append(el('i'));
  while (element.children.length > shares.length) element.lastChild.remove();
  shares.forEach(([state, share], index) => {
    const part = element.children[index];
    part.style.flexGrow = share.toFixed(3);
    part.style.backgroundColor = colour(state);
  });
}

function playhead(context, x, height) {
  context.fillStyle = style('--ink');
  context.fillRect(Math.round(x) - 0.5, 0, 1.5, height);
}
