import type { Estimate } from "./model";

type Child = Node | string | null | undefined;
type Props = Record<string, string | number | boolean | ((event: never) => void)>;

/** Makes an element. Functions in `props` become listeners (`onclick` listens for `click`), other values attributes. */
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

/** Formats a share for a table. 0 becomes a dash, so that other figures stand out. */
export function figure(share: number): string {
  return share === 0 ? "-" : percent(share);
}

/** Number of samples below which a figure is too uncertain, and is marked with ~. */
export const FEW = 4;

/** Reports whether a figure rests on few samples and has an error of a third of it or more. */
function isPoor(of: Estimate): boolean {
  return of.samples < FEW && of.error * 3 >= of.share;
}

/** Formats a figure with its error, and with a leading ~ if it rests on too few samples. */
export function estimate(of: Estimate, withError = true): string {
  if (!of.sampled || of.share === 0) return figure(of.share);
  const error = withError ? `±${(of.error * 100).toFixed(2)}` : "";
  return `${isPoor(of) ? "~" : ""}${(of.share * 100).toFixed(2)}${error} %`;
}

/** Describes the number of samples that a figure rests on, and its interval with 95 % confidence. */
export function basis(of: Estimate): string {
  if (!of.sampled) return "";
  const [low, high] = of.interval;
  const few = isPoor(of) ? " only" : "";
  return `${of.samples} sample${of.samples === 1 ? "" : "s"}${few}: ${(low * 100).toFixed(2)} to ${percent(high)} with 95 % confidence`;
}

/** Formats a number for a table. 0 becomes a dash. */
export function whole(value: number): string {
  return value === 0 ? "-" : Math.trunc(value).toFixed(0);
}

/** Formats a number with a unit prefix, such as 1.5 M. */
export function count(value: number): string {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value.toFixed(0);
}

/** Formats nanoseconds as seconds, milliseconds or microseconds. */
export function duration(ns: number): string {
  if (ns >= 1e9) return `${(ns / 1e9).toFixed(ns < 1e10 ? 2 : 0)} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(1)} ms`;
  return `${(ns / 1e3).toFixed(1)} µs`;
}

/** Formats a time (milliseconds since 1970) as local time of day. `zone` returns the time zone. */
export function clock(ms: number): string {
  const time = new Date(ms);
  return [time.getHours(), time.getMinutes(), time.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** Returns the offset of local time from UTC at a time (milliseconds since 1970). */
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
