"""A page in a real headless Chromium: a script works it as a user would and says what it found."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium (Debian: apt-get install chromium)"
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=30000"
)
# Before the page's own scripts, so that nothing goes by unheard
LISTEN = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => errors.push("blocked: " + event.blockedURI));
</script>"""
# Behind them: waits for the page, works it, and leaves what it found where --dump-dom shows it
WORK = """<script>
(async () => {
  const found = {};
  try {
    while (document.documentElement.dataset.ready !== "yes" && !errors.length) {
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    %s
  } catch (error) {
    errors.push(String(error));
  }
  const element = document.createElement("pre");
  element.id = "findings";
  element.textContent = JSON.stringify({ ...found, errors });
  document.body.append(element);
})();
</script>"""


def work(page: str, script: str, folder: Path, width: int = 1280) -> dict:
    """Open a page in a window of this width, run a script in it that fills `found`, and return that.

    `errors` of it: what went wrong in the page, console messages of that kind included.
    """
    path = folder / "page.html"
    path.write_text(page.replace("<head>", f"<head>{LISTEN}", 1) + WORK % script, encoding="utf-8")
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [CHROMIUM, *QUIET.split(), profile, f"--window-size={width},900", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    found = json.loads(html.unescape(match[1]))
    found["errors"] += [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return found
