"""Serve the app with downloads beside its pages; `featcal app` passes this file to streamlit.

Streamlit's download button keeps a file in the server's memory, for which a checkpoint may be too large.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

import streamlit as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # as in main.py: streamlit loads this file by its path
    sys.path.insert(0, str(ROOT))

from app import zips  # noqa: E402


def send_checkpoint(request: Request) -> Response:
    """Send a checkpoint of the list as a zip file."""
    written = zips.find(request.path_params["id"])
    if written is None:
        return PlainTextResponse("No such checkpoint: it was moved, or taken off the list.", 404)
    place = Path(written.folder)
    named = f"attachment; filename*=UTF-8''{quote(f'{place.name}.zip')}"
    pieces = zips.zip_pieces(place, [*written.files])
    return StreamingResponse(pieces, media_type="application/zip", headers={"Content-Disposition": named})


zips.is_served = True
# Streamlit serves its own routes below the base path, and those of others as they are written.
app = st.App("main.py", routes=[Route(zips.link("{id}", st.get_option("server.baseUrlPath")), send_checkpoint)])
