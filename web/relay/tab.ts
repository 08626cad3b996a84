// The interfaces between the page's shell and its tabs.

import type { Channel } from "./channel";

/** Names of the tabs, as in the address. */
export type TabName = "watch" | "publish" | "relay";

/** The contents of a panel. */
export interface Tab {
  /** Called when the tab is shown. `rest` is the part of the address after its name. Returns the page's title. */
  show(rest: string): string;
  /** Called when the tab is hidden. */
  hide?(): void;
}

/** The shell's functions for tabs. */
export interface Shell {
  channel: Channel;
  /** Shows a tab with `rest` in the address; `replace` adds nothing to the history. */
  go(name: TabName, rest?: string, replace?: boolean): void;
  /** Returns the name of the visible tab. */
  current(): TabName;
}
