// The grid of workers: a row for each pipeline, a column for each stage; arrow keys move between workers.

import { fill, h } from "./dom.js";
import { STATES, describeWorker } from "./states.js";

const MOST_NAMED = 96;

export class WorkerGrid {
  // `choose` is called with the name of a worker; `pressed` says whether a worker is chosen, if workers can be chosen.
  constructor(choose, pressed = null) {
    this.choose = choose;
    this.pressed = pressed;
    this.cells = new Map();
    this.node = h("div", { class: "grid-box scroll" });
    this.counts = h("p", { class: "counts" });
    this.key = "";
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.node.addEventListener("click", (event) => {
      const cell = event.target.closest("button[data-worker]");
      if (cell) this.choose(cell.dataset.worker, cell);
    });
  }

  update(shape, workers) {
    const key = shape ? `${shape.pipelines} ${shape.stages}` : Object.keys(workers).join(" ");
    if (key !== this.key) this.build(shape, Object.keys(workers));
    this.key = key;
    for (const [name, cell] of this.cells) this.paint(name, cell, workers[name] || { state: "alive" });
    const counts = {};
    for (const about of Object.values(workers)) counts[about.state] = (counts[about.state] || 0) + 1;
    fill(this.counts, Object.entries(STATES).filter(([state]) => counts[state]).map(([state, { sign, word }]) =>
      h("span", { class: `count state-${state}` }, h("span", { class: "sign", "aria-hidden": "true" }, sign), ` ${counts[state].toLocaleString("en")} ${word} `)));
  }

  build(shape, names) {
    this.cells.clear();
    const columns = shape ? shape.stages : Math.min(32, Math.max(1, names.length));
    const isSmall = (shape ? shape.pipelines * shape.stages : names.length) > MOST_NAMED;
    const rows = [];
    if (shape) for (let p = 0; p < shape.pipelines; p++) rows.push([`pipeline ${p}`, Array.from({ length: columns }, (_, s) => `W${p}_${s}`)]);
    else for (let at = 0; at < names.length; at += columns) rows.push(["", names.slice(at, at + columns)]);
    const head = shape && !isSmall ? h("thead", {}, h("tr", {}, h("td"), Array.from({ length: columns }, (_, s) => h("th", { scope: "col" }, `stage ${s}`)))) : null;
    const body = rows.map(([label, workers], row) => h("tr", {}, h("th", { scope: "row" }, isSmall ? String(row) : label), workers.map((name, column) => {
      const cell = h("button", { type: "button", class: "worker", tabindex: row + column === 0 ? "0" : "-1", data: { worker: name, row, column } },
        h("span", { class: "sign", "aria-hidden": "true" }), isSmall ? null : h("span", { class: "name" }, name), isSmall ? null : " ", isSmall ? null : h("span", { class: "word" }));
      this.cells.set(name, cell);
      return h("td", {}, cell);
    })));
    fill(this.node, h("table", { class: isSmall ? "workers small" : "workers" }, h("caption", { class: "hidden" }, "Workers by pipeline and stage"), head, h("tbody", {}, body)));
  }

  paint(name, cell, about) {
    const mark = `${JSON.stringify(about)}${this.pressed ? this.pressed(name) : ""}`;
    if (cell.dataset.mark === mark) return;
    cell.dataset.mark = mark;
    const state = STATES[about.state] || STATES.alive;
    const text = describeWorker(name, about);
    cell.className = `worker state-${about.state}`;
    cell.setAttribute("aria-label", text);
    cell.title = text;
    if (this.pressed) cell.setAttribute("aria-pressed", String(this.pressed(name)));
    cell.children[0].textContent = state.sign;
    if (cell.children[2]) cell.children[2].textContent = about.state === "alive" ? "" : about.speed ? `×${about.speed}` : state.word;
  }

  onKey(event) {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const cell = event.target.closest("button[data-worker]");
    if (!step || !cell) return;
    const next = this.node.querySelector(`button[data-row="${Number(cell.dataset.row) + step[0]}"][data-column="${Number(cell.dataset.column) + step[1]}"]`);
    if (!next) return;
    event.preventDefault();
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
