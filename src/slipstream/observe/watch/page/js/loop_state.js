// The loop at any time of a passage: its start, and the moves up to then. The server has folded the events.

import { GROUP, PHASES } from './api.js';

export class Passage {
  constructor(answer) {
    this.answer = answer;
    this.from = answer.from;
    this.to = answer.to;
    const kinds = [[answer.moves, this.move], [answer.swaps, this.swap], [answer.steps, this.step]];
    this.news = kinds.flatMap(([lines, take]) => lines.map((line) => ({ time: line[0], line, take })));
    this.news.sort((a, b) => a.time - b.time);
    this.rewind();
  }

  covers(time) {
    return this.from <= time && time <= this.to;
  }

  rewind() {
    const { loop } = this.answer;
    this.groups = new Map(loop.groups.map((row) => [row[GROUP.ordinal], row]));
    this.versions = new Map(Object.entries(loop.versions).map(([replica, version]) => [Number(replica), version]));
    this.version = loop.version;
    this.nextOrdinal = loop.next_ordinal;
    this.fates = { ...loop.fates };
    this.place = 0;
    this.time = this.from;
  }

  /** Go to `time`, which the passage covers; whether anything changes on the way. */
  goTo(time) {
    const isBack = time < this.time;
    if (isBack) this.rewind();
    const before = this.place;
    for (; this.news[this.place]?.time <= time; this.place++) {
      const { line, take } = this.news[this.place];
      take.call(this, ...line);
    }
    this.time = time;
    return isBack || this.place > before;
  }

  move(_, row, fate) {
    const ordinal = row[GROUP.ordinal];
    if (fate === null) {
      this.groups.set(ordinal, row);
      this.nextOrdinal = Math.max(this.nextOrdinal, ordinal + 1);
    } else {
      this.groups.delete(ordinal);
      this.fates[fate] = (this.fates[fate] ?? 0) + this.answer.every;
    }
  }

  swap(_, replica, version) {
    if (version < 0) this.versions.delete(replica);
    else this.versions.set(replica, version);
  }

  step(_, version) {
    this.version = version;
  }

  /** How many groups are in each phase, in the order of PHASES; of all, also where only some are told. */
  counts() {
    const { counts } = this.answer;
    if (counts) return counts.findLast(([time]) => time <= this.time)?.slice(1) ?? counts[0].slice(1);
    const phases = [...this.groups.values()].map((row) => row[GROUP.phase]);
    return PHASES.map((phase) => phases.filter((one) => one === phase).length);
  }
}
