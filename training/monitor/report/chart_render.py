"""Charts rendered by vl-convert: SVG pictures, and the JavaScript that draws them in the page.
Works without a network."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from training.core import rundir
from training.host import p2p_cache
from training.monitor.report.chart_types import Chart

PACKAGE = "vl-convert-python"
VERSION = "6.4"  # of Vega-Lite
_ID = re.compile(r'(\bid="|url\(#)(clip|gradient)')

try:
    import vl_convert
except ImportError:
    vl_convert = None  # type: ignore[assignment,unused-ignore]


def available() -> bool:
    return vl_convert is not None


def warm_up() -> None:
    """Renders a first picture in the background, since it takes some tenths of a second longer."""
    if vl_convert is not None:
        threading.Thread(target=_first_picture, daemon=True).start()


def _first_picture() -> None:
    with contextlib.suppress(ValueError):  # the real pictures raise it again
        vl_convert.vegalite_to_svg(
            {"data": {"values": []}, "mark": "point", "encoding": {}}, vl_version=VERSION
        )


def picture(chart: Chart) -> str:
    """The chart as SVG. Raises ValueError."""
    svg: str = vl_convert.vegalite_to_svg(
        chart.complete(), vl_version=VERSION, allowed_base_urls=[]
    )
    # All pictures of a page share one namespace of ids.
    return _ID.sub(rf"\1{chart.id}-\2", svg)


def program(environ: Mapping[str, str] = os.environ) -> str:
    """JavaScript that defines `vegaEmbed`. Building it takes a second, so the user's cache keeps
    it."""
    folder = p2p_cache.path(environ)
    kept = folder.with_name(f"vega-{vl_convert.__version__}.js") if folder else None  # type: ignore[attr-defined]
    if kept is not None:
        try:
            return kept.read_text(encoding="utf-8")
        except (OSError, ValueError):
            pass
    source: str = vl_convert.javascript_bundle(vl_version=VERSION)  # type: ignore[call-arg]  # its stub is wrong
    _keep(kept, source)
    return source


def _keep(path: Path | None, source: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rundir.write_bytes(path, source.encode())
    except OSError:  # rebuilt next time
        pass
