// Alarms as they are at the slider's time.

import { byId, el } from './dom.js';
import { number, printable } from './format.js';

export class Alarms {
  constructor(onStep) {
    this.onStep = onStep;
    this.alarms = [];
    this.key = '';
  }

  setUp(info) {
    this.alarms = info.alarms;
    byId('alarms').hidden = !this.alarms.length;
    this.key = '';
  }

  /** `version`: the policy's where the slider is. */
  show(version) {
    const begun = this.alarms.map((one) => one.began < version);
    const over = this.alarms.map((one) => one.ended !== null && one.ended < version);
    const key = [...begun, ...over].join();
    if (key === this.key) return;
    this.key = key;
    byId('alarm-list').replaceChildren(...this.alarms.map((one, index) => this.item(one, begun[index], over[index])));
  }

  item(alarm, hasBegun, isOver) {
    const kind = !hasBegun ? 'later' : isOver ? 'over' : `on ${alarm.severity}`;
    const ended = alarm.ended === null ? 'on' : `to ${alarm.ended}`;
    return el(
      'li',
      { class: `alarm ${kind}` },
      el(
        'button',
        { type: 'button', onclick: () => this.onStep(alarm.began) },
        el('b', {}, printable(alarm.name).replaceAll('_', ' ')),
        el('span', {}, ` from step ${alarm.began} ${ended}: ${number(alarm.value)} (threshold ${number(alarm.threshold)})`),
      ),
      el('p', {}, printable(alarm.text)),
    );
  }
}
