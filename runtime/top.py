"""`lockstep top`: what engines do, live in the terminal, from a frontend's /stats."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtime.config import require_key
from runtime.errors import ConfigError, UnavailableError
from runtime.interrupts import Interrupted
from runtime.request import EngineStats

TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20
SCHEMES = ("http://", "https://")
PARTS = ("schedule", "encode", "wire", "forward", "sample", "publish", "total")
MS_PER_S = 1000

Stats = Mapping[str, Any]  # as in /stats


def fetch(url: str, api_key: str | None) -> Stats:
    """What a server tells.

    Raises ConfigError: the key isn't one, or `url` is none of a server of ours. Raises
    UnavailableError: nobody answers there now.
    """
    if not url.lower().startswith(SCHEMES):
        raise ConfigError(f"url={url!r} must begin with {' or '.join(SCHEMES)}")
    if api_key is not None:
        require_key("api_key", api_key)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/stats", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            content = response.read(MAX_BYTES)
            if response.length:  # are left: it was cut, or is none of ours
                raise http.client.IncompleteRead(content, response.length)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(f"{url} takes no such key: set --api-key") from error
        if error.code == 400:
            raise ConfigError(f"{url} is no server's HTTP port: {_told(error)}") from error
        raise UnavailableError(f"{url} answers with status {error.code}") from error
    except (OSError, http.client.IncompleteRead) as error:
        raise UnavailableError(f"{url} can't be reached: {error}") from error
    except (ValueError, http.client.InvalidURL) as error:
        raise ConfigError(f"url={url!r} is no URL of a server: {error}") from error
    except http.client.HTTPException as error:
        raise ConfigError(
            f"{url} doesn't speak HTTP: give the server's HTTP port, with https:// if it has TLS"
        ) from error
    return _read(url, content)


def render(now: Stats, before: Stats | None, seconds: float) -> RenderableType:
    """One table for each engine; rates are over `seconds` since `before`."""
    earlier = {} if before is None else before["engines"]
    return Group(
        *(
            _engine(f"{now['model']['name']} at {address}", each, earlier.get(address), seconds)
            for address, each in now["engines"].items()
        )
    )


def show(url: str, api_key: str | None, *, interval_s: float, once: bool) -> None:
    """Until interrupted, or once. A server that is lost is waited for.

    Raises ConfigError: the key isn't one, or no server of ours answers. Raises UnavailableError:
    with `once`, nobody answers.
    """
    console = Console()
    if once:
        console.print(render(fetch(url, api_key), None, 0.0))
        return
    before: Stats | None = None
    then = time.monotonic()
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                try:
                    now = fetch(url, api_key)
                except UnavailableError as error:
                    live.update(Text(f"{error}; trying again"), refresh=True)
                    before = None
                else:
                    moment = time.monotonic()
                    live.update(render(now, before, moment - then), refresh=True)
                    before, then = now, moment
                time.sleep(interval_s)
    except Interrupted:  # the good end of it
        return


@cache
def _engines() -> TypeAdapter[dict[str, EngineStats]]:
    return TypeAdapter(dict[str, EngineStats])


def _read(url: str, content: bytes) -> Stats:
    try:
        found: Stats = json.loads(content)
        _engines().validate_python(found["engines"])
        str(found["model"]["name"])
    except (ValueError, RecursionError, LookupError, TypeError, ValidationError) as error:
        raise ConfigError(
            f"{url} answers something else than what a server of this version tells: give the "
            "HTTP port of one"
        ) from error
    return found


def _told(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(MAX_BYTES))["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return f"it answers with status {error.code}"


def _engine(title: str, now: Stats, before: Stats | None, seconds: float) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    step = now["last_step"]
    used = now["num_blocks"] - now["num_free_blocks"]
    rows = {
        "sequences": f"{now['num_running']} running of {now['max_num_seqs']}, "
        f"{now['num_waiting']} waiting",
        "blocks": f"{used} of {now['num_blocks']} used, "
        f"{now['num_cached_blocks']} free ones cached",
        "tokens": f"{now['num_output_tokens']} given{_rate(now, before, seconds)}",
        "last step": "none yet"
        if step is None
        else f"{step['num_decode_sequences']} decode, {step['num_prefill_sequences']} prefill with "
        f"{step['num_prefill_tokens']} tokens, {_ms(step['total_s'])}",
        "step parts": ", ".join(f"{part} {_ms(_mean(now['step_s'][part]))}" for part in PARTS),
        "means": ", ".join(
            f"{name} {_ms(_mean(now[field]))}"
            for name, field in (("queue", "queue_s"), ("TTFT", "ttft_s"), ("ITL", "itl_s"))
        ),
        "ranks": "; ".join(
            f"{each['rank']}: forward {_ms(each['forward_s'])}, sample {_ms(each['sample_s'])}"
            for each in now["ranks"]
        )
        or "none yet",
        "faults": f"{now['num_preemptions']} preemptions, {now['num_refused']} refused, "
        f"{now['num_timed_out']} timed out, {now['num_invalid_logits']} with invalid logits",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _rate(now: Stats, before: Stats | None, seconds: float) -> str:
    """Nothing where the engine has begun anew."""
    if before is None or seconds <= 0 or now["num_output_tokens"] < before["num_output_tokens"]:
        return ""
    return f", {(now['num_output_tokens'] - before['num_output_tokens']) / seconds:.1f}/s"


def _mean(histogram: Stats) -> float | None:
    count = sum(histogram["counts"])
    return histogram["sum"] / count if count else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{MS_PER_S * seconds:.2f} ms"
