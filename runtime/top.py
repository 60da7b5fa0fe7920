"""`lockstep top`: what engines do, live in the terminal, from a frontend's /stats."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtime.errors import ConfigError, UnavailableError
from runtime.interrupts import Interrupted

TIMEOUT_S = 5.0
PARTS = ("schedule", "encode", "wire", "forward", "sample", "publish", "total")
MS_PER_S = 1000

Stats = Mapping[str, Any]  # as in /stats


def fetch(url: str, api_key: str | None) -> Stats:
    """What a server tells. Raises ConfigError: the key isn't one. Raises UnavailableError."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/stats", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            found: Stats = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(f"{url} takes no such key: set --api-key") from error
        raise UnavailableError(f"{url} answers with status {error.code}") from error
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{url} can't be reached: {error}") from error
    return found


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

    Raises ConfigError: the key isn't one. Raises UnavailableError: with `once`, nobody answers.
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
