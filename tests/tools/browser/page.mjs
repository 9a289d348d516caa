// node page.mjs REPORT.html: sorts, filters, copies and zooms in a report's page; prints what it saw.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const address = pathToFileURL(process.argv[2]).href;
const told = { axe: {}, overflow: {} };
const ARGS = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ARGS });
try {
  for (const colorScheme of ["light", "dark"]) {
    const { page, seen } = await open({ colorScheme });
    await page.evaluate(axe);
    await page.evaluate(() => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
    const { violations, passes } = await page.evaluate(() => globalThis.axe.run());
    told.axe[colorScheme] = {
      paper: await page.evaluate(() => getComputedStyle(document.body).backgroundColor),
      passes: passes.length,
      violations: violations.map(({ id, impact, nodes }) => ({ id, impact, where: nodes[0].html })),
    };
    if (colorScheme === "light") Object.assign(told, seen, await used(page));
    await page.context().close();
  }
  for (const width of [1280, 400]) {
    const { page } = await open({ viewport: { width, height: 900 } });
    told.overflow[width] = await page.evaluate(() =>
      document.documentElement.scrollWidth - document.documentElement.clientWidth);
    if (width === 400) told.pdf = (await page.pdf({ format: "A4" })).length;
    await page.context().close();
  }
} finally {
  await browser.close();
}
process.stdout.write(JSON.stringify(told));

async function used(page) {
  const rows = () => page.$$eval("#all-cells tbody tr", (all) =>
    all.filter((row) => !row.hidden).map((row) => Number(row.dataset.cell)));
  const bars = () => page.$$eval("#step-time li", (all) =>
    all.filter((row) => row.checkVisibility()).map((row) => Number(row.dataset.cell)));
  const found = { rows: await rows() };
  const heading = page.locator('#all-cells th[data-key="step_time_s"]');
  const button = heading.locator("button");
  await button.focus();
  await page.keyboard.press("Enter");
  found.ascending = { rows: await rows(), aria: await heading.getAttribute("aria-sort") };
  await button.click();
  found.descending = { rows: await rows(), aria: await heading.getAttribute("aria-sort") };
  // an axis whose values are those of the configuration; none, where all cells agree
  found.chosen = { key: "", value: "" };
  for (const select of await page.locator(".filters select").all()) {
    const key = await select.getAttribute("data-key");
    if (!["scheduler", "compressor", "memory"].includes(key)) continue;
    const value = await select.locator("option").last().getAttribute("value");
    await select.selectOption(value);
    found.chosen = { key, value, rows: await rows(), bars: await bars() };
    await select.selectOption("");
    break;
  }
  await page.locator("#filter").fill("NO-SUCH-WORD");
  found.none = { rows: await rows(), bars: await bars(), count: await page.locator("#count").innerText() };
  await page.locator("#filter").fill("");
  found.again = (await rows()).length;
  const wide = page.locator("#all-cells td.wide").first();
  found.wide = [await wide.isVisible()];
  await page.locator("#all-cells .all-columns").check();
  found.wide.push(await wide.isVisible());
  const copy = page.locator("button.copy").first();
  await copy.click();
  found.copied = {
    said: await copy.innerText(),
    command: await copy.locator("xpath=..").locator("code").innerText(),
    selected: await page.evaluate(() => getSelection().toString()),
  };
  found.timelines = await page.locator("figure.timeline").count();
  if (found.timelines) {
    const figure = page.locator("figure.timeline").first(), canvas = figure.locator("canvas");
    const inked = () => canvas.evaluate((each) => each.toDataURL());
    await canvas.scrollIntoViewIfNeeded();
    found.drawings = [await inked()];
    await figure.locator('[data-zoom="in"]').click();
    found.drawings.push(await inked());
    await figure.locator('[data-zoom="all"]').click();
    found.drawings.push(await inked());
    const box = await canvas.boundingBox();
    await page.mouse.move(box.x + box.width * 0.2, box.y + 30);
    found.told = await figure.locator("output").innerText();
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.4, box.y + 30);
    await page.mouse.up();
    found.drawings.push(await inked());
    // pressed outside and let go over it; pressed on it, and the system takes the pointer away
    await page.mouse.move(box.x - 20, box.y + 30);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.3, box.y + 30);
    await page.mouse.up();
    found.undisturbed = [await inked()];
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.6, box.y + 30);
    await canvas.dispatchEvent("pointercancel");
    found.undisturbed.push(await inked());
    await page.mouse.up();
    found.undisturbed.push(await inked());
    await figure.locator('[data-zoom="all"]').click();
    await page.mouse.move(0, 0);
    await page.keyboard.press("Tab"); // from the last of the buttons
    found.keys = [];
    for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"]) {
      await page.keyboard.press(key);
      found.keys.push({ told: await figure.locator("output").innerText(), drawn: await inked() });
    }
  }
  return found;
}

// A page of its own, without a network: `seen` holds its console's errors and the addresses it asked for.
async function open(options = {}) {
  const context = await browser.newContext({ offline: true, ...options });
  const page = await context.newPage();
  const seen = { errors: [], requests: [] };
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) seen.errors.push(message.text());
  });
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => seen.requests.push(request.url()));
  await page.goto(address);
  return { page, seen };
}
