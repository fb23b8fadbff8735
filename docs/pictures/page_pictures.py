"""Draw the pictures of the page: `python docs/pictures/page_pictures.py` trains a run with failures, and photographs its page.

With the folder of a run as its argument it shows that run instead. It needs Chromium: apt-get install chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
TRAIN = (
    "train --pipelines 3 --stages 4 --microbatches 6 --steps 40 --exact --lease 2 --no-follow-speeds --kill W1_2@8 "
    "--hang W0_1@16 --rejoin W1_2@24"
)
# Name, view, theme, width and height; the iteration is that in which the first worker died.
PICTURES = (
    ("page-overview", "overview", "light", 1280, 900),
    ("page-iteration", "iteration/{step}", "light", 1280, 720),
    ("page-recovery", "recoveries/0", "light", 1280, 640),
    ("page-phone", "overview", "dark", 390, 844),
)


def photograph(run: Path) -> None:
    """Serve a run, and write a PNG of each view beside this file."""
    command = [sys.executable, "-m", "recycle", "dashboard", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().split()[4]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, view, theme, width, height in PICTURES:
            size = {"width": width, "height": height}
            page = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=1.5).new_page()
            page.goto(f"{address}#/run/./overview")
            page.wait_for_selector(".chart canvas")
            step = page.evaluate("() => window.recycle.run().data.recoveries[0]?.step ?? 1")
            page.goto(f"{address}#/run/./{view.format(step=step - 1)}")
            page.wait_for_timeout(1500)
            page.screenshot(path=HERE / f"{name}.png")
            print(f"{name}.png")
        browser.close()
        server.terminate()


def main() -> None:
    if len(sys.argv) > 1:
        photograph(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run([sys.executable, "-m", "recycle", *TRAIN.split(), "--out", str(run), "--json-lines"], check=True)
        photograph(run)


if __name__ == "__main__":
    main()
