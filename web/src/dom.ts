import type { Estimate } from "./model";

type Child = Node | string | null | undefined;
type Props = Record<string, string | number | boolean | ((event: never) => void)>;

/** Makes an element. `on...` properties become listeners, the others attributes. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value as EventListener);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child): child is Node | string => child != null));
  return element;
}

export function byId(id: string): HTMLElement {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no #${id}`);
  return element;
}

/** Formats a share of one CPU with the resolution of the terminal's tables. */
export function percent(share: number): string {
  return `${(share * 100).toFixed(2)} %`;
}

/** Formats a share for a table, where 0 is a dash: other figures stand out. */
export function figure(share: number): string {
  return share === 0 ? "-" : percent(share);
}

/** A figure of fewer samples shows hardly more than that there is something. */
export const FEW = 4;

/** Whether a figure rests on few samples, but for a small part of what was timed. */
function isPoor(of: Estimate): boolean {
  return of.samples < FEW && of.error * 3 >= of.share;
}

/** Formats a figure with its error, and with a sign if it rests on few samples. */
export function estimate(of: Estimate, withError = true): string {
  if (!of.sampled || of.share === 0) return figure(of.share);
  const error = withError ? `±${(of.error * 100).toFixed(2)}` : "";
  return `${isPoor(of) ? "~" : ""}${(of.share * 100).toFixed(2)}${error} %`;
}

/** Describes the samples that a figure rests on, and its interval. */
export function basis(of: Estimate): string {
  if (!of.sampled) return "";
  const [low, high] = of.interval;
  const few = isPoor(of) ? " only" : "";
  return `${of.samples} sample${of.samples === 1 ? "" : "s"}${few}: ${(low * 100).toFixed(2)} to ${percent(high)} with 95 % confidence`;
}

/** Formats a number for a table. */
export function whole(value: number): string {
  return value === 0 ? "-" : Math.trunc(value).toFixed(0);
}

export function count(value: number): string {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value.toFixed(0);
}

export function duration(ns: number): string {
  if (ns >= 1e9) return `${(ns / 1e9).toFixed(ns < 1e10 ? 2 : 0)} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(1)} ms`;
  return `${(ns / 1e3).toFixed(1)} µs`;
}

/** Formats local time; `zone` returns its zone. */
export function clock(ms: number): string {
  const time = new Date(ms);
  return [time.getHours(), time.getMinutes(), time.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** Returns the offset of local time to UTC at that moment. */
export function zone(ms: number): string {
  const minutes = -new Date(ms).getTimezoneOffset();
  if (minutes === 0) return "UTC";
  const [hours, rest] = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60];
  const offset = [hours, rest].map((part) => String(part).padStart(2, "0")).join(":");
  return `local time, UTC${minutes < 0 ? "-" : "+"}${offset}`;
}

export function cssVariable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
