// Elements and texts. Nothing of a record ever becomes HTML: every text is a text node.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "value") node.value = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const fill = (node, ...children) => node.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined));

export function formatTime(us) {
  if (us === null || us === undefined || !Number.isFinite(us)) return "–";
  const size = Math.abs(us);
  if (size >= 172800e6) return `${(us / 86400e6).toFixed(1)} d`;
  if (size >= 3600e6) return `${Math.floor(us / 3600e6)} h ${String(Math.floor((us % 3600e6) / 60e6)).padStart(2, "0")} min`;
  if (size >= 60e6) return `${Math.floor(us / 60e6)} min ${String(Math.floor((us % 60e6) / 1e6)).padStart(2, "0")} s`;
  if (size >= 1e6) return `${(us / 1e6).toFixed(size >= 10e6 ? 1 : 2)} s`;
  if (size >= 1e3) return `${(us / 1e3).toFixed(size >= 100e3 ? 0 : 1)} ms`;
  return `${Math.round(us)} µs`;
}

// A point of time in the run, to the millisecond.
export function formatClock(us) {
  const ms = Math.floor(us / 1000), pad = (value, size) => String(value).padStart(size, "0");
  return `${Math.floor(ms / 3600000)}:${pad(Math.floor(ms / 60000) % 60, 2)}:${pad(Math.floor(ms / 1000) % 60, 2)}.${pad(ms % 1000, 3)}`;
}

export function formatNumber(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e12 || Math.abs(value) < 1e-4)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

export const formatCount = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
export const formatShare = (value) => `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;

export function formatBytes(bytes) {
  if (!Number.isFinite(bytes)) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (bytes >= size) return `${(bytes / size).toFixed(1)} ${unit}`;
  return `${bytes} B`;
}

export class Refused extends Error {}
export class Away extends Error {}

// Whether asking again may help: the server was away, or had no room.
export const mayPass = (problem) => problem instanceof Away || problem.status >= 500 || problem.status === 429;

export async function getJson(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null));
  const answer = await fetch(`${path}?${query}`).catch(() => { throw new Away("the server does not answer"); });
  const isJson = (answer.headers.get("content-type") || "").startsWith("application/json");
  const data = isJson ? await answer.json() : { problem: await answer.text() };
  if (!answer.ok) throw Object.assign(new Refused(data.problem || `the server answers ${answer.status}`), { status: answer.status });
  return data;
}

export const isDark = () => document.documentElement.dataset.theme === "dark";
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// The contrast of two colours as WCAG defines it; they are written #rrggbb.
export function contrast(one, other) {
  const light = (code) => [1, 3, 5].map((at) => parseInt(code.slice(at, at + 2), 16) / 255).map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)).reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// A table with a caption for screen readers; cells are texts or nodes.
export function table(caption, columns, rows, attributes = {}) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", attributes,
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map((column) => (column instanceof Node ? column : h("th", { scope: "col" }, column))))),
      h("tbody", {}, rows)));
}

// Sets the position or size of an element; a style attribute would be refused by the page's own policy.
export function placed(node, styles) {
  for (const [name, value] of Object.entries(styles)) node.style.setProperty(name, value);
  return node;
}
