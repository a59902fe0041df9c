// Making elements. Text is only ever set as text: nothing a model said can become markup.

const SVG = 'http://www.w3.org/2000/svg';

export const byId = (id) => document.getElementById(id);

/** `el('p', {class: 'x', onclick: f}, 'text', child)`; attributes that are null or false are left out. */
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An entry of a legend: a swatch of class `kind`, and what it stands for. */
export function key(kind, ...words) {
  return el('span', { class: 'key' }, el('i', { class: `swatch ${kind}` }), ...words);
}

/** A choice of one of `values`, [value, words], as buttons beside each other; `onChoose` gets the new one. */
export function choices(name, values, chosen, onChoose) {
  return values.map(([value, words]) => {
    const input = el('input', { type: 'radio', name, value, checked: value === chosen, onchange: () => onChoose(value) });
    return el('label', {}, input, el('span', {}, words));
  });
}

/** Set an element's text, unless it has it already: screen readers hear of changes only. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute, unless it has that value already. */
export function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Take an element away once it has come to where the style sheet moves it; at once, where nothing moves. */
export function leave(element) {
  Promise.allSettled(element.getAnimations().map((one) => one.finished)).then(() => element.remove());
}

/** The value of a custom property of the style sheet, `--ink`: what canvases draw with. */
export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A canvas's context in CSS pixels, cleared, as sharp as the screen. */
export function context2d(canvas) {
  const ratio = Math.min(3, devicePixelRatio || 1);
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
