"""Pages that are open: a process that reads what the server pushes to each of them, as browsers on other machines do."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened_pages(address: str, num: int) -> Iterator[None]:
    """Keep `num` streams of the run at this address open, each read to its end, at the lowest priority."""
    if not num:
        yield
        return
    command = ["nice", "-n", "19", sys.executable, str(Path(__file__).resolve()), address, str(num)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


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
