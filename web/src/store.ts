import { type History, type Point, type Range, type Report, type Stacks, point } from "./model";

/** Largest number of points in the history. The server keeps as many. */
const POINTS = 3600;
/** Length of the time range that the flame graph of a live view shows. */
const LIVE_STACKS_MS = 30_000;
const RETRY_MS = 1000;
/** Time without a report after which the view is stale, in milliseconds and in report periods; the longer one applies.
    A connection may die without an error event. */
const STALE_MS = 5000;
const STALE_PERIODS = 3;

export type Connection = "connecting" | "live" | "stale" | "lost" | "log";

/** The data that the page shows, and the connection to its source. Views listen for the event `change`. */
export class Store extends EventTarget {
  connection: Connection = "connecting";
  points: Point[] = [];
  cpus: number[] = [];
  /** The report that the tables show: the latest one, or the sum of all reports in `range`. */
  report?: Report;
  range: Range | null = null;
  paused = false;
  /** Number of reports that the server dropped because this page was too slow. */
  dropped = 0;
  /** Time of the oldest report that the server still has in full, in milliseconds since 1970. */
  wholeSince: number | null = null;
  /** Number of reports in a point of the history, and in a step of a time range. Both grow with the length of a log. */
  steps: [number, number] = [1, 1];
  problem = "";
  /** Whether the sum of `range` is still being fetched, and `report` is an older one. */
  loading = false;
  private latest?: Report;
  private source?: EventSource;
  private isLive = true;
  private heard = 0;

  constructor() {
    super();
    setInterval(() => this.listen(), 1000);
  }

  connect(): void {
    this.source?.close();
    const source = new EventSource("./api/reports");
    this.source = source;
    source.addEventListener("hello", (event) => {
      this.isLive = JSON.parse(event.data).live;
      this.heard = performance.now();
      this.setConnection(this.isLive ? "live" : "log");
      // This also runs after a restart of the server. The history has reports that the page missed and others that it
      // already has; `add` merges them by time.
      void this.loadHistory();
    });
    source.addEventListener("report", (event) => this.take(JSON.parse(event.data)));
    source.addEventListener("dropped", (event) => {
      this.dropped += JSON.parse(event.data);
    });
    source.addEventListener("error", () => {
      this.setConnection("lost");
      // An EventSource does not reconnect after an HTTP error status, so the page reconnects by itself.
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.connect(), RETRY_MS);
    });
  }

  get live(): boolean {
    return this.isLive;
  }

  /** Returns the range of the stacks that are shown. */
  stacksRange(): Range | null {
    if (this.range) return this.range;
    const to = this.report?.time_unix_ms;
    if (to === undefined) return null;
    return this.isLive ? { from: to - LIVE_STACKS_MS + 1, to } : { from: 0, to };
  }

  pause(paused: boolean): void {
    this.paused = paused;
    if (!paused && !this.range) this.report = this.latest;
    this.changed();
  }

  /** Selects a time range. `null` selects live reports. */
  async select(range: Range | null): Promise<void> {
    this.range = range;
    this.problem = "";
    this.loading = range !== null;
    if (range) await this.loadRange(range);
    else this.report = this.latest;
    this.changed();
  }

  async stacks(range: Range, cpu: number | null): Promise<Stacks | null> {
    // The server of a page that lags behind may have only reports that are newer than the page's.
    const to = this.isLive && !this.range && !this.paused ? "" : `&to=${Math.ceil(range.to)}`;
    const query = `from=${Math.floor(range.from)}${to}${cpu === null ? "" : `&cpu=${cpu}`}`;
    const answer = await fetch(`./api/stacks?${query}`);
    return answer.ok ? answer.json() : null;
  }

  private listen(): void {
    const patience = Math.max(STALE_MS, (STALE_PERIODS * (this.latest?.period_ns ?? 0)) / 1e6);
    if (this.connection === "live" && performance.now() - this.heard > patience) this.setConnection("stale");
  }

  private take(report: Report): void {
    this.latest = report;
    this.heard = performance.now();
    if (this.connection === "stale") this.setConnection("live");
    this.add([point(report)]);
    this.cpus = report.cpus.map((cpu) => cpu.cpu);
    if (this.paused) return;
    if (!this.range) this.report = report;
    this.changed();
  }

  private async loadRange(range: Range): Promise<void> {
    const answer = await fetch(`./api/report?from=${Math.floor(range.from)}&to=${Math.ceil(range.to)}`).catch(() => null);
    const report: Report | null = answer?.ok ? await answer.json() : null;
    // The answer is dropped if another range was selected meanwhile.
    if (this.range !== range) return;
    this.loading = false;
    if (report) this.report = report;
    else this.problem = "The server has no reports of that time any more.";
  }

  private async loadHistory(): Promise<void> {
    const answer = await fetch("./api/history").catch(() => null);
    if (!answer?.ok) return;
    const history: History = await answer.json();
    this.cpus = history.cpus;
    this.wholeSince = history.whole_since_unix_ms;
    this.steps = [history.point_reports, history.whole_reports];
    this.add(history.points);
    const [first, last] = [this.points[0], this.points.at(-1)];
    // A log is shown as a whole first.
    if (!this.isLive && !this.range && first && last) {
      await this.select({ from: first.time_unix_ms, to: last.time_unix_ms });
    }
    this.changed();
  }

  private add(points: Point[]): void {
    const last = this.points.at(-1)?.time_unix_ms ?? 0;
    if (points.every((point) => point.time_unix_ms > last)) {
      this.points.push(...points);
    } else {
      const byTime = new Map([...this.points, ...points].map((point) => [point.time_unix_ms, point]));
      this.points = [...byTime.values()].sort((a, b) => a.time_unix_ms - b.time_unix_ms);
    }
    this.points.splice(0, this.points.length - POINTS);
  }

  private setConnection(connection: Connection): void {
    this.connection = connection;
    this.changed();
  }

  private changed(): void {
    this.dispatchEvent(new Event("change"));
  }
}
