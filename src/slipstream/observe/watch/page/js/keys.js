// The keyboard, in one table: what it does and what the help says of it.

import { byId, el } from './dom.js';

const INTERACTIVE = 'button, input, select, textarea, summary, a, [tabindex]';

/** `actions`: name -> what to do. Keys work wherever the focus is not in something that has its own use for them. */
export function listen(actions) {
  const table = [
    [[' '], 'space', 'play or pause', actions.toggle],
    [['ArrowLeft'], '←', 'back one second; with shift ten', (event) => actions.move(event.shiftKey ? -10 : -1)],
    [['ArrowRight'], '→', 'on one second; with shift ten', (event) => actions.move(event.shiftKey ? 10 : 1)],
    [[',', 'PageDown'], ', or page down', 'previous step', () => actions.step(-1)],
    [['.', 'PageUp'], '. or page up', 'next step', () => actions.step(1)],
    [['Home'], 'home', 'to the first group', actions.start],
    [['End'], 'end', 'to the end', actions.end],
    [['-'], '−', 'slower', () => actions.faster(-1)],
    [['+', '='], '+', 'faster', () => actions.faster(1)],
    [['l'], 'L', 'follow the run', actions.live],
    [['r'], 'R', 'to the rollouts', actions.read],
    [['?'], '?', 'these keys', actions.help],
  ];
  byId('keys').replaceChildren(
    ...table.flatMap(([, name, words]) => [el('dt', {}, el('kbd', {}, name)), el('dd', {}, words)]),
    el('dt', {}, el('kbd', {}, '← → ↑ ↓')),
    el('dd', {}, 'from token to token, where one has the focus'),
  );
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId('help').open) return;
    const isSlider = event.target === byId('slider');
    if (!isSlider && event.target.closest?.(INTERACTIVE) && !(event.key.length === 1 && event.key !== ' ')) return;
    if (event.target.matches?.('select, textarea, input:not([type=range], [type=radio], [type=checkbox])')) return;
    const found = table.find(([keys]) => keys.includes(event.key) || keys.includes(event.key.toLowerCase()));
    if (!found) return;
    event.preventDefault();
    found[3](event);
  });
}
