// The interfaces between the page's shell and its tabs.

import type { Channel } from "./channel";

/** Name of a tab, as in the page's address after #. */
export type TabName = "watch" | "publish" | "relay";

/** The contents of a panel. */
export interface Tab {
  /** Called when the tab is shown. `rest` is the part of the address after the tab's name. Returns the page's title. */
  show(rest: string): string;
  /** Called when the tab is hidden. */
  hide?(): void;
}

/** The page's functions that tabs use. */
export interface Shell {
  channel: Channel;
  /** Shows a tab with `rest` in the address. `replace` replaces the browser's present history entry. */
  go(name: TabName, rest?: string, replace?: boolean): void;
  /** Returns the name of the visible tab. */
  current(): TabName;
}
