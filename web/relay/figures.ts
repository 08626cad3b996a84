// Figures as a list of names and values.

import { byId, count, h } from "../src/dom";
import type { News } from "./channel";

/** Updates a list in place, so that screen readers keep their position. */
export function list(id: string, entries: Record<string, string>) {
  const place = byId(id);
  const names = Object.keys(entries);
  if ([...place.querySelectorAll("dt")].map((name) => name.textContent).join() !== names.join()) {
    place.replaceChildren(...names.flatMap((name) => [h("dt", {}, name), h("dd", { "data-figure": name })]));
  }
  place.querySelectorAll("dd").forEach((value, at) => {
    const text = entries[names[at] ?? ""] ?? "";
    if (value.textContent !== text) value.textContent = text;
  });
}

/** Summarises the relay's status. */
export function inShort(news: News): Record<string, string> {
  if ("why" in news) return { Figures: news.why };
  const { engine, totals, session_count, track_count } = news.now;
  return {
    Engine: engine.name,
    "Packets by the kernel": count(totals.kernel.packets),
    "Packets by userspace": count(totals.data_plane.packets),
    Sessions: String(session_count),
    Tracks: String(track_count),
  };
}

/** Formats bits per second. */
export function rate(bits: number): string {
  if (bits >= 1e6) return `${(bits / 1e6).toFixed(1)} Mbit/s`;
  return `${(bits / 1e3).toFixed(0)} kbit/s`;
}

export function bytes(value: number): string {
  return value < 1e4 ? `${value.toFixed(0)} B` : `${count(value)}B`;
}

export function span(seconds: number): string {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  if (minutes > 0) return `${minutes} min ${whole % 60} s`;
  return `${whole} s`;
}
