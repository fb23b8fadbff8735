// The list of runs, with loss curves of chosen ones beside each other, and the results of campaigns.

import { partOfKey, timeAxis } from "./charts.js";
import { colour, fill, formatBytes, formatCount, formatNumber, formatTime, getJson, h, placed, table } from "./dom.js";

const STATE_WORDS = { live: "● live", ended: "✓ ended", "cut off": "‖ cut off", damaged: "✕ damaged", simulated: "∿ simulated", waiting: "○ waiting" };
// Colours of texts, which are told apart from the background in both themes.
const INKS = ["line", "dead", "alive", "moved", "suspected", "ink"];
const MOST_COMPARED = 6, MOST_BARS = 60, MOST_ROWS = 500, DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3], [12, 4]];

export class Runs {
  constructor(go) {
    this.go = go;
    this.box = h("div", {}, h("p", { class: "empty" }, "Loading …"));
    this.chart = h("div");
    this.campaigns = h("div");
    this.node = h("div", {}, h("h1", {}, "Runs"), this.chart, this.box, this.campaigns);
    this.chosen = new Set();
    this.load();
    this.timer = setInterval(() => { if (!document.hidden) this.load(); }, 5000);
  }

  async load() {
    try {
      const found = await getJson("/api/runs");
      const key = JSON.stringify(found);
      if (key === this.key) return;
      this.key = key;
      fill(this.box, found.runs.length ? h("section", { class: "panel" }, this.list(found.runs)) : h("p", { class: "empty" }, "There is no run here yet. Make one with: recycle train --out runs/a"));
      fill(this.campaigns, found.campaigns.length ? [h("section", { class: "panel" }, h("h2", {}, "Campaigns"), h("ul", {}, found.campaigns.map((one) => h("li", {}, h("a", { href: `#/campaign/${encodeURIComponent(one.id)}` }, one.id), ` (${one.kind})`))))] : null);
    } catch (problem) { if (!this.key) fill(this.box, h("p", { class: "empty" }, problem.message)); }
  }

  list(runs) {
    const rows = runs.map((run) => h("tr", {},
      h("td", {}, h("input", { type: "checkbox", "aria-label": `compare ${run.id}`, checked: this.chosen.has(run.id), onchange: (event) => this.compare(run.id, event.target.checked) })),
      h("td", {}, h("a", { href: `#/run/${encodeURIComponent(run.id)}/overview` }, run.id === "." ? run.name || "this run" : run.id)), h("td", { class: `run-${run.state.replace(" ", "-")}` }, STATE_WORDS[run.state] || run.state, run.problem ? h("div", { class: "faint" }, run.problem) : null),
      h("td", { class: "wide" }, run.name), h("td", { class: "number" }, formatCount(run.steps)), h("td", { class: "number" }, formatNumber(run.loss)), h("td", { class: "number" }, run.samples_per_s ? `${formatNumber(run.samples_per_s)} samples/s` : "–"),
      h("td", { class: "number" }, run.recoveries === null ? "–" : `${run.recoveries}${run.lost_us ? `, ${formatTime(run.lost_us)}` : ""}`), h("td", { class: "number" }, run.modified_s ? new Date(run.modified_s * 1000).toLocaleString() : "–")));
    return table("Runs", ["Compare", "Run", "State", "Model", "Steps", "Loss", "Throughput", "Recoveries, lost", "Written"], rows);
  }

  async compare(id, isChosen) {
    if (isChosen) this.chosen.add(id); else this.chosen.delete(id);
    if (this.plot) { this.plot.destroy(); this.plot = null; }
    const ids = [...this.chosen].slice(0, MOST_COMPARED);
    if (!ids.length) { fill(this.chart); return; }
    const found = (await Promise.all(ids.map((one) => getJson("/api/run", { id: one }).catch(() => null)))).map((data, number) => [ids[number], data]).filter(([, data]) => data);
    const loss = found.some(([, data]) => data.series.loss.num) ? "loss" : "rate";
    const tables = found.map(([, data]) => [data.series[loss].at_s, data.series[loss].mean]);
    const box = h("div", { class: "plot tall", role: "img", tabindex: "0", "aria-label": `${loss} of ${ids.join(", ")} over time. Plus and minus zoom, arrows move, zero shows all.`, onkeydown: (event) => this.onKey(event, tables) });
    const ink = (number) => colour(INKS[number]);
    fill(this.chart, h("section", { class: "panel" }, h("h2", {}, loss === "loss" ? "Loss over time" : "Throughput over time, samples/s"),
      this.chosen.size > MOST_COMPARED ? h("p", { class: "faint", role: "status" }, `${MOST_COMPARED} runs can be compared at once: ${[...this.chosen].slice(MOST_COMPARED).join(", ")} not shown.`) : null, box,
      h("ul", { class: "legend" }, found.map(([one], number) => h("li", {}, placed(h("span", { class: "swatch" }), { "background-color": ink(number) }), ` ${one}`)))));
    const axis = { stroke: colour("faint-ink"), grid: { stroke: colour("rule") }, ticks: { stroke: colour("rule") } };
    this.plot = new window.uPlot({ width: box.clientWidth, height: 260, legend: { show: false }, scales: { x: { time: false } },
      axes: [{ ...axis, ...timeAxis }, { ...axis, size: 56, values: (_, ticks) => ticks.map((value) => formatNumber(value, 5)) }],
      series: [{}, ...found.map((_, number) => ({ stroke: ink(number), width: 1.5, dash: DASHES[number], spanGaps: true, points: { show: false } }))] }, window.uPlot.join(tables), box);
  }

  onKey(event, tables) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const times = tables.flatMap(([at_s]) => (at_s.length ? [at_s[0], at_s[at_s.length - 1]] : []));
    const { min, max } = this.plot.scales.x, part = partOfKey(event.key, [min, max], [Math.min(...times), Math.max(...times)]);
    if (!part || !times.length) return;
    event.preventDefault();
    this.plot.setScale("x", { min: part[0], max: part[1] });
  }

  update() {}
  close() { clearInterval(this.timer); if (this.plot) this.plot.destroy(); }
}

export class Campaign {
  constructor(id) {
    this.id = id;
    this.filter = h("input", { type: "search", id: "filter", placeholder: "recycle, 4 x 8 …", oninput: () => this.draw() });
    this.measure = h("select", { id: "measure", onchange: () => this.draw() });
    this.box = h("div", {}, h("p", { class: "empty" }, "Loading …"));
    this.notes = h("ul", { class: "faint" });
    this.title = h("h1", {}, id);
    this.node = h("div", {}, this.title, h("div", { class: "controls" }, h("label", { for: "filter" }, "Filter "), this.filter, h("label", { for: "measure" }, "Plot "), this.measure), this.box, h("details", {}, h("summary", {}, "Assumptions and notes"), this.notes));
    this.sort = null;
    this.load();
  }

  async load() {
    try {
      this.data = await getJson("/api/campaign", { id: this.id });
      fill(this.title, this.data.title);
      fill(this.notes, this.data.notes.map((note) => h("li", {}, note)));
      const numbers = this.data.columns.filter((column) => !this.data.texts.includes(column));
      fill(this.measure, numbers.map((column) => h("option", { value: column }, this.headOf(column))));
      this.measure.value = numbers.includes("throughput") ? "throughput" : numbers[0] || "";
      this.draw();
    } catch (problem) { fill(this.box, h("p", { class: "empty" }, problem.message)); }
  }

  draw() {
    const { columns, texts } = this.data, words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let rows = this.data.rows.filter((row) => { const text = row.filter((value) => typeof value === "string").join(" ").toLowerCase(); return words.every((word) => text.includes(word)); });
    if (this.sort) { const at = columns.indexOf(this.sort.column), sign = this.sort.isDown ? -1 : 1; rows = [...rows].sort((a, b) => sign * (a[at] > b[at] ? 1 : a[at] < b[at] ? -1 : 0)); }
    const shown = columns.map((_, index) => index).filter((index) => rows.some((row) => row[index] !== null));
    const heads = shown.map((index) => columns[index]).map((column) => h("th", { scope: "col", "aria-sort": this.sort && this.sort.column === column ? (this.sort.isDown ? "descending" : "ascending") : "none" },
      h("button", { type: "button", class: "link", onclick: () => { this.sort = { column, isDown: !(this.sort && this.sort.column === column && this.sort.isDown) }; this.draw(); } }, this.headOf(column))));
    const cut = rows.length > MOST_ROWS ? `; the first ${MOST_ROWS} of them are in the table` : "", missing = this.data.missing.map((one) => `; ${one}`).join("");
    fill(this.box, h("p", { class: "faint", role: "status" }, `${rows.length} of ${this.data.rows.length} rows${cut}${missing}`), rows.length ? [this.bars(rows),
      h("section", { class: "panel" }, table(this.data.title, heads, rows.slice(0, MOST_ROWS).map((row) => h("tr", {}, shown.map((index) => [row[index], index]).map(([value, index]) => h("td", { class: typeof value === "number" ? "number" : "" }, typeof value === "number" ? this.textOf(value, index) : value ?? "–")))), { class: "dense" }))] : h("p", { class: "empty" }, "No row is like this."));
  }

  // Times and bytes have their units beside each value, other numbers in the head of their column.
  headOf(column) { const unit = this.data.units[this.data.columns.indexOf(column)]; return unit && unit !== "µs" && unit !== "bytes" ? `${column} (${unit})` : column; }
  textOf(value, index) { const unit = this.data.units[index]; return unit === "µs" ? formatTime(value) : unit === "bytes" ? formatBytes(value) : formatNumber(value, 5); }

  // A bar from zero for each row that has the chosen number; negative ones go to the left, in another colour.
  bars(all) {
    const { columns, texts } = this.data, at = columns.indexOf(this.measure.value);
    if (at < 0) return null;
    const rows = all.filter((row) => row[at] !== null), drawn = rows.slice(0, MOST_BARS), values = drawn.map((row) => row[at]);
    const low = Math.min(0, ...values), span = Math.max(0, ...values) - low || 1, place = (value) => (100 * (Math.min(0, value) - low)) / span;
    const facts = [drawn.length < rows.length ? `The first ${drawn.length} of ${rows.length} rows are drawn: filter or sort to see others.` : "", rows.length < all.length ? `${all.length - rows.length} rows have no such number.` : "", low < 0 ? "Negative values go to the left of zero." : ""].filter(Boolean);
    return h("section", { class: "panel" }, h("h2", {}, this.headOf(this.measure.value)), facts.length ? h("p", { class: "faint" }, facts.join(" ")) : null, h("table", { class: "waterfall named" }, h("caption", { class: "hidden" }, this.measure.value), h("tbody", {}, drawn.map((row) => h("tr", {},
      h("th", { scope: "row" }, texts.map((text) => row[columns.indexOf(text)]).filter(Boolean).join(" · ")),
      h("td", { class: "fall" }, placed(h("span", { class: `fall-bar ${row[at] < 0 ? "negative" : "plain"}` }), { left: `${place(row[at])}%`, width: `${(100 * Math.abs(row[at])) / span}%` })), h("td", { class: "number" }, this.textOf(row[at], at)))))));
  }

  update() {}
  close() {}
}
