// Text for numbers, and elements of the page. Text always enters the page as textContent, never as HTML:
// the files of a run are not trusted.

/** The parts of the page that extensions bring, by the name of the extension, which is that of their data in `sections`:
 *  label;  before: (runs) => id of the element after it;  elements: ([[run, its name as a prefix, data]], report) => elements;
 *  optional: draw: () => nothing, when the size or the colours may have changed;
 *  results: (data, incident) => [{step, elements}], of steps of an incident that were examined. */
const SECTIONS = {};

/** Parse JSON. Its objects have no prototype: a key of a run, such as "constructor", then finds only data. */
function parseData(text) {
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  return JSON.parse(text, (key, value) => (isObject(value) ? Object.assign(Object.create(null), value) : value));
}

const isNumber = Number.isFinite;

/** A number with about `digits` significant digits; very small and very large ones with an exponent. */
function plain(value, digits = 5) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) {
    return value.toExponential(Math.max(digits - 2, 0)).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const decimals = Math.max(0, digits - 1 - Math.max(Math.floor(Math.log10(size)), 0));
  return value.toLocaleString("en-US", {maximumFractionDigits: decimals});
}

/** A count with a unit: 12.3M. */
function compact(value, digits = 4) {
  return isNumber(value) ? value.toLocaleString("en-US", {notation: "compact", maximumSignificantDigits: digits}) : "–";
}

const percent = (value, digits = 4) => (isNumber(value) ? `${plain(value * 100, digits)} %` : "–");
const gibibytes = (value, digits = 4) => (isNumber(value) ? `${plain(value / 2 ** 30, digits)} GiB` : "–");
const milliseconds = (value, digits = 4) => (value >= 1e4 ? `${plain(value / 1e3, digits)} s` : `${plain(value, digits)} ms`);
const watts = (value, digits = 4) => `${plain(value, digits)} W`;

/** The texts of different values, with more digits than usual if some would be the same. */
function differentTexts(values, format) {
  const texts = [undefined, 6, 7, 8, 9, 10, 11, 12].map((digits) => values.map((value) => format(value, digits)));
  return texts.find((words) => new Set(words).size === words.length) || texts[0];
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 60) return `${plain(seconds, 3)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (hours < 1) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return days < 2 ? `${hours} h ${minutes % 60} min` : `${days} d ${hours % 24} h`;
}

function dateTime(seconds) {
  return isNumber(seconds) && Math.abs(seconds) < 8e12 ? new Date(seconds * 1000).toLocaleString("en-GB") : "–";
}

/** An element with attributes and children. Strings among the children become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table in a box that scrolls. `columns` are [heading, is a number]; the first cell of a row is its heading. */
function makeTable(columns, rows, className = "") {
  const cells = (texts, tag, scope) => texts.map((text, index) => make(index === 0 ? "th" : tag,
    {class: columns[index][1] ? "number" : "", scope: index === 0 || tag === "th" ? scope : null}, String(text)));
  return make("div", {class: "scroll", tabindex: 0}, make("table", {class: className},
    make("thead", {}, make("tr", {}, ...cells(columns.map(([text]) => text), "th", "col"))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row, "td", "row"))))));
}

/** The value of a CSS variable, such as the colour --c0. */
function cssValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A small picture of a line with its colour and dashes. */
function swatch(color, dash = []) {
  const values = {x1: 0, y1: 5, x2: 18, y2: 5, stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ")};
  const [svg, line] = ["svg", "line"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [name, value] of Object.entries(values)) line.setAttribute(name, value);
  for (const [name, value] of [["class", "swatch"], ["viewBox", "0 0 18 10"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  svg.append(line);
  return svg;
}
