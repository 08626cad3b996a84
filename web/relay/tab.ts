// What the page's shell and its tabs know of each other.

import type { Channel } from "./channel";

/** Names of the tabs, as in the address. */
export type TabName = "watch" | "publish" | "relay";

/** What is in a panel. */
export interface Tab {
  /** It is looked at. `rest` is what stands behind its name in the address. Says what the page is called. */
  show(rest: string): string;
  /** It is not looked at any more. */
  hide?(): void;
}

/** What a tab has of the page. */
export interface Shell {
  channel: Channel;
  /** Shows a tab; `rest` goes into the address, which `replace` leaves out of the history. */
  go(name: TabName, rest?: string, replace?: boolean): void;
  /** What is shown. */
  current(): TabName;
}
