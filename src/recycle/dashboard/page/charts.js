// Curves over time by uPlot, with recoveries marked; of long runs, the server gives few points for the part that is shown.

import { colour, fill, formatNumber, formatTime, h, placed } from "./dom.js";

// Ticks at round times, in seconds.
export const timeAxis = {
  space: 74, incrs: [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000],
  values: (_, ticks) => ticks.map((at) => (at === 0 ? "0" : formatTick(at))),
};

function formatTick(at) {
  if (at >= 3600) return `${Number((at / 3600).toFixed(2))} h`;
  if (at >= 60) return at % 60 ? `${Math.floor(at / 60)}:${String(Math.round(at % 60)).padStart(2, "0")} min` : `${at / 60} min`;
  return `${Number(at.toFixed(3))} s`;
}

const ZOOM_KEYS = "Plus and minus zoom, arrows move, zero shows all.";

// The part of `whole` that a key shows next, from `part`; null for a key that is not for zooming.
export function partOfKey(key, part, whole) {
  const [from, to] = part, [low, high] = whole, isIn = key === "+" || key === "=", isOut = key === "-", step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (key === "0") return whole;
  if (!isIn && !isOut && !step) return null;
  const span = Math.min(high - low, Math.max((high - low) / 10000, (to - from) * (isIn ? 0.5 : isOut ? 2 : 1)));
  const start = Math.max(low, Math.min((from + to - span) / 2 + (step ? (step * span) / 8 : 0), high - span));
  return [start, start + span];
}

export class TimeChart {
  // `load(from_us, to_us)` gives the series of a part of the run.
  constructor(title, unit, load, { isZeroBased = false, isStepped = false } = {}) {
    Object.assign(this, { title, unit, load, isZeroBased, isStepped });
    this.box = h("div", { class: "plot", role: "img", tabindex: "0", "aria-label": title, onkeydown: (event) => this.onKey(event) });
    this.legend = h("span", { class: "value", role: "status" });
    this.reset = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.zoomOut() }, "whole run");
    this.node = h("figure", { class: "chart" }, h("figcaption", {}, h("span", { class: "title" }, title), h("span", { class: "unit" }, unit), this.legend, this.reset), this.box);
    this.marks = [];
    this.zoom = null;
    this.plot = null;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.box);
  }

  update(series, marks, end) {
    this.marks = marks;
    this.end = end;
    this.whole = series;
    if (this.zoom) return;
    this.show(series);
  }

  show(series) {
    const isThin = series.num > series.at_s.length;
    this.box.setAttribute("aria-label", `${describe(this.title, this.unit, series)}. ${ZOOM_KEYS} Shift and arrows read single points.`);
    const data = [series.at_s, series.mean, isThin ? series.low : [], isThin ? series.high : []];
    if (!isThin) { data[2] = series.mean; data[3] = series.mean; }
    this.data = data;
    this.isEmpty = !series.at_s.length;
    if (this.isEmpty) { this.destroy(); fill(this.box, h("p", { class: "empty" }, this.zoom ? "Nothing is recorded in this part." : "Nothing is recorded yet.")); return; }
    if (!this.plot) this.make();
    else this.plot.setData(this.data, !this.zoom);
  }

  make() {
    fill(this.box);
    const ink = colour("faint-ink"), line = colour("line"), rule = colour("rule");
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "11px system-ui, sans-serif" };
    const few = this.data[0].length < 60 && !this.isStepped;
    const stepped = this.isStepped ? { paths: window.uPlot.paths.stepped({ align: -1 }) } : {};
    const options = {
      width: Math.max(120, this.box.clientWidth), height: Math.max(140, this.box.clientHeight || 180),
      scales: { x: { time: false, range: (_, low, high) => this.zoom ?? [0, Math.max(this.end || 0, high ?? 1)] }, y: this.isZeroBased ? { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.08 : 1] } : {} },
      cursor: { drag: { x: true, y: false, setScale: false } },
      legend: { show: false },
      axes: [{ ...axis, ...timeAxis, size: 30 }, { ...axis, size: 56, values: (_, ticks) => ticks.map((value) => formatNumber(value, 5)) }],
      series: [{}, { stroke: line, width: 1.5, ...stepped, points: { show: few, size: 4, fill: line } }, { stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } }],
      bands: [{ series: [3, 2], fill: colour("line-band") }],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.say(plot)],
        setSelect: [(plot) => { if (plot.select.width > 4) this.zoomIn(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")); }],
      },
    };
    this.plot = new window.uPlot(options, this.data, this.box);
    this.box.ondblclick = () => this.zoomOut();
  }

  // Answers that come after another part was asked for are left out.
  async zoomIn(from, to) {
    const asked = (this.zoom = [from, to]);
    this.reset.hidden = false;
    if (this.plot) { this.plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false); this.plot.setScale("x", { min: from, max: to }); }
    try {
      const series = await this.load(Math.floor(from * 1e6), Math.ceil(to * 1e6));
      if (asked !== this.zoom) return;
      this.show(series);
      if (this.plot) this.plot.setScale("x", { min: from, max: to });
    } catch (problem) { if (asked === this.zoom) this.legend.textContent = problem.message; }
  }

  zoomOut() {
    this.zoom = null;
    this.reset.hidden = true;
    this.show(this.whole);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.whole || !this.whole.at_s.length) return;
    const whole = [0, Math.max(this.end || 0, this.whole.at_s[this.whole.at_s.length - 1])];
    const part = event.shiftKey && event.key.startsWith("Arrow") ? null : partOfKey(event.key, this.zoom ?? whole, whole);
    if (part) { if (part[1] - part[0] >= whole[1] - whole[0]) this.zoomOut(); else this.zoomIn(...part); }
    else if (event.shiftKey && { ArrowLeft: 1, ArrowRight: 1 }[event.key] && this.plot) this.readPoint(event.key === "ArrowLeft" ? -1 : 1);
    else return;
    event.preventDefault();
  }

  // Move the cursor to the next point that is shown; `say` tells its value.
  readPoint(step) {
    const [from, to] = this.zoom ?? [-Infinity, Infinity], times = this.data[0], shown = times.map((at, index) => index).filter((index) => times[index] >= from && times[index] <= to);
    if (!shown.length) return;
    const now = shown.indexOf(this.plot.cursor.idx), next = shown[now < 0 ? (step > 0 ? 0 : shown.length - 1) : Math.max(0, Math.min(shown.length - 1, now + step))];
    this.plot.setCursor({ left: this.plot.valToPos(times[next], "x"), top: this.plot.valToPos(this.data[1][next], "y") });
  }

  drawMarks(plot) {
    const context = plot.ctx, { top, height, left, width } = plot.bbox, ratio = window.devicePixelRatio || 1;
    context.save();
    context.font = `${12 * ratio}px system-ui, sans-serif`;
    context.textAlign = "center";
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.at_s, "x", true);
      if (x < left || x > left + width) continue;
      context.strokeStyle = context.fillStyle = colour(mark.joins ? "joining" : "dead");
      context.lineWidth = ratio;
      context.setLineDash([4 * ratio, 3 * ratio]);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
      context.fillText(mark.joins ? "▲" : "✕", x, top + 10 * ratio);
    }
    context.restore();
  }

  say(plot) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined || !this.data[0].length) { this.legend.textContent = ""; return; }
    const at = this.data[0][index], near = this.marks.find((mark) => Math.abs(plot.valToPos(mark.at_s, "x") - plot.cursor.left) < 6);
    const value = this.data[2][index] === this.data[3][index] ? formatNumber(this.data[1][index]) : `${formatNumber(this.data[2][index])} to ${formatNumber(this.data[3][index])}`;
    this.legend.textContent = near ? `${near.text} at ${formatTime(near.at_s * 1e6)}` : `${value} ${this.unit} at ${formatTime(at * 1e6)}`;
  }

  resize() { if (this.plot && this.box.clientWidth > 0) this.plot.setSize({ width: this.box.clientWidth, height: Math.max(140, this.box.clientHeight) }); }
  destroy() { if (this.plot) this.plot.destroy(); this.plot = null; }
  repaint() { this.destroy(); if (this.whole) this.show(this.whole); }
  close() { this.observer.disconnect(); this.destroy(); }
}

function describe(title, unit, series) {
  if (!series.at_s.length) return `${title}: nothing is recorded yet`;
  const last = series.mean[series.mean.length - 1], high = series.high.reduce((a, b) => Math.max(a, b)), low = series.low.reduce((a, b) => Math.min(a, b));
  return `${title} over time: ${formatNumber(last)} ${unit} at the end, from ${formatNumber(low)} to ${formatNumber(high)}`;
}

// A bar whose parts add up, with a legend of words and numbers.
export function stackedBar(label, parts, format) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  return h("div", { class: "stack-box" },
    h("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.filter((p) => p.value).map((p) => `${p.name} ${format(p.value, total)}`).join(", ")}` },
      parts.filter((part) => part.value > 0).map((part) => placed(h("span", { class: `part ${part.style || ""}`, title: `${part.name}: ${format(part.value, total)}` }),
        { width: `${(100 * part.value) / total}%`, ...(part.fill ? { "background-color": part.fill } : {}) }))),
    h("ul", { class: "legend" }, parts.filter((part) => part.value > 0).map((part) => h("li", {},
      placed(h("span", { class: `swatch ${part.style || ""}`, "aria-hidden": "true" }), part.fill ? { "background-color": part.fill } : {}), ` ${part.name} `, h("b", {}, format(part.value, total))))));
}
