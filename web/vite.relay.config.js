import { fileURLToPath } from "node:url";

import { defineConfig } from "vite";

// Builds the relay's page. File names are the same in each build: the binary embeds them by name.
export default defineConfig({
  root: "relay",
  base: "./",
  resolve: {
    alias: Object.fromEntries(
      ["@libav.js/variant-opus-af", "@kixelated/libavjs-webcodecs-polyfill"].map((name) => [
        name,
        fileURLToPath(new URL("./relay/no-libav.ts", import.meta.url)),
      ]),
    ),
  },
  build: {
    outDir: "../dist/relay",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "shell.js",
        // The chunk that the tabs Watch and Publish share is the MoQ library. Vite names it after a module, `reload`.
        chunkFileNames: ({ name }) => `${name === "reload" ? "moq" : name}.js`,
        assetFileNames: "shell[extname]",
      },
    },
  },
});
