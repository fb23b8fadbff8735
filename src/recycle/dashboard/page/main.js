// The page: which view is shown, the theme, and whether the server is there.

import { fill, formatTime, getJson, h, mayPass } from "./dom.js";
import { Campaign, Runs } from "./lists.js";
import { LiveRun } from "./live.js";
import { Events, Iteration, Overview, Recoveries, WhatIf } from "./views.js";

const VIEWS = { overview: ["Overview", Overview], iteration: ["Iteration", Iteration], recoveries: ["Recoveries", Recoveries], "what-if": ["What if", WhatIf], events: ["Events", Events] };
const AGAIN_MS = 1500;
const byId = (id) => document.getElementById(id);
let session = { actions: [], can_plan: false }, run = null, view = null, frame = 0, routed = 0;

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* a private window keeps nothing */ }
  byId("theme").textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
  if (view && view.repaint) view.repaint();
}

function firstTheme() {
  let kept = null;
  try { kept = localStorage.getItem("theme"); } catch { /* see above */ }
  setTheme(kept || (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
}

function notice(text) { byId("notice").hidden = !text; if (byId("notice").textContent !== text) byId("notice").textContent = text; }

function showConnection() {
  const isRefused = run && run.connection === "refused", isLost = isRefused || (run && run.connection === "lost"), hasEnded = run && run.data && run.data.has_ended;
  byId("connection").textContent = !run ? "" : isLost ? "○ no connection" : hasEnded ? (run.data.source === "train" ? "✓ ended" : "∿ simulated") : "● live";
  byId("connection").className = `connection ${isLost ? "is-lost" : ""}`;
  const data = run && run.data, problems = data ? [data.problem, ...(data.problems || [])].filter(Boolean) : [];
  if (isRefused) notice("This page needs the new address: the server was started again, with another token. Open the address that it printed.");
  else if (isLost) notice(`The server does not answer. This is the state of ${new Date(run.heardAt || Date.now()).toLocaleTimeString()}; the page goes on when the server is back. For a run that is over: recycle dashboard FOLDER`);
  else notice(problems.length ? `The record of this run is damaged, and what can be read of it is shown: ${problems.slice(0, 3).join("; ")}${problems.length > 3 ? `; and ${problems.length - 3} more` : ""}` : "");
}

function render() {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    if (!run || !run.data || !view) return;
    byId("run-name").textContent = run.data.name || run.id;
    document.title = `${run.data.name || run.id} – ReCycle`;
    showConnection();
    view.update(run.data);
  });
}

function show(made, focuses) {
  if (view) view.close();
  view = made;
  fill(byId("main"), made.node);
  if (!focuses) return;
  byId("main").focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

function tabs(id, chosen) {
  fill(byId("tabs"), id === null ? [] : Object.entries(VIEWS).map(([key, [title]]) => h("a", { href: `#/run/${encodeURIComponent(id)}/${key}`, "aria-current": key === chosen ? "page" : undefined }, title)));
}

async function openRun(id) {
  if (run && run.id === id) return;
  closeRun();
  const made = (run = new LiveRun(id));
  run.addEventListener("change", render);
  run.addEventListener("connection", showConnection);
  try { await made.open(); } catch (problem) { if (run === made) closeRun(); throw problem; }
}

function closeRun() {
  if (run) run.close();
  run = null;
  byId("run-name").textContent = "";
  showConnection();
}

async function route(event) {
  const [place, id, name, part] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const focuses = Boolean(event), asked = ++routed;
  try {
    if (place === "run" && VIEWS[name]) {
      tabs(id, name);
      await openRun(id);
      if (asked !== routed) return;
      const go = (where, more) => { location.hash = go.link(where, more).slice(1); };
      go.link = (where, more) => `#/run/${encodeURIComponent(id)}/${where}${more === undefined ? "" : `/${encodeURIComponent(more)}`}`;
      show(new VIEWS[name][1](run, session, go, part), focuses);
      render();
    } else if (place === "campaign") {
      closeRun(); tabs(null); document.title = "ReCycle"; show(new Campaign(id), focuses);
    } else if (place === "runs") {
      closeRun(); tabs(null); document.title = "ReCycle"; show(new Runs(), focuses);
    } else await start();
  } catch (problem) {
    if (asked !== routed) return;
    show({ node: h("p", { class: "empty" }, mayPass(problem) ? "The server does not answer; the page tries again." : problem.message, " ", h("a", { href: "#/runs" }, "All runs")), update() {}, close() {} }, focuses);
    if (mayPass(problem)) setTimeout(() => { if (asked === routed) route(event); }, AGAIN_MS);
  }
}

// With one run, show it; else the list.
async function start() {
  const found = await getJson("/api/runs");
  const only = found.runs.length === 1 && !found.campaigns.length ? found.runs[0].id : null;
  location.replace(only === null ? "#/runs" : `#/run/${encodeURIComponent(only)}/overview`);
}

firstTheme();
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
window.addEventListener("hashchange", route);
setInterval(() => { if (run && run.data && !run.data.has_ended && run.data.idle_s !== null) { run.data.idle_s += 5; render(); } }, 5000);
window.recycle = { view: () => view, run: () => run, formatTime };

// The first answer may fail, for example because the server is just starting: then ask again.
for (;;) {
  try { session = await getJson("/api/session"); break; } catch (problem) {
    fill(byId("main"), h("p", { class: "empty" }, mayPass(problem) ? "The server does not answer; the page tries again." : problem.message));
    if (!mayPass(problem)) break;
    await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}
await route();
