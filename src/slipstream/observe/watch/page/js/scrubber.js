// The slider over the whole run, and behind it how many groups were where.

import { PHASES } from './api.js';
import { byId, context2d, style } from './dom.js';
import { clock } from './format.js';

const THUMB = 12; // width, as in watch.css

export class Scrubber {
  constructor(onSeek) {
    this.slider = byId('slider');
    this.canvas = byId('overview');
    this.overview = null;
    this.slider.addEventListener('input', () => onSeek(Number(this.slider.value)));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  load(overview) {
    this.overview = overview;
    this.draw();
  }

  show(playhead, step) {
    const [min, max] = [playhead.begin.toFixed(3), playhead.end.toFixed(3)];
    if (this.slider.max !== max || this.slider.min !== min) {
      Object.assign(this.slider, { min, max });
      this.begin = playhead.begin;
      this.draw();
    }
    this.slider.value = playhead.time;
    this.slider.setAttribute('aria-valuetext', `${clock(playhead.time)} of ${clock(playhead.end)}, version ${step}`);
  }

  draw() {
    const found = this.overview;
    const { context, width, height } = context2d(this.canvas);
    if (!found || !(found.end_s > (this.begin ?? 0))) return;
    const columns = PHASES.map((name) => found.phases[name] ?? []);
    const totals = columns[0].map((_, index) => columns.reduce((sum, column) => sum + column[index], 0));
    const most = Math.max(1, ...totals);
    // The middle of the slider's thumb goes from one half of its width to the other, and so does the picture.
    const begin = this.begin ?? 0;
    const x = (time) => THUMB / 2 + ((time - begin) / (found.end_s - begin)) * (width - THUMB);
    const base = totals.map(() => 0);
    PHASES.forEach((name, layer) => {
      context.fillStyle = style(`--phase-${name}`);
      columns[layer].forEach((count, index) => {
        const [low, high] = [base[index] / most, (base[index] + count) / most];
        base[index] += count;
        const left = Math.max(x(begin), x(found.start_s + index * found.width_s));
        const right = Math.min(x(found.end_s), x(found.start_s + (index + 1) * found.width_s));
        if (left < right) context.fillRect(left, height * (1 - high), right - left + 0.5, height * (high - low));
      });
    });
    context.fillStyle = style('--ink');
    for (const start of found.stretches.slice(1)) context.fillRect(x(start), 0, 1.5, height);
    for (const [time, , severity] of found.alarms) {
      context.fillStyle = style(severity === 'warning' ? '--bad' : '--warm');
      const at = x(time);
      context.beginPath();
      context.moveTo(at - 5, 0);
      context.lineTo(at + 5, 0);
      context.lineTo(at, 8);
      context.fill();
    }
  }
}
