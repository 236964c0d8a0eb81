"""How late the server's event loop is while large requests are refused and others stream.

    python scripts/stalls.py --model PATH --streams 32 --max-body 16000000

Starts a server whose event loop notes every millisecond how late it is, keeps so many streams going, and sends ten of
each kind of large request in turn. With a tiny model, as the tests have, the loop has the most to do.
"""

import argparse
import array
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MB, MANY = 10**6, 100_000
WORDS = "one, two " * (5 * MB // 9)
LARGE: dict[str, tuple[str, Any]] = {
    "a chat": ("chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    "100,000 messages": ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * MANY}),
    "a prompt": ("completions", {"prompt": WORDS}),
    "an input": ("responses", {"input": WORDS}),
    "1,600,000 token ids": ("completions", {"prompt": [1] * 16 * MANY}),
    "100,000 lists": ("completions", {"prompt": [[]] * MANY}),
    "400,000 biases": ("completions", {"prompt": "a", "logit_bias": {str(id): 1 for id in range(4 * MANY)}}),
    "100,000 fields": ("completions", {"prompt": "a"} | {f"field{number}": 1 for number in range(MANY)}),
    "100,000 stops": ("completions", {"prompt": "a", "stop": ["a"] * MANY}),
    "four times 5 MB": ("completions", {"prompt": WORDS * 4}),
}
STREAM = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
TIMES = 10
ALONE = "streams alone"
JSON = {"content-type": "application/json"}


def serve(notes: Path, arguments: list[str]) -> None:
    """``freewheel serve``, which leaves pairs of a time and how late the loop was, in seconds."""
    import uvicorn

    from freewheel.cli import main

    late = array.array("d")

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            late.extend((began, time.monotonic() - began - 0.001))

    serving = uvicorn.Server._serve

    async def watched(*arguments: Any, **options: Any) -> None:
        watching = asyncio.create_task(watch())
        try:
            await serving(*arguments, **options)
        finally:
            watching.cancel()
            notes.write_bytes(late.tobytes())

    uvicorn.Server._serve = watched
    main(["serve", *arguments])


async def load(url: str, streams: int) -> dict[str, tuple[float, float]]:
    """When each kind of request was sent, and refused."""
    import httpx

    when: dict[str, tuple[float, float]] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def stream() -> None:
            while True:
                async with client.stream("POST", "/v1/completions", json=STREAM) as reply:
                    reply.raise_for_status()
                    async for _ in reply.aiter_raw():
                        pass

        others = [asyncio.create_task(stream()) for _ in range(streams)]
        await asyncio.sleep(5)
        when[ALONE] = time.monotonic() - 3, time.monotonic()
        for name, (path, body) in LARGE.items():
            data = json.dumps(body).encode()
            began = time.monotonic()
            codes = {(await client.post(f"/v1/{path}", content=data, headers=JSON)).status_code for _ in range(TIMES)}
            when[f"{name}, {len(data) / MB:.1f} MB: {', '.join(map(str, codes))}"] = began, time.monotonic()
        for other in others:
            other.cancel()
        for end in await asyncio.gather(*others, return_exceptions=True):
            if not isinstance(end, asyncio.CancelledError):
                raise RuntimeError("a stream came to an end before the requests did") from end
    return when


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-body", default="2097152", help="the server's (default: its own)")
    parser.add_argument("--port", default="8124")
    args = parser.parse_args()
    import httpx

    url = f"http://127.0.0.1:{args.port}"
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "late"
        options = ["-m", args.model, "--port", args.port, "--max-body", args.max_body]
        command = [sys.executable, __file__, "--serve", str(notes), *options, "--max-num-seqs", str(args.streams)]
        with subprocess.Popen(command) as server:
            while server.poll() is None:
                try:
                    httpx.get(f"{url}/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            else:
                sys.exit("the server did not start")
            try:
                when = asyncio.run(load(url, args.streams))
            finally:
                server.send_signal(signal.SIGTERM)
        late = array.array("d", notes.read_bytes())
    print(f"{'':48}{'ms each':>9}{'p50 late':>10}{'p99':>8}{'max':>8}  ms")
    for name, (began, ended) in when.items():
        own = sorted(by for at, by in zip(late[::2], late[1::2]) if at <= ended and at + by >= began)
        p50, p99, most = (own[min(int(len(own) * share), len(own) - 1)] * 1e3 for share in (0.5, 0.99, 1.0))
        each = (ended - began) / TIMES * 1e3 if name != ALONE else 0.0
        print(f"{name:48}{each:9.0f}{p50:10.1f}{p99:8.1f}{most:8.1f}")


if __name__ == "__main__":
    main()
