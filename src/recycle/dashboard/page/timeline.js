// An iteration on a canvas: a lane for each worker, executed above planned. Only what is visible is drawn and fetched.

import { colour, fill, formatTime, h, isDark, placed } from "./dom.js";

const LANE = 34, LABEL = 74, AXIS = 24, CHUNK = 64, LEAST_SPAN_US = 20;
const OP = /^(\d+)([FBIW])(\d+)@(\d+)$/;

export class Timeline {
  // `source`: workers, dead, executed_us, planned_us, slowdown, fetch(first, last) -> lanes; `planned_us` may stand alone.
  constructor(paints) {
    this.paints = paints;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "timeline" });
    this.tip = h("div", { class: "tip", role: "status" });
    this.spacer = h("div", { class: "spacer" }, this.canvas);
    this.scroller = h("div", { class: "timeline-scroll", tabindex: "-1" }, this.spacer);
    const button = (text, label, act) => h("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick: act }, text);
    this.buttons = h("div", { class: "zoom" }, h("span", { class: "hint" }, "Drag to move, Shift or Ctrl and the wheel to zoom; + − 0 and arrows on the keyboard"), button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)), button("⟷", "show the whole iteration", () => this.fit()));
    this.node = h("div", { class: "timeline" }, this.buttons, this.scroller, this.tip);
    this.lanes = new Map();
    this.pending = new Set();
    this.patterns = new Map();
    this.frames = [];
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => fill(this.tip));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.scroller.addEventListener("scroll", () => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.scroller);
  }

  show(source, keepView = false) {
    const view = this.view;
    this.source = source;
    this.lanes.clear();
    this.pending.clear();
    this.keep(source.first || 0, source.lanes || []);
    this.extent = Math.max(source.executed_us || 0, (source.planned_us || 0) * (source.slowdown || 1), 1);
    this.begin = source.from_us ?? 0;
    this.margin = 0.01 * (this.extent - this.begin);
    this.view = keepView && view ? view : [this.begin - this.margin, this.extent + this.margin];
    placed(this.spacer, { height: `${source.workers.length * LANE + AXIS + 4}px` });
    placed(this.scroller, { height: `${Math.min(source.workers.length * LANE + AXIS + 18, Math.max(260, window.innerHeight - 260))}px` });
    this.canvas.setAttribute("aria-label", `${source.label}: ${source.workers.length} workers, ${formatTime(source.executed_us || source.planned_us)}. Plus and minus zoom, arrows move.`);
    this.draw();
  }

  keep(first, lanes) { lanes.forEach((lane, number) => this.lanes.set(first + number, decode(lane))); }

  fit() { this.view = [this.begin - this.margin, this.extent + this.margin]; this.draw(); }

  zoom(factor, at = null) {
    const [from, to] = this.view, middle = at ?? (from + to) / 2;
    const span = Math.max(LEAST_SPAN_US, Math.min(this.extent - this.begin + 2 * this.margin, (to - from) * factor));
    const share = (middle - from) / (to - from);
    this.move(middle - share * span, span);
  }

  move(from, span = this.view[1] - this.view[0]) {
    const low = this.begin - this.margin, high = this.extent + this.margin;
    const start = Math.max(low, Math.min(from, high - span));
    this.view = [start, start + span];
    this.draw();
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaY) >= Math.abs(event.deltaX) && !event.altKey && this.scroller.scrollHeight > this.scroller.clientHeight + 4) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(this.view[0] + (event.deltaX / this.width) * (this.view[1] - this.view[0]));
    else this.zoom(Math.exp(event.deltaY / 300), this.timeAt(event.offsetX));
  }

  onDown(event) {
    const x = event.clientX, [from, to] = this.view;
    const move = (later) => this.move(from - ((later.clientX - x) / this.width) * (to - from));
    const up = () => { window.removeEventListener("pointermove", move); window.removeEventListener("pointerup", up); };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", up);
  }

  onKey(event) {
    const span = this.view[1] - this.view[0];
    const acts = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.fit(),
      ArrowLeft: () => this.move(this.view[0] - span / 8), ArrowRight: () => this.move(this.view[0] + span / 8),
      ArrowDown: () => this.scroller.scrollBy(0, LANE), ArrowUp: () => this.scroller.scrollBy(0, -LANE),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  get width() { return Math.max(1, this.canvas.clientWidth - LABEL); }
  timeAt(x) { return this.view[0] + ((x - LABEL) / this.width) * (this.view[1] - this.view[0]); }

  draw() {
    if (this.frame || !this.source) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const began = performance.now();
      this.paint();
      this.frames.push(performance.now() - began);
      if (this.frames.length > 500) this.frames.shift();
    });
  }

  paint() {
    const { canvas, source } = this, ratio = window.devicePixelRatio || 1;
    const width = this.scroller.clientWidth, height = this.scroller.clientHeight;
    if (!width || !height) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      placed(canvas, { width: `${width}px`, height: `${height}px` });
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colour("panel");
    context.fillRect(0, 0, width, height);
    const scroll = this.scroller.scrollTop, first = Math.max(0, Math.floor(scroll / LANE)), last = Math.min(source.workers.length, Math.ceil((scroll + height) / LANE));
    this.fetchMissing(first, last);
    this.ink = colour("ink");
    this.scale = (width - LABEL) / (this.view[1] - this.view[0]);
    context.save();
    context.beginPath();
    context.rect(LABEL, 0, width - LABEL, height - AXIS);
    context.clip();
    context.fillStyle = colour("bubble");
    for (let number = first; number < last; number++) if (!this.isEmpty(number)) context.fillRect(LABEL, number * LANE - scroll + 3, width - LABEL, 18);
    this.paintGrid(context, width, height);
    for (let number = first; number < last; number++) this.paintLane(context, number, number * LANE - scroll);
    context.restore();
    this.paintLabels(context, first, last, scroll, height);
    this.paintAxis(context, width, height);
  }

  // Whether a worker is dead and did nothing that counted.
  isEmpty(number) {
    const lane = this.lanes.get(number);
    return this.source.dead.has(this.source.workers[number]) && !(lane && lane.executed && lane.executed.ops.length > lane.executed.vain.size);
  }

  paintLane(context, number, top) {
    const lane = this.lanes.get(number), hasBoth = lane && lane.executed && lane.planned;
    const heights = hasBoth ? [[lane.executed, 3, 18, 1, 1], [lane.planned, 23, 8, this.source.slowdown || 1, 0.75]] : lane ? [[lane.executed || lane.planned, 4, 24, lane.executed ? 1 : this.source.slowdown || 1, 1]] : [];
    if (!lane) { context.fillStyle = colour("faint-ink"); context.fillText("…", LABEL + 8, top + 16); return; }
    for (const [row, offset, tall, factor, alpha] of heights) {
      context.globalAlpha = alpha;
      this.paintRow(context, row, top + offset, tall, factor);
      context.globalAlpha = 1;
    }
    if (this.isEmpty(number)) {
      context.fillStyle = colour("dead");
      context.font = "11px system-ui, sans-serif";
      context.fillText("✕ dead: its micro-batches run on its peers", Math.max(LABEL, LABEL - this.view[0] * this.scale) + 8, top + 20);
    }
  }

  paintRow(context, row, top, tall, factor) {
    const [from, to] = this.view, scale = this.scale;
    let at = lowerBound(row, from, factor), lastX = -1;
    for (; at < row.ops.length; at++) {
      const start = row.starts[at] * factor;
      if (start > to) break;
      const x = LABEL + (start - from) * scale, wide = Math.max(0.7, row.lengths[at] * factor * scale);
      if (wide < 1 && x + wide < lastX + 0.5) continue;  // nothing new to see in this column
      lastX = x + wide;
      const op = row.ops[at];
      context.fillStyle = row.vain.has(at) ? this.pattern("vain") : op.isRerouted ? this.pattern(op.look) : this.paintOf(op.look).fill;
      context.fillRect(x, top, Math.max(0.7, wide - (wide > 3 ? 1 : 0)), tall);
      if (row.critical.has(at)) {
        context.strokeStyle = this.ink;
        context.lineWidth = 2;
        context.strokeRect(x + 1, top + 1, Math.max(1, wide - 3), tall - 2);
      }
      if (wide > 26 && tall > 12 && op.text) {
        context.font = "10px system-ui, sans-serif";
        const label = wide > 44 && op.isRerouted ? `${op.text}@${op.home}` : op.text;
        const size = context.measureText(label).width;
        if (size < wide - 4) {
          if (op.isRerouted || row.vain.has(at)) { context.fillStyle = row.vain.has(at) ? colour("panel") : this.paintOf(op.look).pale; context.fillRect(x + 2, top + tall / 2 - 6, size + 3, 12); }
          context.fillStyle = row.vain.has(at) ? this.ink : op.isRerouted ? "#000000" : this.paintOf(op.look).ink;
          context.fillText(label, x + 3, top + tall / 2 + 4);
        }
      }
    }
  }

  paintLabels(context, first, last, scroll, height) {
    context.fillStyle = colour("panel");
    context.fillRect(0, 0, LABEL, height);
    context.font = "12px system-ui, sans-serif";
    for (let number = first; number < last; number++) {
      const name = this.source.workers[number];
      context.fillStyle = this.source.dead.has(name) ? colour("dead") : this.ink;
      context.fillText(this.source.dead.has(name) ? `✕ ${name}` : name, 8, number * LANE - scroll + 17);
    }
  }

  paintGrid(context, width, height) {
    const [from, to] = this.view, step = roundStep((to - from) / Math.max(2, (width - LABEL) / 110));
    context.strokeStyle = colour("rule");
    context.lineWidth = 1;
    context.beginPath();
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = Math.round(LABEL + (at - from) * this.scale) + 0.5;
      context.moveTo(x, 0);
      context.lineTo(x, height - AXIS + 4);
    }
    context.stroke();
  }

  paintAxis(context, width, height) {
    const [from, to] = this.view, top = height - AXIS;
    context.fillStyle = colour("panel");
    context.fillRect(0, top, width, AXIS);
    context.fillStyle = colour("faint-ink");
    context.font = "11px system-ui, sans-serif";
    const step = roundStep((to - from) / Math.max(2, (width - LABEL) / 110));
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = LABEL + (at - from) * this.scale;
      if (x > width - 20) break;
      const text = at === 0 ? "0" : formatTime(at);
      context.fillText(text, Math.min(x + 3, width - context.measureText(text).width - 4), top + 17);
    }
  }

  async fetchMissing(first, last) {
    const source = this.source;
    for (let chunk = Math.floor(first / CHUNK); chunk * CHUNK < last; chunk++) {
      if (this.lanes.has(Math.max(first, chunk * CHUNK)) && this.lanes.has(Math.min(last, (chunk + 1) * CHUNK) - 1)) continue;
      if (this.pending.has(chunk) || !source.fetch) continue;
      this.pending.add(chunk);
      source.fetch(chunk * CHUNK, (chunk + 1) * CHUNK).then((lanes) => {
        if (this.source !== source) return;
        this.keep(chunk * CHUNK, lanes);
        this.draw();
      }, () => this.pending.delete(chunk));
    }
  }

  // An op of a kind that this page does not know is neutral.
  paintOf(look) { return Object.hasOwn(this.paints, look) ? this.paints[look] : { fill: colour("faint"), pale: colour("bubble"), ink: colour("panel"), meaning: "of a kind that this page does not know" }; }

  // Re-routed work is pale with stripes of its colour; work in vain is hatched grey.
  pattern(look) {
    const key = `${look} ${isDark()}`;
    if (!this.patterns.has(key)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const context = tile.getContext("2d"), paint = this.paints[look];
      context.fillStyle = paint ? paint.pale : colour("bubble");
      context.fillRect(0, 0, 6, 6);
      context.strokeStyle = paint ? paint.fill : colour("faint-ink");
      context.lineWidth = paint ? 1.6 : 1;
      for (const shift of [-6, 0, 6]) { context.beginPath(); context.moveTo(shift - 1, 7); context.lineTo(shift + 7, -1); context.stroke(); }
      this.patterns.set(key, context.createPattern(tile, "repeat"));
    }
    return this.patterns.get(key);
  }

  onMove(event) {
    const number = Math.floor((event.offsetY + this.scroller.scrollTop) / LANE), lane = this.lanes.get(number);
    if (!lane || event.offsetX < LABEL) { fill(this.tip); return; }
    const inside = (event.offsetY + this.scroller.scrollTop) % LANE, isPlanned = !lane.executed || (lane.planned && inside > 21);
    const row = isPlanned ? lane.planned : lane.executed, factor = isPlanned ? this.source.slowdown || 1 : 1, time = this.timeAt(event.offsetX);
    const at = row ? row.starts.findIndex((start, index) => start * factor <= time && (start + row.lengths[index]) * factor >= time) : -1;
    if (at < 0) { fill(this.tip); return; }
    const op = row.ops[at], facts = [`${lane.worker} ${op.full}`, this.paintOf(op.look).meaning];
    if (op.isRerouted) facts.push(`re-routed from pipeline ${op.home}`);
    if (row.vain.has(at)) facts.push("in vain");
    if (row.critical.has(at)) facts.push("critical");
    facts.push(`${isPlanned ? "planned " : ""}${formatTime(row.lengths[at])} from ${formatTime(row.starts[at])}`);
    const other = isPlanned ? lane.executed : lane.planned, twin = other ? other.ops.findIndex((one) => one.full === op.full) : -1;
    if (twin >= 0) facts.push(`${isPlanned ? "took" : "planned"} ${formatTime(other.lengths[twin])}`);
    fill(this.tip, facts.join(" · "));
  }

  close() { this.observer.disconnect(); }
}

function decode(lane) {
  return { worker: lane.worker, executed: row(lane.worker, lane.executed, lane.critical), planned: row(lane.worker, lane.planned, []) };
}

function row(worker, columns, critical) {
  if (!columns) return null;
  const pipeline = (/^W(\d+)_/.exec(worker) || [])[1];
  const ops = columns.ops ? columns.ops.split(" ").map((full) => {
    const match = OP.exec(full);
    return match ? { full, look: match[2], text: `${match[2]}${match[3]}`, home: match[4], isRerouted: match[4] !== pipeline } : { full, look: full, text: "", isRerouted: false };
  }) : [];
  return { ops, starts: columns.starts, lengths: columns.lengths, vain: new Set(columns.vain), critical: new Set(critical) };
}

// The first op that may end after `from`; rows are in order of their starts.
function lowerBound(row, from, factor) {
  let low = 0, high = row.starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((row.starts[middle] + row.lengths[middle]) * factor < from) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 2);
}

function roundStep(size) {
  const power = 10 ** Math.floor(Math.log10(Math.max(size, 1e-9)));
  return power * [1, 2, 5, 10].find((digit) => digit * power >= size);
}

export function paintLegend(paints) {
  const items = Object.entries(paints).map(([look, paint]) => h("li", {}, placed(h("span", { class: "swatch", "aria-hidden": "true" }), { "background-color": paint.fill }), ` ${look.length === 1 ? `${look} ` : ""}${paint.meaning}`));
  const striped = placed(h("span", { class: "swatch", "aria-hidden": "true" }), { "background-image": `repeating-linear-gradient(135deg, ${paints.F.fill} 0 2px, ${paints.F.pale} 2px 5px)` });
  return h("ul", { class: "legend" }, items, h("li", {}, striped, " re-routed from a dead peer"),
    h("li", {}, h("span", { class: "swatch vain", "aria-hidden": "true" }), " in vain"), h("li", {}, h("span", { class: "swatch critical", "aria-hidden": "true" }), " critical"));
}
