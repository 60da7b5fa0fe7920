"""The command line. Its options, and the keys of TOML files, are the config dataclasses' fields."""

import asyncio
import dataclasses
import json
import logging
import os
import sys
import tomllib
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import click

from runtime.config import EngineConfig, FrontendConfig
from runtime.errors import ConfigError, LockstepError
from runtime.interrupts import interruptible, until_signal
from runtime.sampling_params import SamplingParams

EXIT_ERROR = 1
EXIT_CONFIG = 2

# The terminal shows one choice, and its text alone; `runtime.LLM` gives the rest.
UNSHOWN = ("n", "logprobs", "prompt_logprobs")

UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}{b}": 1000**n for n, prefix in enumerate("kmgt", 1) for b in ("", "b")},
    **{f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)},
}


class ByteSize(click.ParamType[int]):
    """A number of bytes: 1048576, 512MiB, 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        try:
            return int(float(digits) * UNITS[text[len(digits) :].strip()])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} isn't a size such as 1048576, 512MiB or 2GiB", param, ctx)


class TokenBias(click.ParamType[tuple[int, float]]):
    """A token and what is added to its logit: 42=-1.5."""

    name = "id=bias"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token, _, bias = str(value).partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} isn't a token id and a number such as 42=-1.5", param, ctx)


def options_of(
    dataclass: type, leave_out: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds an option for every field of a config dataclass, but for those to be left out."""
    hints = typing.get_type_hints(dataclass)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for field in reversed(dataclasses.fields(dataclass)):
            if field.name not in leave_out:
                command = make_option(field, hints[field.name])(command)
        return command

    return decorate


def make_option(
    field: "dataclasses.Field[Any]", hint: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = "--" + field.name.replace("_", "-")
    kind: Any = hint
    if isinstance(hint, UnionType):  # `int | None`: unset is None
        (kind,) = (each for each in typing.get_args(hint) if each is not type(None))
    origin = typing.get_origin(kind)
    is_multiple = origin in (tuple, Mapping)
    if origin is typing.Literal:
        kind = click.Choice(typing.get_args(kind))
    elif origin is Mapping:
        kind = TokenBias()
    elif origin is tuple:
        kind = typing.get_args(kind)[0]
    elif kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    elif field.metadata["unit"] == "bytes":
        kind = ByteSize()
    return click.option(
        flag,
        field.name,
        type=kind,
        multiple=is_multiple,
        callback=to_mapping if origin is Mapping else None,
        default=field.default,
        show_default=field.default not in (None, ()),
        help=field.metadata["help"],
        envvar=field.metadata["envvar"],
        show_envvar=True,
    )


def to_mapping(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[int, float], ...]
) -> dict[int, float] | None:
    return dict(pairs) or None


def read_toml(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Makes a file's keys the defaults of this command's options."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    known = {each.name for each in ctx.command.params} - {param.name}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(
            f"config file {path}: unknown key {unknown[0]!r}; keys are the options with _ for -"
        )
    for each in ctx.command.params:
        if each.name not in values:
            continue
        value = values[each.name]
        is_list = isinstance(each, click.Option) and each.multiple
        if is_list and not isinstance(value, list):
            raise ConfigError(f"config file {path}: {each.name}={value!r} must be a list")
        if not all(fits(each.type, one) for one in (value if is_list else [value])):
            raise ConfigError(f"config file {path}: {each.name}={value!r} must be {each.type.name}")
    ctx.default_map = values


def fits(kind: click.ParamType[Any], value: object) -> bool:
    """Whether a TOML value is one of an option's kind; click would make 1 of 1.5 and of true."""
    match kind:
        case click.types.BoolParamType():
            return isinstance(value, bool)
        case click.types.IntParamType():
            return type(value) is int
        case click.types.FloatParamType():
            return type(value) in (int, float)
        case ByteSize():
            return type(value) in (int, str)
        case _:
            return isinstance(value, str)


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=read_toml,
    is_eager=True,
    expose_value=False,
    help="TOML file with option names as keys (_ for -); flags win over it.",
)
verbose_option = click.option("--verbose", is_flag=True, help="Log what start-up and engine do.")


def pick(dataclass: type, values: Mapping[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(dataclass) if field.name in values]
    return dataclass(**{name: values[name] for name in names})


def set_up_logging(*, verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


@click.group(context_settings={"max_content_width": 100})
@click.version_option(package_name="lockstep-serving", prog_name="lockstep")
def cli() -> None:
    """Lockstep serves large language models."""


@cli.command()
@config_option
@options_of(EngineConfig)
@options_of(FrontendConfig)
@verbose_option
def serve(verbose: bool, **values: Any) -> None:
    """Start an engine and a frontend, and serve until Ctrl-C or SIGTERM."""
    from runtime.app import serve as serve_app

    set_up_logging(verbose=verbose)
    ended = serve_app(pick(EngineConfig, values), pick(FrontendConfig, values))
    if ended is not None:
        raise ended


@cli.command()
@config_option
@click.argument("prompt")
@options_of(EngineConfig)
@options_of(SamplingParams, leave_out=UNSHOWN)
@verbose_option
def generate(prompt: str, verbose: bool, **values: Any) -> None:
    """Start an engine, stream the continuation of PROMPT to the terminal, stop."""
    from runtime.llm import LLM

    set_up_logging(verbose=verbose)
    params = pick(SamplingParams, values)
    with LLM.from_config(pick(EngineConfig, values)) as llm:
        for chunk in llm.stream(prompt, params):
            print(chunk.text, end="", flush=True)
        print()


@cli.command()
@config_option
@click.option("--engine", required=True, metavar="HOST:PORT", help="The engine's address.")
@options_of(FrontendConfig)
@verbose_option
def frontend(engine: str, verbose: bool, **values: Any) -> None:
    """Serve clients for an engine that runs already (`serve` starts one of these by itself).

    The engine's token comes in LOCKSTEP_ENGINE_TOKEN. Prints a line of JSON with the port when it
    is ready.
    """
    from runtime.frontend.server import run_frontend

    set_up_logging(verbose=verbose)
    token = os.environ.get("LOCKSTEP_ENGINE_TOKEN")
    if not token:
        raise ConfigError("LOCKSTEP_ENGINE_TOKEN is not set: it is the token of the engine's port")
    config = pick(FrontendConfig, values)
    if config.api_key is None and config.api_keys is None:
        raise ConfigError(
            "neither api_key nor api_keys is set: clients need a key "
            "(--api-key, LOCKSTEP_API_KEY, --api-keys)"
        )
    asyncio.run(until_signal(run_frontend(config, engine, token, announce)))


@cli.command()
@click.option("--refused", is_flag=True, help="Show the types that aren't served, and why.")
def models(refused: bool) -> None:
    """Show which model types are served, as measured for this release.

    A checkpoint of another type, or of another version of transformers, is tested before it is
    served.
    """
    from runtime.model_support import read_results, table

    results = read_results()
    click.echo(f"Tested with transformers {results.transformers}, torch {results.torch}, on CPU.")
    for line in table(results, refused=refused):
        click.echo(line)


def announce(port: int) -> None:
    print(json.dumps({"port": port}), flush=True)


def main() -> None:
    """Runs a command; errors are one sentence on stderr, interruptions end all that was started."""
    try:
        with interruptible():
            cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(f"lockstep: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    except LockstepError as error:
        click.echo(f"lockstep: {error}", err=True)
        sys.exit(EXIT_ERROR)
