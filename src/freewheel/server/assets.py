"""The page at ``/``: a conversation, its tokens, and what the server does meanwhile. Its files are in ``page/``.

It asks what any client may ask, and nothing of anyone else. It holds nothing that is worth a key.
"""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about each time: a new version is seen at once
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """Routes of the page's files, which are read once."""
    folder = Path(__file__).parent / "page"
    return [Route(path, _sends((folder / name).read_bytes(), kind)) for path, (name, kind) in FILES.items()]


def _sends(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(request: Request) -> Response:
        known = request.headers.get("If-None-Match", "")
        if headers["ETag"] in known or known == "*":
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return send
