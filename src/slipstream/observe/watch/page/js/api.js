// What the server answers; `observe/watch/answers.py` makes it. Rows that are lists have these columns:
//
//   group  ordinal, phase, since, replica, finished, version, step, reward
//   move   time, the group, its fate (null while it is in the loop)
//   swap   time, replica, version (-1: lost)   step  time, version the trainer came to
//   bar    start, end, state, share of that time, args, other states and their shares
//   point  step, mean, least, greatest

export const GROUP = { ordinal: 0, phase: 1, since: 2, replica: 3, finished: 4, version: 5, step: 6, reward: 7 };
export const PHASES = ['waiting', 'sampling', 'scoring', 'ready', 'training'];

export async function get(name, query = {}) {
  const response = await fetch(`/api/${name}?${new URLSearchParams(query)}`);
  if (!response.ok) throw new Error(`/api/${name}: ${response.status} ${await response.text()}`);
  return response.json();
}

/** Calls `onPulse` with every pulse, and `onLink` with whether the server can be reached, while the page is visible. */
export function live(onPulse, onLink) {
  let source = null;
  const listen = () => {
    source?.close(); // a browser has six connections to a server, of all its pages
    if (document.hidden) return;
    source = new EventSource('/api/live');
    source.onmessage = (message) => {
      onLink(true);
      onPulse(JSON.parse(message.data));
    };
    source.onerror = () => onLink(false); // the browser tries again by itself
  };
  document.addEventListener('visibilitychange', listen);
  listen();
}

/** Runs one request at a time, the next a second after an error; meanwhile only the newest that comes is kept. */
export class Latest {
  constructor(onError) {
    this.onError = onError;
    this.next = null;
    this.isBusy = false;
  }

  async run(job) {
    this.next = job;
    if (this.isBusy) return;
    this.isBusy = true;
    while (this.next) {
      const current = this.next;
      this.next = null;
      try {
        await current();
      } catch (error) {
        this.onError(error);
        await new Promise((done) => setTimeout(done, 1000));
      }
    }
    this.isBusy = false;
  }
}
