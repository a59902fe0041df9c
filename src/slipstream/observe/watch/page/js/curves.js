// Metrics over steps, small and many; and the headline, which is their values where the slider is.

import { byId, el, key, say, svg } from './dom.js';
import { metricName, number } from './format.js';

const WIDTH = 300;
const HEIGHT = 92;
const CHARTS = [
  ['Reward', ['reward', 'eval_reward'], ['of the batch', 'held-out']],
  ['Held-out accuracy', ['eval_accuracy'], ['greedy']],
  ['Staleness, in steps', ['staleness_mean', 'staleness_max'], ['mean', 'most']],
  ['Tokens per second', ['generated_tokens_per_s', 'trained_tokens_per_s'], ['generated', 'trained']],
  ['|logprob of trainer − of generator|', ['logprob_diff_mean'], ['mean, nats']],
  ['KL to the reference', ['kl_reference'], ['nats per token']],
  ['Entropy', ['entropy'], ['nats']],
  ['Answer length', ['completion_tokens_mean'], ['tokens']],
  ['Groups without signal', ['no_signal_frac'], ['share']],
  ['Gradient norm', ['grad_norm'], ['before clipping']],
];
const isSparse = (name) => name.startsWith('eval_'); // measured now and then: with dots

/** The value at or before `step`; null before the first. */
const valueAt = (points, step) => points.findLast((point) => point[0] <= step)?.[1] ?? null;

export class Curves {
  /** `onStep(step)`: somebody wants to go there. */
  constructor(onStep) {
    Object.assign(this, { onStep, charts: [], curves: {}, extra: [], step: 0 });
    const select = byId('add-curve');
    select.addEventListener('change', () => {
      if (select.value) this.extra.push(select.value);
      select.value = '';
      this.names = '';
      this.onChange?.();
    });
  }

  setUp(info) {
    this.known = new Set(info.curves);
    if (info.curves.join() === this.names) return;
    this.names = info.curves.join();
    const plan = [...CHARTS, ...this.extra.map((name) => [metricName(name), [name], ['']])];
    const series = ([, names, labels]) => names.map((name, i) => [name, labels[i]]).filter(([name]) => this.known.has(name));
    this.charts = plan.filter((chart) => series(chart).length).map((chart) => new Chart(chart[0], series(chart), this.onStep));
    const options = info.curves.filter((name) => !this.wanted().includes(name)).sort();
    byId('add-curve').replaceChildren(
      el('option', { value: '' }, 'a curve …'),
      ...options.map((name) => el('option', { value: name }, metricName(name))),
    );
    const nothing = el('p', { class: 'muted' }, info.curves.length ? 'Add a curve to see it here.' : 'No step is done yet.');
    byId('charts').replaceChildren(...(this.charts.length ? this.charts.map((chart) => chart.element) : [nothing]));
    this.load(this);
  }

  wanted() {
    return this.charts.flatMap((chart) => chart.series.map(([name]) => name));
  }

  load({ curves }) {
    this.curves = curves;
    for (const chart of this.charts) chart.draw(curves);
    this.show(this.step + 1, true);
  }

  /** The slider is where the policy has version `version`: the last step that is done is the one before. */
  show(version, isForced = false) {
    const step = version - 1;
    if (step === this.step && !isForced) return;
    this.step = step;
    for (const chart of this.charts) chart.show(this.curves, step);
  }

  value(name, step) {
    const curve = this.curves[name];
    return curve ? valueAt(curve.points, step) : null;
  }

  has(name) {
    return this.known?.has(name) ?? false;
  }

  first(name) {
    return this.curves[name]?.points[0]?.[1] ?? null;
  }
}

class Chart {
  /** `series`: [metric, its label] of each line. */
  constructor(title, series, onStep) {
    this.series = series;
    this.values = series.map(() => el('b'));
    const keys = series.map(([, label], index) => key(`series-${index}`, label ? `${label} ` : '', this.values[index]));
    this.picture = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': title });
    [this.low, this.high, this.last] = [el('span'), el('span'), el('span')];
    const plot = el('div', { class: 'plot' }, el('div', { class: 'y-axis', 'aria-hidden': true }, this.high, this.low), this.picture);
    plot.addEventListener('click', (event) => {
      const box = this.picture.getBoundingClientRect();
      onStep(Math.round(this.right * ((event.clientX - box.left) / box.width)));
    });
    const axis = el('div', { class: 'x-axis', 'aria-hidden': true }, el('span', {}, 'step 1'), this.last);
    this.element = el('figure', { class: 'chart' }, el('figcaption', {}, title), el('p', { class: 'keys' }, ...keys), plot, axis);
    this.right = 1;
  }

  draw(curves) {
    const found = this.series.map(([name]) => curves[name]?.points ?? []);
    if (!found.flat().length) return;
    this.right = Math.max(1, ...found.flat().map((point) => point[0]));
    const ends = this.series.map(([name]) => curves[name]?.axis).filter(Boolean); // the server knows the rule
    const [low, most] = [Math.min(...ends.map((one) => one[0])), Math.max(...ends.map((one) => one[1]))];
    const high = most > low ? most : low + 1; // of all lines together: one of zeros alone says nothing of the others
    const x = (step) => ((step / this.right) * WIDTH).toFixed(2);
    const y = (value) => (HEIGHT - 4 - ((value - low) / (high - low)) * (HEIGHT - 8)).toFixed(2);
    this.cursor = svg('line', { class: 'cursor', y1: 0, y2: HEIGHT, x1: 0, x2: 0, 'vector-effect': 'non-scaling-stroke' });
    const lines = found.flatMap((points, index) => {
      const places = (column) => points.map((point) => `${x(point[0])},${y(point[column])}`);
      const path = (kind, d) => svg('path', { class: `${kind} series-${index}`, d, 'vector-effect': 'non-scaling-stroke' });
      const isJoined = points.some((point) => point[3] > point[2]);
      const band = isJoined ? [path('band', `M${[...places(3), ...places(2).reverse()].join('L')}Z`)] : [];
      // A line of no length with round ends is a dot that stays round when the picture is stretched.
      const dots = isSparse(this.series[index][0]) ? [path('dots-of', `M${places(1).join('h0M')}h0`)] : [];
      return [...band, path('line', `M${places(1).join('L')}`), ...dots];
    });
    this.picture.replaceChildren(...lines, this.cursor);
    say(this.low, number(low));
    say(this.high, number(high));
    say(this.last, String(Math.round(this.right) + 1)); // steps count from 0 in metrics.jsonl, from 1 on the pages
  }

  show(curves, step) {
    this.series.forEach(([name], index) => {
      // What is measured of a version lies at its number: one more than the step that made it.
      const at = isSparse(name) ? step + 1 : step;
      say(this.values[index], number(valueAt(curves[name]?.points ?? [], at)));
    });
    const x = (Math.max(0, step) / this.right) * WIDTH;
    this.cursor?.setAttribute('x1', x);
    this.cursor?.setAttribute('x2', x);
  }
}
