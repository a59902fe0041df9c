// The loop at any time of a passage: its start, and the moves up to then. The server has folded the events.

import { GROUP, PHASES } from './api.js';

/** A group's row as an object. */
export function group(row) {
  return Object.fromEntries(Object.entries(GROUP).map(([name, column]) => [name, row[column]]));
}

export class Passage {
  constructor(answer) {
    this.answer = answer;
    this.from = answer.from;
    this.to = answer.to;
    this.every = answer.every;
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
    this.place = { moves: 0, swaps: 0, steps: 0 };
    this.time = this.from;
  }

  /** Go to `time`, which the passage covers; whether anything changes on the way. */
  goTo(time) {
    const isBack = time < this.time;
    if (isBack) this.rewind();
    const { moves, swaps, steps } = this.answer;
    const before = this.place.moves + this.place.swaps + this.place.steps;
    for (; this.place.moves < moves.length && moves[this.place.moves][0] <= time; this.place.moves++) {
      this.apply(moves[this.place.moves]);
    }
    for (; this.place.swaps < swaps.length && swaps[this.place.swaps][0] <= time; this.place.swaps++) {
      const [, replica, version] = swaps[this.place.swaps];
      if (version < 0) this.versions.delete(replica);
      else this.versions.set(replica, version);
    }
    for (; this.place.steps < steps.length && steps[this.place.steps][0] <= time; this.place.steps++) {
      this.version = steps[this.place.steps][1];
    }
    this.time = time;
    return isBack || this.place.moves + this.place.swaps + this.place.steps > before;
  }

  apply(move) {
    const row = move.slice(1, -1);
    const fate = move[move.length - 1];
    const ordinal = row[GROUP.ordinal];
    if (fate === null) {
      this.groups.set(ordinal, row);
      this.nextOrdinal = Math.max(this.nextOrdinal, ordinal + 1);
    } else {
      this.groups.delete(ordinal);
      this.fates[fate] = (this.fates[fate] ?? 0) + this.every;
    }
  }

  /** How many groups are in each phase, in the order of PHASES; of all, also where only some are told. */
  counts() {
    const { counts } = this.answer;
    if (counts) {
      let row = counts[0];
      for (const candidate of counts) {
        if (candidate[0] > this.time) break;
        row = candidate;
      }
      return row.slice(1);
    }
    const found = PHASES.map(() => 0);
    for (const row of this.groups.values()) found[row[GROUP.phase]] += 1;
    return found;
  }
}
