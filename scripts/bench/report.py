"""Measure the page of `ucp report` in a real browser: 10,000 parameters on 1,024 ranks.

Prints, for ZeRO-1 and ZeRO-3 and both colour schemes: size, seconds until the page is loaded and until it is drawn,
messages on the console, and texts whose contrast is below 4.5. Exits with 1 if there are any of the last two, or if a
page takes a second or longer. Needs chromium and chromedriver (Debian: chromium, chromium-driver).

    python scripts/bench/report.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from tests.reports.browser import CONTRAST, Browser  # noqa: E402
from tests.reports.index_only import zero1, zero3  # noqa: E402
from tests.reports.pages import full  # noqa: E402
from ucp.reports.html_page import html_page  # noqa: E402
from ucp.reports.page_data import page_data  # noqa: E402

LIMIT = 1.0  # seconds
RUNS = 3
LOADED = "const page = performance.getEntriesByType('navigation')[0]; return page.loadEventEnd / 1000"
DRAWN = "return performance.getEntriesByName('ready')[0].startTime / 1000"


def main() -> int:
    failed = False
    print("page    scheme  MiB   loaded  drawn   console  contrast < 4.5")
    with tempfile.TemporaryDirectory() as scratch:
        for name, checkpoint in (("zero1", zero1(2500, 8, 128)), ("zero3", zero3(2500, 1024))):
            page = Path(scratch) / f"{name}.html"
            data = page_data(checkpoint, None, full(checkpoint), source=name, version="bench", sample=None)
            page.write_text(html_page(data, name), encoding="utf-8")
            for dark in (False, True):
                with Browser(Path(scratch) / f"{name}-{dark}", dark=dark) as browser:
                    times = []
                    for _ in range(RUNS):
                        browser.open(page)
                        times.append((browser.run(DRAWN), browser.run(LOADED)))
                    drawn, loaded = min(times)
                    console, faint = browser.console(), browser.run(CONTRAST, 4.5)
                size = page.stat().st_size / 2**20
                scheme = "dark" if dark else "light"
                print(
                    f"{name}   {scheme:6}  {size:.2f}  {loaded:.2f} s  {drawn:.2f} s"
                    f"  {len(console):7}  {len(faint['found'])} of {faint['checked']}"
                )
                failed |= drawn >= LIMIT or bool(console) or bool(faint["found"])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
