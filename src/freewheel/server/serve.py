"""``freewheel serve``: load a model, and answer over HTTP until told to stop."""

import argparse
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freewheel.config import EngineConfig
    from freewheel.engine.process import Load

LOCAL = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the server; those of the model are added elsewhere."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="port (default: %(default)s; 0: any)")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: --model)")
    group.add_argument("--api-key", metavar="KEY", help="that clients must send (default: $FREEWHEEL_API_KEY, or none)")
    group.add_argument(
        "--max-num-seqs", type=int, default=32, metavar="N", help="most sequences at once (default: %(default)s)"
    )
    group.add_argument(
        "--max-requests", type=int, default=1024, metavar="N",
        help="most prompts that run or wait; more get status 429 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-body", type=int, default=2 * 2**20, metavar="BYTES", help="largest request (default: %(default)s)"
    )
    group.add_argument("--timeout", type=float, metavar="S", help="seconds until a request is ended (default: never)")
    group.add_argument(
        "--grace", type=float, default=30.0, metavar="S",
        help="seconds that requests have to finish when the server is told to stop (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--log-requests", action="store_true", help="a line on standard error for each request")
    group.add_argument(
        "--cors-origin", action="append", metavar="URL", help="let pages from there ask (may be given again)"
    )


def run(
    args: argparse.Namespace,
    engine_options: dict[str, Any],
    loads: "Callable[[EngineConfig], Load] | None" = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then let requests finish for ``--grace`` seconds.

    The engine has a process of its own; here are HTTP and texts.

    Args:
        args: the options that :func:`add_arguments` knows, and the model's.
        engine_options: fields of :class:`freewheel.config.EngineConfig` beside those.
        loads: what the engine's process loads in place of the model that ``args`` name: benchmarks have their own.

    Raises:
        ValueError: an option is wrong, or what the server is made of is not installed.
        ModelError: the model cannot be found, read or run.
    """
    from freewheel.config import EngineConfig
    from freewheel.engine.process import EngineProcess, Load
    from freewheel.models.store import resolve

    for name in ("max_requests", "max_body"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"port must be an integer from 0 to 65535, not {args.port}")
    if (args.timeout is not None and not args.timeout > 0) or not args.grace >= 0:
        raise ValueError("timeout must be above 0, and grace not below")
    key = args.api_key if args.api_key is not None else os.environ.get("FREEWHEEL_API_KEY")
    if key == "":
        raise ValueError("api_key must not be empty")
    listening = _listen(args.host, args.port)  # before a model is loaded in vain
    config = EngineConfig(max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs, **engine_options)
    loads = loads or (lambda config: Load(resolve(args.model), config, args.dtype, args.device, args.threads))
    load = loads(config)
    _say(f"loading {args.model} on {args.device}")
    with EngineProcess(load) as engine:
        try:  # here, as it takes long, and the process is at work by now
            import uvicorn

            from freewheel.server.app import ServerConfig, make_app
        except ModuleNotFoundError as error:
            raise ValueError(
                f"serve: {error.name} is missing: install freewheel with its extra, as in pip install -e '.[server]'"
            ) from None
        server = ServerConfig(
            name=args.served_model_name or args.model,
            api_key=key,
            max_requests=args.max_requests,
            max_body=args.max_body,
            timeout=args.timeout,
            cors_origins=tuple(args.cors_origin or ()),
        )
        tokenizer = load.tokenizer()
        engine.wait()
        sizes = f"up to {config.max_num_seqs} sequences of {engine.limits.max_model_len} tokens"
        _say(f"loaded in {engine.load_s:.1f} s, engine ready in {engine.prepare_s:.1f} s: {sizes}")
        if args.host not in LOCAL and key is None:
            _say(f"anyone who reaches {args.host} may use this server: there is no --api-key")
        listening.listen()  # whoever reads the next line may come at once
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = f"http://{host}:{listening.getsockname()[1]}"
        _say(f"model {server.name!r} at {url}/v1, a page to try it at {url}/ (Ctrl-C stops)")
        if args.log_requests:
            logging.basicConfig(format="%(asctime)s %(message)s")
            logging.getLogger("freewheel.server").setLevel(logging.INFO)
        app = make_app(engine, tokenizer, server)
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it again and again would hold up everyone
        options = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(args.grace))
        uvicorn.Server(options).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """ValueError if there is no such address, or another one listens there."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ValueError(f"port {port} of host {host!r} cannot be listened to: {error.strerror or error}") from None
    return listening


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
