// The page: one playhead, and everything that shows what was at its time.

import { get, Latest, live } from './api.js';
import { Curves } from './curves.js';
import { byId, el, say } from './dom.js';
import { clock, count, number, percent, printable } from './format.js';
import { drawMix, Lanes } from './lanes.js';
import { Passage } from './loop_state.js';
import { Playhead, SPEEDS } from './playhead.js';
import { Rollouts } from './rollouts.js';
import { Scrubber } from './scrubber.js';
import { Stage } from './stage.js';

const AHEAD_S = 6; // of the viewer's time that is loaded beyond the playhead
const SLOW_EVERY_MS = 250; // what need not be redrawn with every frame
const CALM_MS = 100; // between frames but for a replay: a live page shares its cores with the run
const REFRESH_MS = 4000; // curves and the outline of a run that goes on
const PLAY = 'M4 2.5v11L13.5 8z';
const PAUSE = 'M3.5 3h3v10h-3zM9.5 3h3v10h-3z';
const MAX_NAMES = 24; // of curves in one request, as in answers.py
const JUMP_S = 3; // from this distance on dots do not fly to where they belong, they are there
const OVER = ['done', 'failed', 'interrupted'];

const state = { info: null, pulse: null, passage: null, isLinked: true, error: '', wasJump: true };
const playhead = new Playhead();
const fail = (error) => {
  state.error = error.message;
  notice();
};
const requests = Object.fromEntries(['loop', 'lanes', 'info', 'curves', 'overview'].map((name) => [name, new Latest(fail)]));
const rollouts = new Rollouts(fail);
const stage = new Stage((ordinal) => {
  byId('follow').checked = false;
  rollouts.open(ordinal, true);
});
const lanes = new Lanes((time) => seek(time));
const scrubber = new Scrubber((time) => seek(time));
const curves = new Curves((step) => goToStep(step + 1));
const isOver = (pulse) => OVER.includes(pulse?.life);
let sideOf = new Map();
let slowAt = 0;
let refreshedAt = 0;

// Time

function seek(time, isLive = false) {
  const before = playhead.time;
  if (isLive) playhead.goLive();
  else playhead.seek(time);
  state.wasJump ||= Math.abs(playhead.time - before) > JUMP_S;
  showButtons();
  load();
  remember();
}

/** Make the address a link to this moment, once nothing has moved for a while: browsers refuse many in a row. */
function remember() {
  clearTimeout(remember.timer);
  remember.timer = setTimeout(() => {
    try {
      history.replaceState(null, '', playhead.isLive ? '#live' : `#t=${playhead.time.toFixed(2)}`);
    } catch {
      // refused: the address stays that of a moment before
    }
  }, 300);
}

/** Go to the moment that the page's address names; whether it names one. */
function followLink() {
  const linked = /^#t=([\d.]+)$/.exec(location.hash);
  if (linked === null) return false;
  playhead.isPlaying = false;
  seek(Number(linked[1]));
  return true;
}

/** Where step `step` begins, or the end of the last one. */
async function goToStep(step) {
  const found = await get('step', { step: Math.max(0, step) }).catch(fail);
  if (!found) return;
  if (found.start_s !== null) seek(found.start_s + 1e-3); // times are rounded
  else if (found.steps) seek(playhead.end);
}

async function moveSteps(steps) {
  const found = await get('step', { at: playhead.time + 1e-3 }).catch(fail);
  if (found) await goToStep(found.step + steps);
}

function toggle() {
  playhead.toggle();
  showButtons();
  remember();
}

function goLive() {
  seek(playhead.end, true);
}

function showButtons() {
  document.body.classList.toggle('replayed', playhead.isPlaying && !playhead.isLive);
  byId('play-icon').setAttribute('d', playhead.isPlaying ? PAUSE : PLAY);
  byId('play').setAttribute('aria-label', playhead.isPlaying ? 'Pause' : 'Play');
  byId('speed').value = String(playhead.speed);
  byId('speed').disabled = playhead.isLive;
  byId('go-live').hidden = state.pulse === null || isOver(state.pulse);
  byId('go-live').setAttribute('aria-pressed', String(playhead.isLive));
}

// Loading

function load() {
  loadLoop();
  loadLanes();
}

/** Keep what the playhead needs next: a passage that covers its time, and goes on from there. */
function loadLoop() {
  requests.loop.run(async () => {
    const { time, end, speed } = playhead;
    const ahead = playhead.isLive ? AHEAD_S : Math.max(AHEAD_S, 2 * AHEAD_S * speed);
    const { passage } = state;
    const isCovered = passage !== null && passage.covers(time) && passage.answer.revision === state.pulse?.revision;
    if (isCovered && (passage.to >= end - 1e-3 || passage.to - time > ahead / 2)) return;
    const answer = await get('loop', { from: time.toFixed(4), to: Math.min(end, time + ahead).toFixed(4) });
    const next = new Passage(answer);
    // The playhead has gone on meanwhile: what was drawn goes on, too, where the new passage takes over.
    state.wasJump ||= !(isCovered || (passage !== null && passage.to >= next.from && passage.from <= next.from));
    if (next.covers(playhead.time) || next.from === next.to) state.passage = next;
    else state.passage ??= next;
  });
}

function loadLanes() {
  const query = lanes.wanted(playhead.time, playhead.end);
  if (query === null) return;
  requests.lanes.run(async () => {
    lanes.load(await get('lanes', { from: query.from.toFixed(3), to: query.to.toFixed(3), parts: query.parts }));
  });
}
lanes.onZoom = () => load();

function loadCurves() {
  requests.curves.run(async () => {
    const [names, found] = [curves.wanted(), {}];
    for (let first = 0; first < names.length; first += MAX_NAMES) {
      const answer = await get('curves', { names: names.slice(first, first + MAX_NAMES).join(',') });
      Object.assign(found, answer.curves);
    }
    if (names.length) curves.load({ curves: found });
  });
}

curves.onChange = () => {
  curves.setUp(state.info);
  loadCurves();
};

function loadOverview() {
  requests.overview.run(async () => scrubber.load(await get('overview', { points: 400, from: playhead.begin })));
}

async function loadInfo() {
  const info = await get('run');
  if (JSON.stringify(info.alarms) !== JSON.stringify(state.info?.alarms)) showAlarms.shown = null;
  state.info = info;
  state.pulse ??= info;
  playhead.begin = info.begin_s;
  notice();
  document.title = `${info.name} – Slipstream`;
  say(byId('name'), info.name);
  const { recipe, model, batch, mode } = info.facts;
  say(byId('facts'), [recipe, model, batch, mode].filter(Boolean).join(' · '));
  sideOf = new Map(info.processes.map((one) => [one.name, one.side]));
  for (const part of [stage, lanes, curves]) part.setUp(info);
  loadCurves();
  loadOverview();
}

// News of the run

function onPulse(pulse) {
  const before = state.pulse;
  state.pulse = pulse;
  state.error = '';
  if (before !== null && pulse.revision !== before.revision) {
    lanes.forget();
    state.wasJump = true;
  }
  const isAtEnd = isOver(pulse) && !playhead.isPlaying && playhead.time >= playhead.end - 1e-3;
  playhead.reach(pulse.end_s);
  if (isAtEnd) playhead.seek(playhead.end); // its files are still being read
  if (isOver(pulse) && playhead.isLive && playhead.time >= playhead.end - 3) playhead.isLive = false;
  const isNews = ['revision', 'num_alarms'].some((name) => pulse[name] !== before?.[name]) || isOver(pulse) !== isOver(before);
  const isDue = performance.now() - refreshedAt > REFRESH_MS && pulse.end_s !== before?.end_s;
  if (isNews || isDue || (pulse.life !== 'waiting' && !state.info?.dials)) {
    refreshedAt = performance.now();
    requests.info.run(loadInfo);
  }
  if (playhead.isLive) lanes.forget();
  showPulse(pulse);
  showButtons();
  notice();
  load();
}

/** Whether the run goes on, and who starves, once there are steps to tell it by. */
function showPulse({ verdict, verdict_steps: steps, life, silent_s: silent }) {
  byId('verdict').hidden = !verdict;
  const isResumed = state.info?.attempts > 1;
  const parts = [isResumed && 'since the resume', steps !== null && `up to step ${count(steps)}`].filter(Boolean);
  const told = parts.join(', ') || 'the whole run';
  say(byId('verdict').firstElementChild, `${told[0].toUpperCase()}${told.slice(1)}: `);
  say(byId('verdict').lastElementChild, verdict ?? '');
  const words = { waiting: 'has not begun', silent: `no news for ${clock(silent)}` };
  say(byId('life'), words[life] ?? life);
  byId('life').className = `life ${life}`;
}

function notice() {
  const { pulse } = state;
  const said = [];
  if (!state.isLinked) said.push('The server of this page does not answer. It tries again by itself.');
  if (pulse?.failure) said.push(`The server does not read the run's files any more: ${printable(pulse.failure)}.`);
  if (state.error) said.push(state.error);
  if (pulse?.progress < 0.999) said.push(`Reading the run's files: ${percent(pulse.progress)}.`);
  else if (pulse?.life === 'waiting') said.push(`There are no events in ${state.info?.folder ?? 'the folder'} yet. This page begins by itself when the run does.`);
  if (pulse?.life === 'silent') said.push('Nothing was written for a while: the run was killed or stopped, or its machine is away.');
  if (pulse?.damaged) said.push(`${number(pulse.damaged)} lines of its files could not be read.`);
  if (state.info?.error) said.push(`The run ended: ${state.info.error}`);
  byId('notice').hidden = !said.length;
  say(byId('notice'), said.join(' '));
}

// Showing

function frame(now) {
  const seconds = Math.min(0.5, (now - (frame.before ?? now)) / 1000);
  frame.before = now;
  const { passage } = state;
  const limit = passage && !playhead.isLive && passage.covers(playhead.time) ? passage.to : Infinity;
  const wasPlaying = playhead.isPlaying;
  playhead.tick(seconds, limit);
  const isBehind = passage !== frame.shown || passage?.time !== playhead.time;
  if (passage && passage.covers(playhead.time) && (isBehind || state.wasJump)) {
    const isJump = state.wasJump || playhead.time < passage.time || seconds * playhead.speed > 2;
    const hasChanged = passage.goTo(playhead.time) || isJump || passage !== frame.shown;
    state.wasJump = false;
    frame.shown = passage;
    if (hasChanged) stage.update(passage, isJump);
  } else if (passage && !passage.covers(playhead.time)) {
    state.wasJump = true;
  }
  scrubber.show(playhead, passage?.version ?? 0);
  if (lanes.time !== playhead.time || lanes.window !== frame.lanes) {
    frame.lanes = lanes.window;
    frame.mixes = lanes.show(playhead.time);
  }
  if (now - slowAt > SLOW_EVERY_MS) {
    slowAt = now;
    showSlowly(passage);
  }
  if (wasPlaying !== playhead.isPlaying) showButtons();
  if (playhead.isPlaying) load();
  if (playhead.isPlaying && !playhead.isLive) requestAnimationFrame(frame);
  else setTimeout(requestAnimationFrame, CALM_MS, frame);
}

function showSlowly(passage) {
  const version = passage?.version ?? 0;
  const tenths = playhead.end < 3600;
  say(byId('clock'), `${clock(playhead.time, tenths)} / ${clock(playhead.end, tenths)}`);
  curves.show(version);
  showAlarms(version);
  if (state.pulse?.num_groups) rollouts.show(version);
  headline(version);
  stage.setWaits(lanes.waits(playhead.time, sideOf));
  for (const [name, { state: now, seconds }] of frame.mixes ?? []) {
    const box = byId('stage').querySelector(`[data-process="${CSS.escape(name)}"]`);
    if (!box) continue;
    const word = box.querySelector('.state');
    say(word, lanes.words(now));
    word.classList.toggle('is-wait', lanes.states[now]?.is_missed === true);
    drawMix(box.querySelector('.mix'), seconds, lanes.colour);
  }
}

function headline(version) {
  const step = version - 1;
  const { dials } = state.info ?? {};
  const at = (name) => curves.value(name, step);
  const [measure, name, words] = curves.has('eval_accuracy')
    ? ['eval_accuracy', 'accuracy', percent]
    : ['eval_reward', 'mean reward', number];
  const [held, first] = [curves.value(measure, version), curves.first(measure)];
  const tiles = [
    ['steps done', `${version}`, dials ? `of ${count(dials.steps)}` : ''],
    ['reward', number(at('reward')), 'mean of the batch'],
    ['held-out', held === null ? '–' : words(held), first === null ? name : `${name}, was ${words(first)}`],
    ['staleness', number(at('staleness_mean')), dials ? `mean; bound ${dials.max_staleness}` : 'mean'],
    ['generated', number(at('generated_tokens_per_s')), 'tokens per second'],
    ['trained', number(at('trained_tokens_per_s')), 'tokens per second'],
  ];
  const list = byId('headline');
  while (list.children.length < tiles.length) list.append(el('div', {}, el('dt'), el('dd'), el('dd', { class: 'note' })));
  tiles.forEach((texts, index) => texts.forEach((text, part) => say(list.children[index].children[part], text)));
}

/** Alarms as they were when the policy had this version. */
function showAlarms(version) {
  const { alarms } = state.info;
  const kinds = alarms.map(({ began, ended, severity }) => {
    if (began >= version) return 'later';
    return ended !== null && ended < version ? 'over' : `on ${severity}`;
  });
  if (kinds.join() === showAlarms.shown) return;
  showAlarms.shown = kinds.join();
  byId('alarms').hidden = !alarms.length;
  byId('alarm-list').replaceChildren(...alarms.map((alarm, index) => alarmItem(alarm, kinds[index])));
}

function alarmItem({ name, began, ended, value, threshold, text }, kind) {
  const when = ` from step ${began} ${ended === null ? 'on' : `to ${ended}`}`;
  const told = el('span', {}, `${when}: ${number(value)} (threshold ${number(threshold)})`);
  const words = el('b', {}, printable(name).replaceAll('_', ' '));
  const button = el('button', { type: 'button', onclick: () => goToStep(began + 1) }, words, told);
  return el('li', { class: `alarm ${kind}` }, button, el('p', {}, printable(text)));
}

// The keyboard, in one table: what it does and what the help says of it

const INTERACTIVE = 'button, input, select, textarea, summary, a, [tabindex]';
const showHelp = () => byId('help').showModal();
const faster = (steps) => {
  playhead.faster(steps);
  showButtons();
};
const read = () => {
  byId('rollouts').scrollIntoView();
  byId('group-list').querySelector('button')?.focus();
};
const KEYS = [
  [[' '], 'space', 'play or pause', toggle],
  [['ArrowLeft'], '←', 'back one second; with shift ten', (event) => seek(playhead.time - (event.shiftKey ? 10 : 1))],
  [['ArrowRight'], '→', 'on one second; with shift ten', (event) => seek(playhead.time + (event.shiftKey ? 10 : 1))],
  [[',', 'PageDown'], ', or page down', 'previous step', () => moveSteps(-1)],
  [['.', 'PageUp'], '. or page up', 'next step', () => moveSteps(1)],
  [['Home'], 'home', 'to the first group', () => seek(playhead.begin)],
  [['End'], 'end', 'to the end', () => (isOver(state.pulse) ? seek(playhead.end) : goLive())],
  [['-'], '−', 'slower', () => faster(-1)],
  [['+', '='], '+', 'faster', () => faster(1)],
  [['l'], 'L', 'follow the run', () => isOver(state.pulse) || goLive()],
  [['r'], 'R', 'to the rollouts', read],
  [['?'], '?', 'these keys', showHelp],
];

/** Keys work wherever the focus is not in something that has its own use for them. */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId('help').open) return;
  const isSlider = event.target === byId('slider');
  if (!isSlider && event.target.closest?.(INTERACTIVE) && !(event.key.length === 1 && event.key !== ' ')) return;
  if (event.target.matches?.('select, textarea, input:not([type=range], [type=radio], [type=checkbox])')) return;
  const found = KEYS.find(([keys]) => keys.includes(event.key) || keys.includes(event.key.toLowerCase()));
  if (!found) return;
  event.preventDefault();
  found[3](event);
}

// The beginning

const told = [...KEYS.map(([, name, words]) => [name, words]), ['← → ↑ ↓', 'from token to token, where one has the focus']];
byId('keys').replaceChildren(...told.flatMap(([name, words]) => [el('dt', {}, el('kbd', {}, name)), el('dd', {}, words)]));
document.addEventListener('keydown', onKey);
for (const speed of SPEEDS) byId('speed').append(el('option', { value: speed }, `${speed}×`));
byId('speed').addEventListener('change', () => (playhead.speed = Number(byId('speed').value)));
const buttons = { play: toggle, previous: () => moveSteps(-1), next: () => moveSteps(1), 'go-live': goLive, 'help-button': showHelp };
for (const [id, action] of Object.entries(buttons)) byId(id).addEventListener('click', action);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  lanes.draw();
  scrubber.draw();
});

async function begin() {
  await loadInfo();
  playhead.reach(state.info.end_s);
  addEventListener('hashchange', followLink);
  if (followLink()) {
    showButtons();
  } else if (isOver(state.info)) {
    playhead.seek(playhead.end); // what it came to; play goes through it from its start
    showButtons();
  } else {
    playhead.goLive();
  }
  live(onPulse, (isLinked) => {
    state.isLinked = isLinked;
    notice();
  });
  load();
  requestAnimationFrame(frame);
}

begin().catch(fail);
