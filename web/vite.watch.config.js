import { fileURLToPath } from "node:url";

import { defineConfig } from "vite";

// The relay's page. File names stay the same from build to build: the binary embeds them by name.
export default defineConfig({
  root: "watch",
  base: "./",
  resolve: {
    alias: Object.fromEntries(
      ["@libav.js/variant-opus-af", "@kixelated/libavjs-webcodecs-polyfill"].map((name) => [
        name,
        fileURLToPath(new URL("./watch/no-libav.ts", import.meta.url)),
      ]),
    ),
  },
  build: {
    outDir: "../dist/watch",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: "watch.js", chunkFileNames: "[name].js", assetFileNames: "watch[extname]" },
    },
  },
});
