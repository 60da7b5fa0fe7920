"""What turns texts and chats of clients into requests, and outputs into texts."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from runtime.frontend.chat import ChatTemplate
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.generator import Generator, Limits
from runtime.frontend.openai.parsing import ParserChoice
from runtime.frontend.prompts import PromptReader
from runtime.frontend.resume_proof import ResumeProofs
from runtime.frontend.text import Tokenizer
from runtime.frontend_config import FrontendConfig

logger = logging.getLogger(__name__)


class Texts(NamedTuple):
    """The same for requests over gRPC, over HTTP and out of files."""

    generator: Generator
    parsers: ParserChoice


@asynccontextmanager
async def open_texts(
    config: FrontendConfig, pool: EnginePool, proofs: ResumeProofs | None = None
) -> AsyncIterator[Texts]:
    """Reads the tokenizer and the chat template of the pool's model.

    `proofs` as for Generator. Raises ConfigError: one of them can't be used.
    """
    folder = pool.model.path
    override = None if config.chat_template is None else Path(config.chat_template)
    load = partial(ChatTemplate.load, folder, override, max_bytes=config.max_prompt_bytes)
    template = await asyncio.to_thread(load)
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        if tokenizer is None:
            logger.warning(
                "%s has no tokenizer.json: prompts must be token ids, outputs carry no text", folder
            )
        prompts = PromptReader(
            pool.model,
            tokenizer,
            template,
            max_prompt_bytes=config.max_prompt_bytes,
            chat_template_timeout_s=config.chat_template_timeout_s,
        )
        limits = Limits(
            max_prompt_tokens=config.max_prompt_tokens,
            max_n=config.max_n,
            max_logprobs=config.max_logprobs,
        )
        yield Texts(
            Generator(pool, prompts, limits, proofs),
            ParserChoice(template, tools=config.tool_parser, reasoning=config.reasoning_parser),
        )
    finally:
        if template is not None:
            await asyncio.to_thread(template.close)
