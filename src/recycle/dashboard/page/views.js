// The views of one run: overview, iteration, recoveries, what-if, events. Each has a node, `update(data)` and `close()`.

import { TimeChart, stackedBar } from "./charts.js";
import { fill, formatBytes, formatClock, formatCount, formatNumber, formatShare, formatTime, getJson, h, mayPass, placed, table } from "./dom.js";
import { WorkerGrid } from "./grid.js";
import { STATES, USES, describeWorker } from "./states.js";
import { Timeline, paintLegend } from "./timeline.js";

const NEXT_WORDS = { kill: "Kill (SIGKILL)", hang: "Hang (SIGSTOP)", slow: "Slow down to half", resume: "Full speed again", start: "Start a new one" };

function facts(data) {
  const ratio = data.iteration_us && data.planned_us ? h("small", {}, ` ${(data.iteration_us / data.planned_us).toFixed(2)} × the plan's period at the measured speed of ops`) : null;
  const total = data.shape ? data.shape.pipelines * data.shape.stages : null;
  const steps = data.steps_done ? `${formatCount(data.steps_done)}${data.num_steps ? ` of ${formatCount(data.num_steps)}` : ""}` : null;
  const rows = [
    ["Steps", steps], ["Loss", data.loss === null ? null : formatNumber(data.loss)],
    ["Throughput", data.samples_per_s === null ? null : `${formatNumber(data.samples_per_s)} samples/s`],
    ["Iteration", data.iteration_us ? [formatTime(data.iteration_us), ratio] : null],
    ["Live workers", data.num_live === null ? null : `${formatCount(data.num_live)}${total ? ` of ${formatCount(total)}` : ""}`],
    data.source === "simulate" && data.shares ? ["Failures", `${formatCount(data.shares.failures)}, ${formatCount(data.shares.joins)} came back`] : ["Recoveries", data.num_recoveries ? `${formatCount(data.num_recoveries)}, ${formatTime(data.lost_us)} lost` : "none"],
    ["Checkpoint", data.checkpoint_steps ? `step ${formatCount(data.checkpoint_steps)}` : null],
    ["Run time", formatTime(data.end_us)],
  ];
  return rows.filter(([, value]) => value !== null).map(([name, value]) => h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value)));
}

// Layers that are computed for as many micro-batches stand together.
function describeLoad({ layers, load, share, num_layers: num }) {
  const groups = [];
  for (const [layer, part] of layers) {
    const last = groups[groups.length - 1];
    if (last && last.part === part && last.to === layer - 1) last.to = layer; else groups.push({ from: layer, to: layer, part });
  }
  const texts = groups.map(({ from, to, part }) => `${from === to ? `layer ${from}` : `layers ${from} to ${to}`} for ${formatShare(part)}`);
  return `By the plan it computes ${formatShare(share)} of all work (${formatNumber(load, 3)} of ${num} layers on average): ${texts.join(", ")} of the micro-batches.`;
}

const marksOf = (data) => (data.recoveries.length ? data.recoveries.map((one) => ({ at_s: one.at_us / 1e6, joins: one.joins, text: one.who }))
  : data.changes.map(([at_s, node, joins]) => ({ at_s, joins, text: `${node} ${joins ? "joined" : "left"}` })));

export class Overview {
  constructor(run, session, go) {
    Object.assign(this, { run, session, go });
    this.facts = h("dl", { class: "facts" });
    this.status = h("p", { class: "status", role: "status" });
    this.grid = new WorkerGrid((name) => this.choose(name));
    this.detail = h("div", { class: "detail", "aria-live": "polite" }, h("p", { class: "faint" }, "Choose a worker to see more of it."));
    const part = (name) => async (from, to) => (await getJson("/api/run/series", { id: run.id, from_us: from, to_us: to }))[name];
    this.charts = { loss: new TimeChart("Loss", "", part("loss")), rate: new TimeChart("Throughput", "samples/s", part("rate"), { isZeroBased: true, isStepped: true }), live: new TimeChart("Live workers", "workers", part("live"), { isStepped: true }) };
    this.answer = h("p", { class: "answer", role: "status" });
    this.load = h("p");
    this.shares = h("div");
    this.list = h("div");
    this.recoveries = h("section", { class: "panel whole" }, h("h2", {}, "Recoveries"), this.list);
    this.node = h("div", { class: "overview" }, h("h1", { class: "hidden" }, "Overview"), this.status, this.facts,
      h("div", {}, h("section", { class: "panel workers-panel" }, h("h2", {}, "Workers"), this.grid.counts, this.grid.node, this.detail),
        h("section", { class: "panel" }, h("h2", {}, "Where the time went"), this.shares)),
      h("div", {}, h("section", { class: "panel" }, h("h2", {}, "Progress"), h("p", { class: "faint" }, "✕ a worker left · ▲ a worker joined · drag to zoom, or + − 0 and arrows on the keyboard"), this.charts.loss.node, this.charts.rate.node, this.charts.live.node)),
      this.recoveries);
  }

  update(data) {
    fill(this.facts, facts(data));
    const state = data.share_read < 1 ? `Reading the record: ${formatShare(data.share_read)}` : data.has_ended ? (data.source === "train" ? "The run has ended." : "A simulated run.") : data.waiting ? `Waiting: ${data.waiting}` : data.idle_s > 60 && data.steps_done ? `Nothing was recorded for ${formatTime(data.idle_s * 1e6)}: the run was cut off, or hangs.` : data.steps_done ? "Training." : "";
    this.status.className = `status ${data.waiting && !data.has_ended ? "is-waiting" : ""}`;
    if (this.status.textContent !== state) this.status.textContent = state;
    this.grid.update(data.shape, data.workers);
    for (const [name, chart] of Object.entries(this.charts)) chart.update(data.series[name], marksOf(data), data.end_us / 1e6);
    this.charts.loss.node.hidden = this.recoveries.hidden = data.source === "simulate" && !data.series.loss.num;
    fill(this.shares, this.shareBar(data));
    const newest = data.recoveries.slice(-6).reverse();
    const key = JSON.stringify([data.recoveries.length, data.generation]);
    if (key !== this.listed) {
      this.listed = key;
      fill(this.list, newest.length ? recoveryTable(newest, data, (number) => this.go("recoveries", number)) : h("p", { class: "empty" }, "No worker has left or joined."),
        data.recoveries.length > newest.length ? h("p", {}, h("a", { href: this.go.link("recoveries") }, `all ${data.recoveries.length} recoveries`)) : null);
    }
    if (this.chosen && data.workers[this.chosen]) this.showDetail(data);
  }

  shareBar(data) {
    if (!data.shares) return h("p", { class: "empty" }, "Nothing is recorded yet.");
    const start = data.shares.pauses_us.start || 0, times = { ...data.shares.time_us, start, recovery: data.shares.time_us.pause - start };
    const parts = USES.map(([key, name, style]) => ({ name, style: `use-${style}`, value: times[key] }));
    return [stackedBar("Share of the time", parts, (value, total) => `${formatShare(value / total)} · ${formatTime(value)}`),
      h("p", { class: "faint" }, `${formatCount(data.shares.samples)} samples were applied, ${formatCount(data.shares.lost_samples)} were computed in vain; ${formatNumber(data.shares.throughput)} samples/s over the whole run.`)];
  }

  choose(name) { this.chosen = name; this.answer.textContent = ""; this.detailKey = ""; this.showDetail(this.run.data); this.detail.scrollIntoView({ block: "nearest" }); }

  showDetail(data) {
    const about = data.workers[this.chosen] || { state: "alive" };
    const key = JSON.stringify([this.chosen, about, data.has_ended, data.num_recoveries]);
    if (key === this.detailKey) return;
    this.detailKey = key;
    this.showLoad(data);
    const isGone = about.state === "dead", actions = data.has_ended ? [] : this.session.actions.filter((action) => (action === "start" ? isGone : !isGone && about.state !== "joining" && about.state !== "starting"));
    fill(this.detail, h("h3", {}, describeWorker(this.chosen, about)),
      actions.length ? h("div", { class: "actions" }, actions.map((action) => h("button", { type: "button", class: action === "start" || action === "resume" ? "" : "danger", data: { action }, onclick: () => this.inject(action) }, NEXT_WORDS[action]))) : null,
      this.answer, this.load, h("p", {}, data.shape ? h("a", { href: this.go.link("what-if", this.chosen) }, `What if ${this.chosen} died?`) : null));
  }

  // What the worker computes by the plan of now; a run without a plan has none to say.
  async showLoad(data) {
    const asked = (this.loadAsked = {});
    fill(this.load);
    if (!data.shape) return;
    try {
      const load = await getJson("/api/run/load", { id: this.run.id, worker: this.chosen });
      if (asked === this.loadAsked && load.layers.length) fill(this.load, describeLoad(load));
    } catch { /* the plan cannot be read: the iteration says why */ }
  }

  async inject(action) {
    const answer = this.answer;
    answer.textContent = "…";
    try {
      const response = await fetch(`/api/run/inject?${new URLSearchParams({ id: this.run.id })}`, {
        method: "POST", headers: { "Content-Type": "application/json", "X-Recycle-Token": this.session.injection_token }, body: JSON.stringify({ action, worker: this.chosen }) });
      const data = await response.json();
      answer.textContent = data.done || data.problem;
    } catch { answer.textContent = "The server does not answer."; }
  }

  repaint() { for (const chart of Object.values(this.charts)) chart.repaint(); }
  close() { for (const chart of Object.values(this.charts)) chart.close(); }
}

function partBar(one, data, longest) {
  return placed(h("div", { class: "stack thin", "aria-hidden": "true" }, one.parts.filter((part) => part.time_us).map((part) =>
    placed(h("span", { class: "part", title: `${part.part} ${formatTime(part.time_us)}` }), { width: `${(100 * part.time_us) / Math.max(1, one.lost_us)}%`, "background-color": data.paints[data.part_looks[part.part]].fill }))), { width: `${Math.max(4, (100 * one.lost_us) / longest)}%` });
}

function recoveryTable(recoveries, data, open) {
  const longest = Math.max(1, ...recoveries.map((one) => one.lost_us));
  const rows = recoveries.map((one) => h("tr", {},
    h("td", {}, h("button", { type: "button", class: "link", onclick: () => open(one.number) }, one.who)), h("td", { class: "number" }, formatCount(one.step)), h("td", { class: "number" }, formatTime(one.at_us)),
    h("td", { class: "number" }, formatTime(one.lost_us)), h("td", { class: "bar-cell" }, partBar(one, data, longest)), h("td", { class: "wide" }, one.about)));
  return table("Recoveries", ["Who", "Step", "At", "Lost", "Parts", "Why"], rows);
}

export class Recoveries {
  constructor(run, session, go, number) {
    Object.assign(this, { run, go, number: number === undefined ? null : Number(number) });
    this.list = h("div");
    this.detail = h("section", { class: "panel" });
    this.node = h("div", {}, h("h1", {}, "Recoveries"), this.detail, h("section", { class: "panel" }, h("h2", {}, "All"), this.list));
    this.key = "";
  }

  update(data) {
    const key = `${data.generation} ${data.recoveries.length}`;
    if (key === this.key) return;
    this.key = key;
    if (!data.recoveries.length) { fill(this.list, h("p", { class: "empty" }, "No worker has left or joined.")); this.detail.hidden = true; return; }
    this.detail.hidden = false;
    fill(this.list, recoveryTable(data.recoveries.slice(-500).reverse(), data, (number) => this.go("recoveries", number)));
    this.show(data);
  }

  async show(data) {
    const one = data.recoveries[this.number ?? data.recoveries.length - 1];
    if (!one) { fill(this.detail, h("p", { class: "empty" }, `There is no recovery ${this.number}.`)); return; }
    const events = h("div", {}, h("p", { class: "faint" }, "Loading …"));
    fill(this.detail, h("h2", {}, `${one.who}, in step ${one.step}`), h("p", {}, one.about),
      h("p", {}, `${formatTime(one.lost_us)} lost: from ${formatClock(one.at_us)} to ${formatClock(one.end_us)}, epoch ${one.epoch}, then ${formatCount(one.num_live)} live workers.`),
      waterfall(one, data),
      one.layers.length ? h("p", {}, `Layers of each stage from then on: ${one.layers.join(", ")}.`) : null,
      one.moves.length ? [h("h3", {}, "Moves"), h("ul", {}, one.moves.slice(0, 40).map((move) => h("li", {}, move.replace(">", " takes the place "))))] : null,
      h("p", {}, h("a", { href: this.go.link("iteration", one.step - 1) }, `Iteration ${one.step - 1} as executed: what was in vain, and what was re-routed`)),
      h("h3", {}, "Messages"), events);
    try {
      const found = await getJson("/api/run/recovery", { id: this.run.id, number: one.number });
      fill(events, found.events.length ? eventTable(found.events) : h("p", { class: "empty" }, "None."));
    } catch (problem) { fill(events, h("p", { class: "empty" }, problem.message)); }
  }

  close() {}
}

// Redone work lies before the failure: it is the work that was lost with it.
function waterfall(one, data) {
  const parts = [one.parts.find((part) => part.part === "redo"), ...one.parts.filter((part) => part.part !== "redo")];
  let at = 0;
  const rows = parts.map((part) => {
    const left = at;
    at += part.time_us;
    const bar = placed(h("span", { class: "fall-bar" }), { left: `${Math.min(99.7, (100 * left) / Math.max(1, one.lost_us))}%`, width: `${Math.max(0.3, (100 * part.time_us) / Math.max(1, one.lost_us))}%`, "background-color": data.paints[data.part_looks[part.part]].fill });
    return h("tr", { class: part.time_us ? "" : "faint" }, h("th", { scope: "row" }, part.part), h("td", { class: "fall" }, part.time_us ? bar : ""), h("td", { class: "number" }, formatTime(part.time_us)));
  });
  return h("table", { class: "waterfall" }, h("caption", { class: "hidden" }, "Parts of the recovery in order of time"), h("tbody", {}, rows));
}

const WHO = ["node", "worker", "link", "workers"], TIMES = ["at_us", "start_us", "end_us", "event", "number"];

function eventTable(events) {
  return table("Events", ["Time", "Event", "Who", "Details"], events.map((event) => {
    const who = WHO.map((key) => event[key]).filter(Boolean).flat().join(", ");
    const details = Object.entries(event).filter(([key]) => !WHO.includes(key) && !TIMES.includes(key)).map(([key, value]) => `${key.replace(/_(us|bytes)$/, "").replace(/^(num|is|has)_/, "").replaceAll("_", " ")} ${typeof value === "boolean" ? (value ? "yes" : "no") : key.endsWith("_us") ? formatTime(value) : key.endsWith("_bytes") ? formatBytes(value) : Array.isArray(value) ? value.join(", ") || "none" : typeof value === "number" && !Number.isInteger(value) ? formatNumber(value) : value}`);
    const at = event.at_us ?? event.start_us;
    const time = at === undefined ? "" : event.end_us && event.event === "spell" ? `${formatClock(at)} for ${formatTime(event.end_us - at)}` : formatClock(at);
    return h("tr", {}, h("td", { class: "number" }, time), h("td", {}, event.event), h("td", {}, who), h("td", { class: "wide" }, details.join(" · ")));
  }));
}

export class Events {
  constructor(run) {
    this.run = run;
    this.text = h("input", { type: "search", id: "event-text", placeholder: "W1_2, warning …", oninput: () => this.soon() });
    const kinds = ["step", "spell", "changed", "recovery", "suspected", "joining", "placed", "speed", "link", "checkpoint", "warning", "memory", "evaluation", "resumed", "started"];
    this.kind = h("select", { id: "event-kind", onchange: () => this.search() }, h("option", { value: "" }, "all events"), kinds.map((kind) => h("option", { value: kind }, kind)));
    this.list = h("div");
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.search(this.next) }, "Show older events");
    this.count = h("p", { class: "faint", role: "status" });
    const link = (form, text, iteration) => h("a", { class: "button", download: true, href: `/api/run/download?${new URLSearchParams({ id: run.id, form, ...(iteration ? { iteration } : {}) })}` }, text);
    this.node = h("div", {}, h("h1", {}, "Events"), h("div", { class: "controls" }, h("label", { for: "event-text" }, "Search "), this.text, h("label", { for: "event-kind" }, "Kind "), this.kind,
      h("span", { class: "downloads" }, "Download ", link("json", "JSON lines"), link("csv", "CSV"), link("perfetto", "Perfetto trace"))), this.count, this.list, this.more);
    this.found = [];
    this.search();
  }

  soon() { clearTimeout(this.timer); this.timer = setTimeout(() => this.search(), 250); }

  async search(before) {
    const asked = (this.asked = {});
    try {
      const answer = await getJson("/api/run/events", { id: this.run.id, text: this.text.value, kind: this.kind.value, before, limit: 100 });
      if (asked !== this.asked) return;
      this.found = before === undefined ? answer.events : [...this.found, ...answer.events];
      this.next = answer.next;
      this.more.hidden = answer.next === null;
      this.count.textContent = `${formatCount(this.found.length)} shown of ${formatCount(answer.total)} events, the newest first; ops are in the timeline`;
      const looked = answer.next === null ? "" : ` among the newest ${formatCount(answer.total - answer.next)}`;
      this.more.textContent = this.found.length && answer.events.length ? "Show older events" : "Look further back";
      fill(this.list, this.found.length ? h("section", { class: "panel" }, eventTable(this.found)) : h("p", { class: "empty" }, `No event is like this${looked}.`));
    } catch (problem) { fill(this.list, h("p", { class: "empty" }, problem.message)); }
  }

  update(data) {
    const key = `${data.generation} ${data.version}`;
    if (this.key && key !== this.key && window.scrollY < 40 && this.found.length <= 100) this.soon();
    this.key = key;
  }

  close() { clearTimeout(this.timer); }
}

export class Iteration {
  constructor(run, session, go, number) {
    Object.assign(this, { run, go, number: number === undefined ? null : Number(number) });
    this.input = h("input", { type: "number", id: "iteration", min: "0", onchange: () => go("iteration", Math.max(0, Number(this.input.value) || 0)) });
    this.follow = h("input", { type: "checkbox", id: "follow", onchange: () => { if (this.follow.checked) go("iteration"); else go("iteration", this.shown ?? 0); } });
    this.follow.checked = this.number === null;
    this.scaled = h("input", { type: "checkbox", id: "scaled", checked: true, onchange: () => this.draw(true) });
    this.vain = h("input", { type: "checkbox", id: "vain", onchange: () => this.draw(false) });
    this.vainBox = h("span", { hidden: true }, this.vain, h("label", { for: "vain" }, " from the first op in vain"));
    this.about = h("p", { class: "faint", role: "status" }, "Loading …");
    this.trace = h("a", { class: "button", download: true, hidden: true }, "Perfetto trace");
    this.box = h("div");
    const step = (by) => go("iteration", Math.max(0, (this.shown ?? 0) + by));
    this.node = h("div", {}, h("h1", {}, "Iteration"), h("div", { class: "controls" },
      h("button", { type: "button", "aria-label": "the iteration before", onclick: () => step(-1) }, "◀"), h("label", { for: "iteration" }, "Iteration "), this.input, h("button", { type: "button", "aria-label": "the next iteration", onclick: () => step(1) }, "▶"),
      h("span", {}, this.follow, h("label", { for: "follow" }, " follow the newest")), h("span", {}, this.scaled, h("label", { for: "scaled" }, " plan at the measured speed")), this.vainBox, this.trace), this.about, this.box);
  }

  update(data) {
    const bounds = data.iterations;
    if (!bounds) { fill(this.about, "The record holds no ops: there is no iteration to show."); fill(this.box); return; }
    // The newest one may not be whole yet: the last one that ended is.
    const wanted = this.number ?? Math.max(bounds[0], Math.min(bounds[1], (data.steps_done || 1) - 1));
    const key = `${data.generation} ${wanted} ${data.num_recoveries}`;
    if (key === this.key) return;
    this.key = key;
    clearTimeout(this.again);
    this.load(data, wanted, bounds, key);
  }

  // An answer that comes when another one is wanted is not shown.
  async load(data, wanted, bounds, key) {
    try {
      const answer = await getJson("/api/run/iteration", { id: this.run.id, number: wanted, first: 0, last: 64 });
      if (key !== this.key) return;
      this.shown = wanted;
      this.input.value = wanted;
      this.input.max = bounds[1];
      this.trace.href = `/api/run/download?${new URLSearchParams({ id: this.run.id, form: "perfetto", iteration: wanted })}`;
      this.trace.hidden = false;
      if (!this.timeline) { this.timeline = new Timeline(data.paints); fill(this.box, paintLegend(data.paints), this.timeline.node); }
      this.answer = answer;
      this.vainBox.hidden = !(answer.vain_from_us < 0);
      const scaled = answer.slowdown ? `The plan's period at the measured speed of ops: ${formatTime(answer.period_us * answer.slowdown)}; with the times of its profile it is ${formatTime(answer.period_us)}, and ops took ${formatNumber(answer.slowdown, 3)} × as long as the profile says. ` : `The plan's period with the times of its profile: ${formatTime(answer.period_us)}. `;
      const beside = answer.period_us ? scaled : "";
      fill(this.about, `${formatTime(answer.length_us)} from the first op to the last. ${beside}`, `${formatCount(answer.num_ops)} ops${answer.num_in_vain ? `, ${formatCount(answer.num_in_vain)} in vain` : ""}${answer.dead.length ? `, dead: ${answer.dead.slice(0, 8).join(", ")}${answer.dead.length > 8 ? " and more" : ""}` : ""}. `,
        answer.critical.length ? `Critical: ${answer.critical.length} ops, the last is ${answer.critical[answer.critical.length - 1]}. ` : "", answer.plan_problem ? `No plan: ${answer.plan_problem}` : "",
        "In each lane, above what was executed, below what was planned.");
      this.draw(false);
    } catch (problem) {
      if (key !== this.key) return;
      fill(this.about, problem.message);
      this.key = "";  // the next change asks again
      if (mayPass(problem)) this.again = setTimeout(() => this.update(this.run.data), 1500);
    }
  }

  draw(keepView) {
    const answer = this.answer;
    if (!answer || !this.timeline) return;
    this.timeline.show({ label: `Iteration ${answer.number}`, workers: answer.workers, dead: new Set(answer.dead), executed_us: answer.length_us, planned_us: answer.planned_length_us, slowdown: this.scaled.checked ? answer.slowdown || 1 : 1,
      from_us: this.vain.checked && !this.vainBox.hidden ? answer.vain_from_us : 0,
      first: answer.first, lanes: answer.lanes, fetch: async (first, last) => (await getJson("/api/run/iteration", { id: this.run.id, number: answer.number, first, last })).lanes }, keepView);
  }

  repaint() { if (this.timeline) this.timeline.draw(); }
  close() { this.key = null; clearTimeout(this.again); if (this.timeline) this.timeline.close(); }
}

export class WhatIf {
  constructor(run, session, go, chosen) {
    Object.assign(this, { run, session, chosen: null, first: chosen });
    this.grid = new WorkerGrid((name) => this.toggle(name), (name) => this.chosen !== null && this.chosen.has(name));
    this.ask = h("button", { type: "button", class: "primary", onclick: () => this.plan() }, "Show the plan");
    this.answer = h("div", { role: "status" });
    this.box = h("div");
    this.node = h("div", {}, h("h1", {}, "What if"), h("p", {}, "Choose the workers that are dead; the plan is the one with which the run would go on, from the same planner."),
      session.can_plan ? null : h("p", { class: "empty" }, "This server cannot plan."), h("section", { class: "panel" }, this.grid.node, h("div", { class: "controls" }, this.ask)), this.answer, this.box);
  }

  update(data) {
    if (!data.shape) { fill(this.answer, h("p", { class: "empty" }, "This run has no plan, so there is nothing to plan for.")); this.ask.disabled = true; return; }
    if (this.chosen === null) {
      this.chosen = new Set(Object.entries(data.workers).filter(([, about]) => about.state === "dead").map(([name]) => name));
      if (this.first) this.chosen.add(this.first);
    }
    this.redraw(data);
  }

  redraw(data) { this.grid.update(data.shape, Object.fromEntries(Object.keys(data.workers).map((name) => [name, { state: this.chosen.has(name) ? "dead" : "alive" }]))); }
  toggle(name) { if (!this.chosen.delete(name)) this.chosen.add(name); this.redraw(this.run.data); }

  async plan() {
    this.ask.disabled = true;
    fill(this.answer, h("p", {}, "Planning … the first plan takes some seconds."));
    try {
      const answer = await getJson("/api/run/what-if", { id: this.run.id, dead: [...this.chosen].join(",") });
      const ratio = answer.period_us / answer.today_us - 1;
      fill(this.answer, h("dl", { class: "facts" },
        h("div", { class: "fact" }, h("dt", {}, "Period then"), h("dd", {}, formatTime(answer.period_us))),
        h("div", { class: "fact" }, h("dt", {}, `Period today (${answer.today_dead.length ? `${answer.today_dead.length} dead` : "nobody dead"})`), h("dd", {}, formatTime(answer.today_us))),
        h("div", { class: "fact" }, h("dt", {}, "Difference"), h("dd", {}, `${ratio >= 0 ? "+" : "−"}${Math.abs(100 * ratio).toFixed(1)} %`)),
        h("div", { class: "fact" }, h("dt", {}, "Proven bound"), h("dd", {}, formatTime(answer.bound_us)))),
        h("p", {}, answer.reason), Object.keys(answer.speeds).length ? h("p", {}, `For workers that are not as fast as their peers: ${Object.entries(answer.speeds).map(([name, speed]) => `${name} at ${speed} of their speed`).join(", ")}.`) : null,
        answer.moves.length ? h("p", {}, `Workers that move: ${answer.moves.map((move) => move.replace(">", " → ")).join(", ")}.`) : null);
      if (!this.timeline) { this.timeline = new Timeline(this.run.data.paints); fill(this.box, paintLegend(this.run.data.paints), this.timeline.node); }
      if (answer.lanes.length < answer.workers.length) this.answer.append(h("p", { class: "faint" }, `The first ${formatCount(answer.lanes.length)} of ${formatCount(answer.workers.length)} workers are drawn.`));
      this.timeline.show({ label: "The plan", workers: answer.workers.slice(0, answer.lanes.length), dead: new Set(answer.dead), executed_us: 0, planned_us: answer.planned_length_us, slowdown: 1, first: 0, lanes: answer.lanes });
    } catch (problem) { fill(this.answer, h("p", { class: "empty" }, problem.message)); fill(this.box); this.timeline = null; }
    this.ask.disabled = !this.session.can_plan;
  }

  repaint() { if (this.timeline) this.timeline.draw(); }
  close() { if (this.timeline) this.timeline.close(); }
}

export const stateWord = (state) => (STATES[state] ? STATES[state].word : state);
