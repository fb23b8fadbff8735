"""Pages that are open: a process that reads what the server pushes to each of them, as browsers on other machines do."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# Pages are on other machines: here they get a core when no worker wants it.
_IDLE = ("chrt", "--idle", "0")


@contextmanager
def opened_pages(address: str, num: int) -> Iterator[None]:
    """Keep `num` streams of the run at this address open, each read to its end, in time that nobody else wants."""
    if not num:
        yield
        return
    command = [*_IDLE, sys.executable, str(Path(__file__).resolve()), address, str(num)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def opened_browsers(address: str, num: int) -> Iterator[None]:
    """Keep `num` pages of the run at this address open in Chromium, which runs in time that nobody else wants."""
    if not num:
        yield
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, TemporaryDirectory() as folder:
        started = Path(folder) / "chromium"
        started.write_text(f'#!/bin/sh\nexec {" ".join(_IDLE)} {shutil.which("chromium")} "$@"\n', encoding="ascii")
        started.chmod(0o700)
        browser = playwright.chromium.launch(executable_path=started, args=["--no-sandbox"])
        # Each in a context of its own: a browser opens few connections to one server.
        pages = [browser.new_context().new_page() for _ in range(num)]
        for page in pages:
            page.goto(f"{address}#/run/./overview")
            page.wait_for_selector("button.worker")
        try:
            yield
        finally:
            browser.close()


async def _read_all(address: str, num: int) -> None:
    import asyncio

    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /api/run/stream?id=. HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        while await reader.read(1 << 16):
            pass

    tasks = [asyncio.create_task(read_one()) for _ in range(num)]
    await asyncio.sleep(1)
    print("open", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    import asyncio

    asyncio.run(_read_all(sys.argv[1], int(sys.argv[2])))
