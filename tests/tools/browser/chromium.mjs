// A headless Chromium with one page, and everything that its console says is wrong.
import { chromium } from "playwright-core";

export const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";

// What `use(page)` returns, and the errors that the page told meanwhile.
export async function withPage(use, options = {}) {
  const browser = await chromium.launch({
    executablePath: CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
  });
  try {
    const page = await (await browser.newContext(options)).newPage();
    const errors = [];
    page.on("console", (message) => {
      if (message.type() === "error") errors.push(message.text());
    });
    page.on("pageerror", (error) => errors.push(String(error)));
    return { ...(await use(page)), errors };
  } finally {
    await browser.close();
  }
}
