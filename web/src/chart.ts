import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { byId, clock, cssVariable, duration, h, percent, zone } from "./dom";
import { Legend } from "./legend";
import { EVENTS, type Point, type Range } from "./model";
import type { Store } from "./store";

const WINDOWS = [
  ["1 min", 60],
  ["5 min", 300],
  ["15 min", 900],
  ["1 h", 3600],
] as const;
const HEIGHT = 205;
/** Possible intervals between labels of time, in seconds. */
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
/** Padding for half of a label beyond the plot, in pixels. */
const PADDING: uPlot.Padding = [8, 34, 0, 0];
/** Number of missing periods that are shown as a gap. */
const GAP = 3;

/** The history of all CPUs, with events stacked on one another. A time range of it can be selected. */
export class Chart {
  private plot?: uPlot;
  private points: Point[] = [];
  private windowSeconds = 300;
  private readonly canvas = h("div", {
    class: "chart",
    tabindex: 0,
    role: "group",
    "aria-label": "Networking's CPU time over time. Arrow keys move the range, with Shift they change its length, Escape returns to the live view.",
    onkeydown: (event: KeyboardEvent) => this.key(event),
  });
  private readonly text = h("span", { class: "range", role: "status" });
  /** The time of the values in the legend. */
  private readonly moment = h("span", { class: "moment" });
  private readonly legend = new Legend([...EVENTS, "networking"]);
  private readonly pause = h("button", { type: "button", id: "pause", onclick: () => this.store.pause(!this.store.paused) });
  private readonly now = h("button", { type: "button", id: "live", onclick: () => void this.store.select(null) }, "Live");

  private readonly windows: HTMLSelectElement;

  constructor(private readonly store: Store) {
    this.windows = h("select", {
      "aria-label": "Time shown",
      onchange: (event: Event) => {
        this.windowSeconds = Number((event.target as HTMLSelectElement).value);
        this.draw(true);
      },
    });
    for (const [name, seconds] of WINDOWS) this.windows.append(h("option", { value: seconds, selected: seconds === 300 }, name));
    const move = (by: number, name: string, sign: string) =>
      h("button", { type: "button", title: name, "aria-label": name, onclick: () => this.move(by) }, sign);
    byId("history").append(
      h("div", { class: "bar" }, this.pause, this.now, this.windows, move(-1, "Earlier", "‹"), move(1, "Later", "›"), this.text),
      this.canvas,
      h("div", { class: "bar values" }, this.legend.element, this.moment),
    );
    store.addEventListener("change", () => this.draw(false));
    this.canvas.addEventListener("mousedown", () => (this.dragging = true));
    // This runs after uPlot's own listener, which reads the selection.
    window.addEventListener("mouseup", () => setTimeout(() => this.released()));
    new ResizeObserver(() => this.plot?.setSize({ width: this.canvas.clientWidth, height: HEIGHT })).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
  }

  /** Reads the colours from the style sheet. */
  restyle(): void {
    this.plot?.destroy();
    this.plot = undefined;
    this.draw(true);
  }

  private draw(always: boolean): void {
    const { store } = this;
    this.pause.textContent = store.paused ? "Resume" : "Pause";
    this.pause.setAttribute("aria-pressed", String(store.paused));
    // A log is shown as a whole.
    this.pause.hidden = this.windows.hidden = !store.live;
    this.now.hidden = !store.live || !store.range;
    this.text.textContent = this.describe();
    if (this.dragging) return;
    if (store.paused && this.plot && !always) return this.mark();
    const last = store.points.at(-1)?.time_unix_ms ?? Date.now();
    const oldest = Math.min(store.points[0]?.time_unix_ms ?? last, last - 1000);
    // The window has its full length, however short the history is.
    const from = store.live ? last - this.windowSeconds * 1000 : oldest;
    this.points = store.points.filter((point) => point.time_unix_ms >= from);
    const data = stacked(this.points);
    if (!this.plot) this.plot = new uPlot(this.options(), data, this.canvas);
    this.plot.batch(() => {
      this.plot?.setData(data, false);
      this.plot?.setScale("x", { min: from / 1000, max: last / 1000 });
      this.plot?.setScale("y", { min: 0, max: Math.max(0.02, ...this.points.map(total)) * 1.1 });
    });
    this.mark();
    this.showValues();
  }

  /** Shows the values at the time under the pointer, or the latest ones. */
  private showValues(): void {
    const at = this.plot?.cursor.idx;
    const pointed = at == null ? undefined : this.points[at];
    const point = pointed ?? this.points.at(-1);
    if (!point) return;
    EVENTS.forEach((event, of) => {
      const share = point.events[of];
      this.legend.show(event, share == null ? "?" : percent(share));
    });
    this.legend.show("networking", percent(total(point)));
    this.moment.textContent = `of one CPU, ${pointed ? "at" : "latest:"} ${clock(point.time_unix_ms)}`;
  }

  private describe(): string {
    const { range, report, problem } = this.store;
    if (problem) return problem;
    if (!range) return this.store.paused ? "paused" : "";
    const seen = report && !this.store.loading ? `${duration(report.period_ns)} observed` : "…";
    const [point, whole] = this.store.steps;
    const steps = point > 1 || whole > 1 ? `; a point is the mean of ${point} reports, ranges are in steps of ${whole}` : "";
    return `${clock(range.from)} to ${clock(range.to)} (${zone(range.to)}), ${seen}${steps}`;
  }

  private options(): uPlot.Options {
    const [text, grid] = [cssVariable("--text-2"), cssVariable("--line")];
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    // Series are cumulative sums. The highest is drawn first, so that the lower ones cover it.
    const series: uPlot.Series[] = EVENTS.map((event) => ({
      label: event,
      stroke: cssVariable(`--${event}`),
      fill: cssVariable(`--${event}`),
      width: 1,
      points: { show: false },
    })).reverse();
    const times: uPlot.Axis = {
      ...axis,
      space: 68,
      size: 34,
      incrs: STEPS,
      values: (_, times) => times.map((time) => clock(time * 1000)),
      label: (plot) => zone((plot.scales["x"]?.max ?? 0) * 1000),
    };
    const shares: uPlot.Axis = {
      ...axis,
      size: 60,
      values: (_, values) => values.map((value) => `${+(value * 100).toFixed(3)}`),
      label: "% of one CPU",
    };
    return {
      width: this.canvas.clientWidth,
      height: HEIGHT,
      padding: PADDING,
      series: [{}, ...series],
      scales: { x: { time: true, auto: false }, y: { auto: false } },
      axes: [times, shares].map((axis) => ({ ...axis, labelSize: 16, labelFont: "bold 12px system-ui, sans-serif" })),
      cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false } },
      legend: { show: false },
      hooks: { setSelect: [(plot) => this.selected(plot)], setCursor: [() => this.showValues()] },
    };
  }

  private released(): void {
    this.dragging = false;
    this.draw(false);
  }

  private selected(plot: uPlot): void {
    const { left, width } = plot.select;
    // `mark` also sets uPlot's selection, to show a range. Only the user's selections are handled here.
    if (width < 3 || this.marking) return;
    const from = plot.posToVal(left, "x") * 1000;
    const to = plot.posToVal(left + width, "x") * 1000;
    void this.store.select({ from: Math.round(from), to: Math.round(to) });
  }

  private marking = false;
  /** True while the user drags over the chart. The chart is not drawn then, since it would move under the pointer. */
  private dragging = false;

  /** Marks the selected range at its present place in the chart. */
  private mark(): void {
    const { plot } = this;
    if (!plot) return;
    const { range } = this.store;
    this.marking = true;
    const clamp = (time: number) => Math.max(0, Math.min(plot.over.clientWidth, plot.valToPos(time / 1000, "x")));
    // A range of the whole log is not marked, since that would change its colours.
    const whole = !this.store.live && range && range.from <= (this.points[0]?.time_unix_ms ?? 0) && range.to >= (this.points.at(-1)?.time_unix_ms ?? 0);
    const marked = whole ? null : range;
    const [left, right] = marked ? [clamp(marked.from), clamp(marked.to)] : [0, 0];
    plot.setSelect({ left, width: right - left, top: 0, height: marked ? plot.over.clientHeight : 0 }, false);
    this.marking = false;
  }

  private key(event: KeyboardEvent): void {
    const by = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
    if (event.key === "Escape" && this.store.live) void this.store.select(null);
    else if (by !== 0 && event.shiftKey) this.stretch(by);
    else if (by !== 0) this.move(by);
    else return;
    event.preventDefault();
  }

  private current(): Range {
    const to = this.store.points.at(-1)?.time_unix_ms ?? Date.now();
    return this.store.range ?? { from: to - 10_000, to };
  }

  /** Moves the range by a multiple of its length. */
  private move(by: number): void {
    const { from, to } = this.current();
    const shift = this.store.range ? by * Math.max(to - from, 1000) : 0;
    void this.store.select({ from: from + shift, to: to + shift });
  }

  private stretch(by: number): void {
    const { from, to } = this.current();
    void this.store.select({ from, to: Math.max(from + 1000, to + by * 1000) });
  }
}

function total(point: Point): number {
  return point.events.reduce<number>((sum, share) => sum + (share ?? 0), 0);
}

/** Returns uPlot's columns: times in seconds, then the sum up to each event, the highest first. Sums are null where
    reports are missing. */
function stacked(points: Point[]): uPlot.AlignedData {
  const columns: (number | null)[][] = EVENTS.map(() => []);
  const times: number[] = [];
  let before: Point | undefined;
  for (const point of points) {
    const gap = before && point.time_unix_ms - before.time_unix_ms > (GAP * point.period_ns) / 1e6;
    let sum = 0;
    point.events.forEach((share, at) => {
      sum += share ?? 0;
      columns[at]?.push(gap ? null : sum);
    });
    times.push(point.time_unix_ms / 1000);
    before = point;
  }
  return [times, ...columns.reverse()];
}
