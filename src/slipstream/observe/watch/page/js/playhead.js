// Where in the run's time the page is, and how that goes on. No DOM.

export const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 100];
const BEHIND_S = 2.5; // a live page shows what was so long ago: by then all files tell of it
const HURRY_S = 6;

export class Playhead {
  constructor() {
    this.time = 0;
    this.begin = 0; // a little before anything moves
    this.end = 0;
    this.speed = 1;
    this.isPlaying = false;
    this.isLive = false;
  }

  /** The run is known up to `end`: further than before, unless a resume has cut it. */
  reach(end) {
    this.end = end;
    this.time = Math.min(this.time, Math.max(this.begin, end));
  }

  /** `seconds` have passed for the viewer. `limit`: no further than what is loaded. */
  tick(seconds, limit = Infinity) {
    if (!this.isPlaying) return;
    const before = this.time;
    if (this.isLive) {
      const behind = this.end - BEHIND_S - this.time;
      if (behind > HURRY_S) this.time = this.end - BEHIND_S;
      else this.time += Math.max(0, seconds * (1 + 0.5 * behind));
      this.time = Math.max(before, Math.min(this.time, this.end));
    } else {
      this.time = Math.max(before, Math.min(this.time + seconds * this.speed, limit, this.end));
      if (this.time >= this.end) this.isPlaying = false;
    }
  }

  seek(time) {
    this.time = Math.min(Math.max(this.begin, time), Math.max(this.begin, this.end));
    this.isLive = false;
  }

  goLive() {
    this.isLive = true;
    this.isPlaying = true;
  }

  toggle() {
    this.isPlaying = !this.isPlaying;
    if (!this.isPlaying) this.isLive = false;
    else if (this.time >= this.end - 1e-3 && !this.isLive) this.time = this.begin;
  }

  faster(steps) {
    const place = SPEEDS.indexOf(this.speed) + steps;
    this.speed = SPEEDS[Math.min(Math.max(0, place), SPEEDS.length - 1)];
  }
}
