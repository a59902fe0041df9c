// Numbers, times and hostile text for people.

/** 75.4 as "1:15", with tenths for short runs; hours where there are some. */
export function clock(seconds, tenths = false) {
  const whole = Math.max(0, tenths ? Math.floor(seconds * 10) / 10 : Math.floor(seconds));
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  const rest = (whole % 60).toFixed(tenths ? 1 : 0).padStart(tenths ? 4 : 2, '0');
  return hours ? `${hours}:${String(minutes).padStart(2, '0')}:${rest}` : `${minutes}:${rest}`;
}

/** A length of time: "310 ms", "4.2 s", "12 min". */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${trimmed(seconds, 1)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${trimmed(seconds / 3600, 1)} h`;
}

/** At most four digits that matter: 0.0123, 1,936, 3.1e6. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(1).replace('e+', 'e');
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  return trimmed(value, Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(size)))));
}

function trimmed(value, digits) {
  const text = value.toFixed(digits);
  return text.includes('.') ? text.replace(/\.?0+$/, '') : text;
}

export const percent = (share) => `${Math.round(share * 100)}%`;

export const count = (number) => number.toLocaleString('en');

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? '' : 's'}`;

const STEERING = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}]/gu;

/** Text without characters that steer: each as its number; line breaks stay where `lines` says so. */
export function printable(text, lines = false) {
  return text.replace(STEERING, (character) =>
    lines && character === '\n' ? character : `\\u{${character.codePointAt(0).toString(16)}}`,
  );
}

/** How many versions behind, in words. */
export function age(versions) {
  return versions <= 0 ? 'fresh' : versions === 1 ? '1 version old' : `${versions} versions old`;
}

/** "reward_parts/task" as "reward parts: task". */
export const metricName = (name) => name.replaceAll('_', ' ').replace('/', ': ');
