// Reading: the groups whose fate is known, one of them, and single tokens.

import { byId, choices, el, key, say } from './dom.js';
import { get, Latest } from './api.js';
import { ageClass } from './stage.js';
import { age, count, number, plural, printable } from './format.js';

const COUNT = 24;
const MODES = {
  version: 'version',
  gap: 'logprob gap',
  advantage: 'advantage',
};

/** What colours a token, from -1 to 1 for what has a sign; `scale` is what counts as 1. */
export const shade = (value, scale) => Math.max(-1, Math.min(1, value / (scale || 1)));

/** A round number that most of the values stay below. */
export function scaleOf(values) {
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  if (!sizes.length) return 1;
  const high = sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1];
  return [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10].find((round) => round >= high) ?? high;
}

/** The version of every token, from runs [[first token, version], ...]. */
export function versionsOf(runs, count) {
  const found = new Array(count).fill(-1);
  runs.forEach(([first, version], index) => {
    found.fill(version, first, index + 1 < runs.length ? runs[index + 1][0] : count);
  });
  return found;
}

const gapOf = (tokens, index) => {
  const [policy, behaviour] = [tokens.policy_logprobs[index], tokens.behaviour_logprobs[index]];
  return policy === null || behaviour === null ? null : policy - behaviour;
};

export class Rollouts {
  constructor(onError) {
    Object.assign(this, { requests: new Latest(onError), reading: new Latest(onError) });
    Object.assign(this, { shown: [], row: 0, step: -1, mode: 'version', ordinal: null, sample: 0, onlyTokens: true });
    byId('earlier').addEventListener('click', () => this.page(-1));
    byId('later').addEventListener('click', () => this.page(1));
    byId('follow').addEventListener('change', () => (this.step = -1));
    byId('only-tokens').addEventListener('change', (event) => {
      this.onlyTokens = event.target.checked;
      this.list({ row: this.row });
    });
    this.nothing('Nothing has been trained or dropped yet.');
  }

  get isFollowing() {
    return byId('follow').checked;
  }

  /** The slider is at `version`: show what its last step was trained on. */
  show(version) {
    const step = Math.max(0, version - 1);
    if (!this.isFollowing || step === this.step) return;
    this.step = step;
    this.list({ step });
  }

  page(direction) {
    byId('follow').checked = false;
    const [first, last] = [this.shown[0]?.row ?? 0, this.shown.at(-1)?.row ?? 0];
    // How many rows it takes on average to find one that is shown.
    const spread = this.shown.length > 1 ? Math.ceil((last - first) / (this.shown.length - 1)) : 32;
    this.list({ row: direction > 0 ? last + 1 : Math.max(0, first - COUNT * spread) });
  }

  list(query) {
    const tokens = this.onlyTokens ? '1' : '0';
    this.requests.run(async () => {
      const answer = await get('groups', { ...query, count: COUNT, tokens });
      byId('only-tokens').checked = this.onlyTokens && answer.has_tokens; // all are listed until some were written
      this.shown = answer.groups;
      this.row = answer.row;
      const isBefore = answer.groups.at(-1)?.row < answer.row; // from that row on none has tokens
      const list = byId('group-list');
      list.replaceChildren(...answer.groups.map((group) => this.item(group)));
      list.scrollTop = isBefore ? list.scrollHeight : 0;
      const first = answer.groups.at(isBefore ? -1 : 0);
      if (first && (this.isFollowing || this.ordinal === null)) this.open(first.ordinal);
    });
  }

  item(group) {
    const fate = group.step === null ? (group.outcome === 'failed' ? 'failed' : 'dropped') : `step ${group.step}`;
    const open = () => {
      byId('follow').checked = false;
      this.open(group.ordinal);
    };
    const cells = [
      el('span', { class: 'group-fate' }, fate),
      el('bdi', { class: 'group-prompt' }, printable(group.prompt)),
      group.has_tokens ? el('span', { class: 'badge' }, 'tokens') : null,
      el('span', { class: 'group-reward' }, number(group.mean_reward)),
    ];
    return el('li', {}, choice('', 'ordinal', group.ordinal, this.ordinal, open, ...cells));
  }

  /** Read group `ordinal`; `isAsked`: a person has pointed at it. */
  open(ordinal, isAsked = false) {
    this.ordinal = ordinal;
    press('ordinal', ordinal);
    this.reading.run(async () => {
      const answer = await get('group', { ordinal });
      if (ordinal !== this.ordinal) return;
      this.answer = answer;
      this.sample = answer.rollouts?.some((one) => one.sample === this.sample) ? this.sample : 0;
      this.render();
      if (isAsked) byId('rollouts').scrollIntoView({ block: 'start', behavior: 'auto' });
    });
  }

  nothing(text) {
    byId('reader').replaceChildren(el('p', { class: 'muted' }, text));
  }

  render() {
    const { answer } = this;
    if (!answer.group) {
      this.nothing(`Group ${answer.ordinal} is still on its way: its text is written once it is trained or dropped.`);
      return;
    }
    const { group } = answer;
    const fate = group.step === null ? `was dropped (${group.outcome})` : `was trained in step ${group.step}`;
    const samples = answer.rollouts.map(({ sample, failure, reward }) => {
      const told = el('small', {}, failure ? 'failed' : number(reward));
      return choice('sample', 'sample', sample, this.sample, () => this.choose(sample), `${sample + 1}`, told);
    });
    this.body = el('div', { class: 'answer' });
    byId('reader').replaceChildren(
      el('h3', {}, `Group ${group.ordinal} `, el('small', {}, `${fate}, mean reward ${number(group.mean_reward)}`)),
      el('p', { class: 'label' }, 'Prompt', answer.task ? ` (${printable(answer.task)})` : ''),
      el('pre', { class: 'text', dir: 'auto' }, printable(answer.prompt, true)),
      ...(answer.answer === null
        ? []
        : [el('p', { class: 'label' }, 'Expected: ', el('bdi', { class: 'expected' }, printable(answer.answer)))]),
      el('div', { class: 'samples', role: 'group', 'aria-label': 'Answers and their rewards' }, el('span', { class: 'label' }, 'Answers, with rewards'), ...samples),
      this.body,
    );
    this.renderAnswer();
  }

  choose(sample) {
    this.sample = sample;
    press('sample', sample);
    this.renderAnswer();
  }

  renderAnswer() {
    const rollout = this.answer.rollouts.find((one) => one.sample === this.sample);
    if (!rollout) return;
    const { step } = this.answer.group;
    const parts = Object.entries(rollout.parts).map(([name, value]) => `${printable(name)} ${number(value)}`);
    const seconds = rollout.times[0] !== null && rollout.times[1] !== null ? rollout.times[1] - rollout.times[0] : null;
    const facts = [
      `reward ${number(rollout.reward)}${parts.length > 1 ? ` (${parts.join(', ')})` : ''}`,
      plural(rollout.num_tokens, 'token'),
      rollout.finish_reason === 'stop' ? 'ended by itself' : `cut (${rollout.finish_reason})`,
      ...(rollout.episode ? episodeWords(rollout.episode) : []),
      `on generator-${rollout.replica}${seconds === null ? '' : ` in ${number(seconds)} s`}`,
      versionWords(rollout.versions),
    ];
    const failure = rollout.failure ? [el('p', { class: 'failure' }, 'failed: ', el('bdi', {}, printable(rollout.failure)))] : [];
    const ending = rollout.ending ? ` … ${printable(rollout.ending, true)}` : '';
    const said = rollout.episode
      ? transcripts(rollout.episode.parts)
      : el('pre', { class: 'text', dir: 'auto' }, printable(rollout.completion, true), ending);
    const [told, all] = [rollout.tokens?.texts.length, rollout.tokens?.num_tokens];
    const cut = told < all ? [el('p', { class: 'label' }, `The first ${count(told)} of ${plural(all, 'token')}:`)] : [];
    const tokens = rollout.tokens
      ? [...cut, this.modes(), ...this.tokenView(rollout.tokens, step)]
      : [el('p', { class: 'muted' }, 'Single tokens are written for some groups only (observe.tokens_every).')];
    const text = rollout.episode || !rollout.tokens || cut.length ? [said, ...tokens].flat() : tokens;
    this.body.replaceChildren(el('p', { class: 'facts' }, facts.join(' · ')), ...failure, ...text);
  }

  modes() {
    const choose = (mode) => {
      this.mode = mode;
      this.renderAnswer();
      this.body.querySelector(`input[value="${mode}"]`).focus();
    };
    const options = choices('colour', Object.entries(MODES), this.mode, choose);
    return el('fieldset', { class: 'choice' }, el('legend', {}, 'Colour by'), ...options);
  }

  tokenView(tokens, step) {
    const count = tokens.texts.length;
    const versions = versionsOf(tokens.versions, count);
    const values = this.mode === 'advantage' ? tokens.advantages : tokens.texts.map((_, index) => gapOf(tokens, index));
    const scale = scaleOf(values);
    const starts = new Set(tokens.turns);
    const forks = tokens.branches;
    const readout = el('p', { class: 'readout token-readout', 'aria-live': 'polite' }, 'Point at a token, or walk with the arrow keys.');
    const spans = tokens.texts.map((text, index) => {
      const span = el('span', { class: 'token', tabindex: index ? -1 : 0 }, ...visible(text));
      if (this.mode === 'version') {
        span.classList.add(versions[index] < 0 ? 'given' : ageClass(step - versions[index]));
      } else if (values[index] === null) {
        span.classList.add('given');
      } else {
        const tone = shade(values[index], scale);
        span.classList.add(tone < 0 ? 'less' : 'more');
        span.style.setProperty('--tone', `${Math.round(Math.abs(tone) * 70)}%`);
      }
      if (starts.has(index)) span.classList.add('turn');
      const tell = () => say(readout, tokenWords(tokens, index, versions, step));
      span.addEventListener('pointerenter', tell);
      span.addEventListener('focus', tell);
      return span;
    });
    const marked = spans.flatMap((span, index) =>
      forks.flatMap((first, fork) => (first === index ? [el('span', { class: 'fork' }, `fork ${fork + 1}`)] : [])).concat(span));
    const text = el('div', { class: 'text tokens', role: 'group', 'aria-label': 'Tokens', dir: 'auto' }, ...marked);
    text.addEventListener('keydown', (event) => {
      const walk = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -count, End: count }[event.key];
      if (!walk) return;
      event.preventDefault();
      event.stopPropagation();
      const now = spans.indexOf(document.activeElement);
      const next = spans[Math.min(Math.max(0, now + walk), count - 1)];
      for (const span of spans) span.tabIndex = span === next ? 0 : -1;
      next.focus();
    });
    text.addEventListener('click', (event) => event.target.closest('.token')?.focus());
    return [text, this.colourLegend(scale, versions, step), readout];
  }

  colourLegend(scale, versions, step) {
    const toned = (kind, words, tone = '0%') => {
      const entry = key(`token ${kind}`, words);
      entry.firstChild.style.setProperty('--tone', tone);
      return entry;
    };
    if (this.mode === 'version') {
      const seen = [...new Set(versions)].sort((a, b) => b - a);
      return el('div', { class: 'legend' }, ...seen.map((version) =>
        version < 0 ? toned('given', 'given, not sampled') : toned(ageClass(step - version), `version ${version} (${age(step - version)})`)));
    }
    const [less, more] = this.mode === 'gap' ? ['the trainer finds it less likely', 'more likely'] : ['made less likely', 'made more likely'];
    const unit = this.mode === 'gap' ? `full colour from ${number(scale)} nats on` : `full colour from ${number(scale)} on`;
    return el('div', { class: 'legend' }, toned('less', less, '70%'), toned('more', more, '70%'), el('span', {}, unit), toned('given', 'not trained on'));
  }
}

/** A button for one of several; `press` says which of those with that `data-` name is chosen. */
function choice(kind, name, value, chosen, onclick, ...children) {
  const attributes = { type: 'button', class: kind || null, [`data-${name}`]: value, 'aria-pressed': String(value === chosen), onclick };
  return el('button', attributes, ...children);
}

function press(name, chosen) {
  for (const button of byId('rollouts').querySelectorAll(`[data-${name}]`)) {
    button.setAttribute('aria-pressed', String(Number(button.dataset[name]) === chosen));
  }
}

/** The transcripts of an episode: its trunk's, and one for each fork, below what the part at its head says. */
function transcripts(parts) {
  const heads = parts.flatMap(({ fork }, index) => (fork === undefined ? [] : [index]));
  const ends = [...heads, parts.length];
  return [
    transcript(parts.slice(0, ends[0]), 'Transcript'),
    ...heads.flatMap((start, index) => {
      const { role, text } = parts[start];
      const said = transcript(parts.slice(start + 1, ends[index + 1]), `Transcript of ${role}`);
      return [el('p', { class: 'label fork' }, el('strong', {}, `${role[0].toUpperCase()}${role.slice(1)}`), `: ${text}`), said];
    }),
  ];
}

/** What was said in a branch, and by whom: text alone, whatever it is. */
function transcript(parts, label) {
  const lines = parts.map(({ role, text, turn, reward }) => {
    const who = [el('bdi', {}, printable(role)), turn ? ` ${turn}` : '', reward === undefined ? '' : ` · reward ${number(reward)}`];
    return el('li', { class: turn ? 'turn' : null }, el('p', { class: 'label' }, ...who), el('pre', { class: 'text', dir: 'auto' }, printable(text, true)));
  });
  return el('ol', { class: 'transcript', 'aria-label': label }, ...lines);
}

function episodeWords(episode) {
  const errors = episode.tool_errors ? ` (${episode.tool_errors} failed)` : '';
  return [
    `${plural(episode.turns, 'turn')}${episode.is_cut ? ', cut by a limit' : ''}`,
    ...(episode.forks ? [plural(episode.forks, 'fork')] : []),
    ...(episode.tool_calls ? [`${plural(episode.tool_calls, 'tool call')}${errors}`] : []),
    `${number(episode.environment_s)} s in its environment`,
    ...(episode.restarts ? [`began again ${plural(episode.restarts, 'time')}`] : []),
  ];
}

/** A token's text with what cannot be seen made visible; line breaks stay line breaks. */
function visible(text) {
  if (text === '') return [el('i', { class: 'unseen' }, '∅')];
  return text.split(/(\n)/).filter(Boolean).flatMap((part) =>
    part === '\n' ? [el('i', { class: 'unseen' }, '↵'), '\n'] : /^ +$/.test(part) && part === text ? [el('i', { class: 'unseen' }, '␣'.repeat(part.length))] : [printable(part)]);
}

function versionWords(runs) {
  const sampled = runs.filter(([, version]) => version >= 0).filter(([, version], index, all) => version !== all[index - 1]?.[1]);
  if (!sampled.length) return 'no version';
  const [first, ...later] = sampled;
  return `version ${first[1]}${later.map(([token, version]) => `, ${version} from token ${token + 1} on`).join('')}`;
}

function tokenWords(tokens, index, versions, step) {
  const text = printable(tokens.texts[index]);
  const start = `Token ${index + 1} of ${tokens.num_tokens} “${text}” (id ${tokens.tokens[index]})`;
  const fork = tokens.branches.filter((first) => first <= index).length;
  const where = fork ? `fork ${fork}, ` : '';
  if (versions[index] < 0) return `${start}: ${where}given, not sampled`;
  const turn = tokens.turns.filter((first) => first <= index).length;
  const gap = gapOf(tokens, index);
  const behind = step === null ? '' : `, ${age(step - versions[index])}`;
  return (
    `${start}: ${where}${turn ? `turn ${turn}, ` : ''}version ${versions[index]}${behind} · logprob ${number(tokens.behaviour_logprobs[index])} when sampled, ` +
    `${number(tokens.policy_logprobs[index])} when trained on (gap ${number(gap)}) · advantage ${number(tokens.advantages[index])}`
  );
}
