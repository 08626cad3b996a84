const THEMES = ["auto", "light", "dark"] as const;

/** Makes `button` switch between the light, dark and system theme, and stores the choice in the browser. */
export function themes(button: HTMLElement, changed: () => void = () => {}): void {
  const set = (theme: string) => {
    document.documentElement.dataset["theme"] = theme;
    button.textContent = `Theme: ${theme}`;
    localStorage.setItem("theme", theme);
    changed();
  };
  button.addEventListener("click", () => {
    const at = THEMES.findIndex((theme) => theme === document.documentElement.dataset["theme"]);
    set(THEMES[(at + 1) % THEMES.length] ?? "auto");
  });
  set(localStorage.getItem("theme") ?? "auto");
}
