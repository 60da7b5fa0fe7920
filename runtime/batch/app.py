"""A batch run with an engine of its own, in this process."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from runtime.batch.ledger import Ledger
from runtime.batch.lines import check_input, read_lines
from runtime.batch.progress import BatchProgress
from runtime.batch.results import ResultFile
from runtime.batch.run import Answer, BatchOptions, BatchRun, Tally
from runtime.config import EngineConfig
from runtime.driver import running_engine
from runtime.engine_service import EngineServer
from runtime.errors import ConfigError, UnavailableError
from runtime.frontend.chat_files import read_templates
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.metrics import FrontendMetrics
from runtime.frontend.observer import Observer
from runtime.frontend.openai.service import CHAT_COMPLETIONS, Caller, OpenAIService
from runtime.frontend.texts import open_texts
from runtime.frontend.tracing import NoTracing
from runtime.frontend_config import FrontendConfig
from runtime.interrupts import until_signal

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0


def run_batch(
    engine_config: EngineConfig,
    config: FrontendConfig,
    input_path: Path,
    output_path: Path,
    errors_path: Path,
    *,
    max_concurrency: int,
    quiet: bool = False,
) -> Tally:
    """Answers what isn't answered yet.

    Raises ConfigError: a file, the model or an option can't be used. Raises UnavailableError: the
    engine can't be started or reached, or a signal came; what is done is in the files.
    """
    if len({each.resolve() for each in (input_path, output_path, errors_path)}) < 3:
        raise ConfigError(
            f"input={str(input_path)!r}, output={str(output_path)!r} and "
            f"errors={str(errors_path)!r} must be three files"
        )
    check_input(input_path)
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger())
        output = stack.enter_context(ResultFile(output_path, option="output"))
        errors = stack.enter_context(ResultFile(errors_path, option="errors"))
        # All are read before a minute is spent on a model.
        output.recover(ledger)
        errors.recover(ledger)
        total = ledger.match(read_lines(input_path, config.max_body_bytes))
        engine = stack.enter_context(running_engine(engine_config, quiet=quiet))
        server = EngineServer(engine, secrets.token_urlsafe())
        server.start()
        stack.callback(server.stop, STOP_GRACE_S)
        progress = stack.enter_context(BatchProgress(total, quiet=quiet))
        tallies: list[Tally] = []

        async def work() -> None:
            async with _answering(config, server) as answer:
                options = BatchOptions(
                    model=engine.model.name,
                    max_body_bytes=config.max_body_bytes,
                    max_concurrency=max_concurrency,
                )
                run = BatchRun(
                    answer, options, ledger=ledger, output=output, errors=errors, progress=progress
                )
                tallies.append(await run.run(input_path))

        asyncio.run(until_signal(work()))
        if not tallies:
            raise UnavailableError("interrupted: the same command again does the rest")
        return tallies[0]


@asynccontextmanager
async def _answering(config: FrontendConfig, server: EngineServer) -> AsyncIterator[Answer]:
    async with AsyncExitStack() as stack:
        pool = await EnginePool.connect(
            [f"127.0.0.1:{server.port}"],
            partial(EngineClient.connect, token=server.token),
            resume_timeout_s=0,
        )
        stack.push_async_callback(pool.close)
        texts = await stack.enter_async_context(open_texts(config, pool))
        observer = Observer(FrontendMetrics(), NoTracing(), model=pool.model.name)
        service = OpenAIService(texts.generator, observer, texts.parsers)
        model = pool.model
        has_template = config.chat_template is not None or bool(
            await asyncio.to_thread(read_templates, Path(model.path))
        )

        async def answer(url: str, body: bytes, request_id: str) -> dict[str, Any]:
            if url == CHAT_COMPLETIONS and not has_template:
                # Told of each line, it would be an error that no rerun tries again.
                raise ConfigError(
                    f"model {model.name} has no chat template, and the input has chats: add "
                    "--chat-template FILE to the same command"
                )
            return dict(await service.answer(url, body, Caller(request_id=request_id)))

        yield answer
