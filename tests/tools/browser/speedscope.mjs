// Opens a trace in speedscope (npm) as a person would: node speedscope.mjs TRACE [SCREENSHOT]
// Prints as JSON the names of the profiles that it offers, and what its console says is wrong.
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { dirname, extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const [trace, screenshot] = process.argv.slice(2);
const app = join(dirname(fileURLToPath(import.meta.url)), "node_modules/speedscope/dist/release");
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css" };

const server = createServer(async (request, response) => {
  const path = normalize(new URL(request.url, "http://127.0.0.1").pathname);
  try {
    const body = await readFile(path === "/trace.json" ? trace : join(app, path));
    response.writeHead(200, { "Content-Type": TYPES[extname(path)] ?? "application/octet-stream" });
    response.end(body);
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const origin = `http://127.0.0.1:${server.address().port}`;

const ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ARGS });
try {
  const page = await browser.newPage();
  const errors = [];
  page.on("console", (told) => told.type() === "error" && errors.push(told.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  await page.goto(`${origin}/index.html#profileURL=${encodeURIComponent(`${origin}/trace.json`)}`);
  // The toolbar names the profile that is shown, and opens the list of all on a click.
  const chosen = page.getByText(/\(\d+\/\d+\)/).first();
  await chosen.waitFor({ timeout: 60_000 });
  if (screenshot) await page.screenshot({ path: screenshot });
  await chosen.click();
  const text = await page.locator("body").innerText();
  process.stdout.write(JSON.stringify({ text, errors }));
} finally {
  await browser.close();
  server.close();
}
