// An iteration on a canvas: a lane for each worker, executed above planned. Only what is visible is drawn and fetched.

import { colour, contrast, fill, formatTime, h, isDark, placed } from "./dom.js";
import { decode, lowerBound, opAt } from "./lanes.js";

const LANE = 34, LABEL = 74, AXIS = 24, CHUNK = 64, LEAST_SPAN_US = 20, LEAST_CONTRAST = 3;

export class Timeline {
  // `source`: workers, dead, executed_us, planned_us, slowdown, fetch(first, last) -> lanes; `planned_us` may stand alone.
  constructor(paints) {
    this.paints = paints;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "timeline" });
    this.tip = h("div", { class: "tip", role: "status", "aria-live": "polite" });
    this.spacer = h("div", { class: "spacer" }, this.canvas);
    this.scroller = h("div", { class: "timeline-scroll", tabindex: "-1" }, this.spacer);
    const button = (text, label, act) => h("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick: act }, text);
    this.buttons = h("div", { class: "zoom" }, h("span", { class: "hint" }, "Drag to move, Shift or Ctrl and the wheel to zoom; + − 0 and arrows on the keyboard, with Shift from op to op"), button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)), button("⟷", "show the whole iteration", () => this.fit()));
    this.node = h("div", { class: "timeline" }, this.buttons, this.scroller, this.tip);
    this.lanes = new Map();
    this.pending = new Set();
    this.patterns = new Map();
    this.frames = [];
    this.chosen = null;
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => this.tell(this.chosen));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("blur", () => this.choose(null));
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
    if (!keepView) this.choose(null);
    this.view = keepView && view ? view : [this.begin - this.margin, this.extent + this.margin];
    placed(this.spacer, { height: `${source.workers.length * LANE + AXIS + 4}px` });
    placed(this.scroller, { height: `${Math.min(source.workers.length * LANE + AXIS + 18, Math.max(260, window.innerHeight - 260))}px` });
    this.canvas.setAttribute("aria-label", `${source.label}: ${source.workers.length} workers, ${formatTime(source.executed_us || source.planned_us)}. Plus and minus zoom, arrows move, Shift and arrows go from op to op.`);
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
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) {
      event.preventDefault();
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.chooseBeside(event.key === "ArrowLeft" ? -1 : 1);
      else this.chooseRow(event.key === "ArrowUp" ? -1 : 1);
      return;
    }
    const acts = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.fit(), Escape: () => this.choose(null),
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
    const scroll = this.scroller.scrollTop - AXIS, first = Math.max(0, Math.floor((scroll + AXIS) / LANE)), last = Math.min(source.workers.length, Math.ceil((scroll + height) / LANE));
    this.fetchMissing(first, last);
    this.ink = colour("ink");
    // In the dark, an op whose colour is close to that of the bubbles has an edge.
    this.edged = new Set(Object.keys(this.paints).filter((look) => isDark() && contrast(this.paints[look].fill, colour("bubble")) < LEAST_CONTRAST));
    this.scale = (width - LABEL) / (this.view[1] - this.view[0]);
    context.save();
    context.beginPath();
    context.rect(LABEL, AXIS, width - LABEL, height - AXIS);
    context.clip();
    context.fillStyle = colour("bubble");
    for (let number = first; number < last; number++) if (!this.isEmpty(number)) context.fillRect(LABEL, number * LANE - scroll + 3, width - LABEL, 18);
    this.paintGrid(context, width, height);
    for (let number = first; number < last; number++) this.paintLane(context, number, number * LANE - scroll);
    this.paintChosen(context, scroll);
    context.restore();
    this.paintLabels(context, first, last, scroll, height);
    this.paintAxis(context, width);
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
      if (wide > 3 && this.edged.has(op.look)) {
        context.strokeStyle = colour("faint-ink");
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, top + 0.5, Math.max(1, wide - 2), tall - 1);
      }
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
      context.moveTo(x, AXIS - 4);
      context.lineTo(x, height);
    }
    context.stroke();
  }

  paintAxis(context, width) {
    const [from, to] = this.view;
    context.fillStyle = colour("panel");
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = colour("faint-ink");
    context.font = "11px system-ui, sans-serif";
    const step = roundStep((to - from) / Math.max(2, (width - LABEL) / 110));
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = LABEL + (at - from) * this.scale;
      if (x > width - 20) break;
      const text = at === 0 ? "0" : formatTime(at);
      context.fillText(text, Math.min(x + 3, width - context.measureText(text).width - 4), 15);
    }
    context.fillStyle = colour("rule");
    context.fillRect(0, AXIS - 1, width, 1);
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
        const now = this.chosen;
        if (now && now.number >= chunk * CHUNK && now.number < chunk * CHUNK + lanes.length) this.choose({ ...now, at: this.opAt(now, now.time ?? 0) });
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
    const down = event.offsetY + this.scroller.scrollTop - AXIS, number = Math.floor(down / LANE), lane = this.lanes.get(number);
    if (!lane || event.offsetX < LABEL || event.offsetY < AXIS) { this.tell(this.chosen); return; }
    const isPlanned = !lane.executed || Boolean(lane.planned && down % LANE > 21);
    const row = isPlanned ? lane.planned : lane.executed, factor = this.factorOf(isPlanned), time = this.timeAt(event.offsetX);
    const at = row ? row.starts.findIndex((start, index) => start * factor <= time && (start + row.lengths[index]) * factor >= time) : -1;
    this.tell(at < 0 ? this.chosen : { number, isPlanned, at });
  }

  factorOf(isPlanned) { return isPlanned ? this.source.slowdown || 1 : 1; }
  opAt(place, time) { return opAt(this.rowOf(place), time, this.factorOf(place.isPlanned)); }
  rowOf({ number, isPlanned }) { const lane = this.lanes.get(number); return lane ? (isPlanned ? lane.planned : lane.executed) : null; }

  // The details of an op, below the timeline.
  tell(place) {
    const text = place ? this.describe(place) : "";
    if (this.tip.textContent !== text) fill(this.tip, text);
  }

  describe({ number, isPlanned, at }) {
    const lane = this.lanes.get(number), row = this.rowOf({ number, isPlanned }), name = this.source.workers[number];
    if (!lane) return `${name}: loading …`;
    if (!row || !row.ops[at]) return `${name}: no op ${isPlanned ? "is planned" : "was executed"}`;
    const op = row.ops[at], facts = [`${lane.worker} ${op.full}`, this.paintOf(op.look).meaning];
    if (op.isRerouted) facts.push(`re-routed from pipeline ${op.home}`);
    if (row.vain.has(at)) facts.push("in vain");
    if (row.critical.has(at)) facts.push("critical");
    const factor = this.factorOf(true), atSpeed = factor === 1 ? " by the profile" : " at the measured speed", planned = (time) => formatTime(time * factor);
    facts.push(isPlanned ? `planned ${planned(row.lengths[at])} from ${planned(row.starts[at])}${atSpeed}` : `${formatTime(row.lengths[at])} from ${formatTime(row.starts[at])}`);
    const other = isPlanned ? lane.executed : lane.planned, twin = other ? other.ops.findIndex((one) => one.full === op.full) : -1;
    if (twin >= 0) facts.push(isPlanned ? `took ${formatTime(other.lengths[twin])}` : `planned ${planned(other.lengths[twin])}${atSpeed}`);
    return facts.join(" · ");
  }

  // Choose an op of a lane, executed or planned: it is framed, shown and told.
  choose(place) {
    this.chosen = place;
    this.tell(place);
    this.draw();
    const op = place && this.spanOf(place);
    if (!place) return;
    const top = place.number * LANE, seen = this.scroller.clientHeight - AXIS;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + LANE > this.scroller.scrollTop + seen) this.scroller.scrollTop = top + LANE - seen;
    const span = this.view[1] - this.view[0];
    if (op && (op[0] < this.view[0] || op[1] > this.view[1])) this.move(op[1] - op[0] > span ? op[0] - span / 8 : (op[0] + op[1] - span) / 2);
  }

  spanOf(place) {
    const row = this.rowOf(place), factor = this.factorOf(place.isPlanned);
    return row && row.ops[place.at] ? [row.starts[place.at] * factor, (row.starts[place.at] + row.lengths[place.at]) * factor] : null;
  }

  chooseBeside(step) {
    if (!this.chosen) { this.chooseRow(0); return; }
    const row = this.rowOf(this.chosen);
    if (row && row.ops.length) this.choose({ ...this.chosen, at: Math.max(0, Math.min(row.ops.length - 1, this.chosen.at + step)) });
  }

  // The rows are, from above: what a worker executed, what was planned for it, what the next one executed.
  chooseRow(step) {
    const rowsOf = (number) => { const lane = this.lanes.get(number); return lane ? [false, true].filter((isPlanned) => (isPlanned ? lane.planned : lane.executed)) : [false]; };
    const now = this.chosen, number = now ? now.number : Math.floor(this.scroller.scrollTop / LANE), kinds = rowsOf(number);
    let next = { number, isPlanned: now ? now.isPlanned : kinds[0] ?? false };
    if (now && step) {
      const kind = kinds.indexOf(now.isPlanned) + step;
      const other = Math.max(0, Math.min(this.source.workers.length - 1, number + step)), others = rowsOf(other);
      if (kinds[kind] !== undefined) next = { number, isPlanned: kinds[kind] };
      else if (other !== number) next = { number: other, isPlanned: others[step > 0 ? 0 : others.length - 1] ?? false };
      else return;
    }
    const span = now ? this.spanOf(now) : null;
    this.choose({ ...next, at: this.opAt(next, span ? span[0] : now?.time ?? Math.max(0, this.view[0])), time: span ? span[0] : now?.time });
  }

  paintChosen(context, scroll) {
    const span = this.chosen && this.spanOf(this.chosen);
    if (!span) return;
    const lane = this.lanes.get(this.chosen.number), hasBoth = lane.executed && lane.planned;
    const [offset, tall] = hasBoth ? (this.chosen.isPlanned ? [23, 8] : [3, 18]) : [4, 24];
    const x = LABEL + (span[0] - this.view[0]) * this.scale, wide = Math.max(3, (span[1] - span[0]) * this.scale), top = this.chosen.number * LANE - scroll + offset;
    for (const [outset, ink] of [[3, colour("panel")], [1.5, colour("ink")]]) {
      context.strokeStyle = ink;
      context.lineWidth = 3;
      context.strokeRect(x - outset, top - outset, wide + 2 * outset, tall + 2 * outset);
    }
  }

  close() { this.observer.disconnect(); }
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
