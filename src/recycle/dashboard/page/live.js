// A run as the page knows it: loaded whole, then kept up to date by what the server pushes.

import { getJson } from "./dom.js";

const AGAIN_MS = 1500;

export class LiveRun extends EventTarget {
  constructor(id) {
    super();
    this.id = id;
    this.data = null;
    this.connection = "connecting";
    this.stream = null;
    this.loading = null;
    this.isClosed = false;
    this.onVisibility = () => (document.hidden ? this.disconnect() : this.connect());
    document.addEventListener("visibilitychange", this.onVisibility);
  }

  async open() {
    await this.load();
    this.connect();
  }

  // Load the whole state; several callers share one request.
  load() {
    this.loading ??= this.loadOnce().finally(() => { this.loading = null; });
    return this.loading;
  }

  // What was pushed meanwhile may be newer than the answer: then ask again.
  async loadOnce() {
    for (let tries = 0; tries < 5; tries++) {
      const data = await getJson("/api/run", { id: this.id }), heard = this.heard;
      this.data = data;
      if (!heard || heard.generation !== data.generation || heard.version <= data.version) break;
    }
    this.changed();
  }

  connect() {
    if (this.stream || this.isClosed || document.hidden) return;
    const stream = new EventSource(`/api/run/stream?${new URLSearchParams({ id: this.id })}`);
    this.stream = stream;
    stream.onopen = () => { this.setConnection("live"); this.load().catch(() => {}); };
    stream.onmessage = (message) => this.apply(JSON.parse(message.data));
    stream.onerror = () => {
      if (this.connection !== "refused") this.setConnection("lost");
      if (stream.readyState === EventSource.CLOSED) {  // it was refused: the browser does not try again by itself
        this.disconnect();
        setTimeout(() => this.connect(), AGAIN_MS);
        getJson("/api/session").catch((problem) => { if (problem.status === 401) this.setConnection("refused"); });
      }
    };
  }

  // A hidden page holds no connection: browsers allow few to one server.
  disconnect() {
    if (this.stream) this.stream.close();
    this.stream = null;
  }

  close() {
    this.isClosed = true;
    this.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
  }

  setConnection(connection) {
    if (connection === "live") this.heardAt = Date.now();
    this.connection = connection;
    this.dispatchEvent(new Event("connection"));
  }

  apply(change) {
    this.heardAt = Date.now();
    this.heard = change;
    const data = this.data;
    const isNext = data && change.generation === data.generation && change.from_version !== null && change.from_version <= data.version;
    if (!isNext) { this.load().catch(() => {}); return; }
    if (change.version < data.version) return;
    const { points, new_recoveries: recoveries, workers, shares, ...head } = change;
    Object.assign(data, head);
    Object.assign(data.workers, workers);
    if (shares) data.shares = shares;
    for (const [name, added] of Object.entries(points)) append(data.series[name], added);
    for (const one of recoveries) if (one.number >= data.recoveries.length) data.recoveries.push(one);
    this.changed();
  }

  changed() { this.dispatchEvent(new Event("change")); }
}

function append(series, points) {
  const last = series.at_s.length ? series.at_s[series.at_s.length - 1] : -Infinity;
  for (const [at, value] of points) {
    if (at <= last || value === null) continue;
    series.at_s.push(at);
    for (const column of ["mean", "low", "high"]) series[column].push(value);
    series.num += 1;
  }
}
