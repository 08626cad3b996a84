import { defineConfig } from "vite";

// File names are the same in each build: the binary embeds them by name.
export default defineConfig({
  base: "./",
  build: {
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: "app.js", assetFileNames: "app[extname]" },
    },
  },
  // `npm run dev` uses a running `millrace cost --http`.
  server: { proxy: { "/api": "http://127.0.0.1:9720" } },
});
