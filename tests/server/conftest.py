"""A server on a tiny model, reached over a real socket."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI

from freewheel.config import EngineConfig
from freewheel.engine.build import build_engine
from freewheel.engine.engine import Engine
from freewheel.models.load import load
from freewheel.server.app import ServerConfig, Service, make_app


class Served(NamedTuple):
    """A running server: where it is, a client for it, and what is behind it."""

    url: str
    client: Any  # an OpenAI: its overloads know no values that are wrong on purpose
    service: Service
    engine: Engine
    app: FastAPI


@contextmanager
def serving(path: Path, engine_options: dict[str, Any] | None = None, **options: Any) -> Iterator[Served]:
    """Serve the model until the block ends; the engine's integrity is checked then."""
    model = load(path, dtype="float32")
    sizes: dict[str, Any] = {"max_num_seqs": 8} | (engine_options or {})
    engine = build_engine(model, EngineConfig(**sizes))
    app = make_app(engine, model.tokenizer, ServerConfig(name="tiny", **options))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        key = options.get("api_key", "none")
        with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            yield Served(url, client, app.state.service, engine, app)
    finally:
        server.should_exit = True
        thread.join()
    engine.check()


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with serving(tiny_model) as running:
        yield running
