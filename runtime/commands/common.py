"""What the commands share: options and TOML keys from the config dataclasses' fields, logging."""

import dataclasses
import logging
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any

import click

from runtime import logs
from runtime.errors import ConfigError
from runtime.logs import LogFormat

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
    options = [each for each in ctx.command.params if each is not param]
    check_values(options, values, f"config file {path}")
    ctx.default_map = values


def read_options(
    values: Mapping[str, Any], *configs: type, source: str, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """What a mapping sets of the options of config dataclasses; variables and defaults the rest.

    Raises ConfigError, which names `source`: a key is no option, or a value is of another kind.
    """
    command = click.Command("options")
    for config in configs:
        # An option that several have is theirs together.
        seen = {each.name for each in command.params if each.name}
        options_of(config, {*leave_out, *seen})(command)
    check_values(command.params, values, source)
    try:
        return command.make_context("options", [], default_map={**values}).params
    except click.UsageError as error:
        raise ConfigError(f"{source}: {error.format_message()}") from error


def check_values(
    options: Iterable[click.Parameter], values: Mapping[str, Any], source: str
) -> None:
    """Raises ConfigError, which names `source`: a key is no option, a value of another kind."""
    by_name = {each.name: each for each in options if each.name}
    if unknown := sorted(values.keys() - by_name.keys()):
        meant = get_close_matches(unknown[0], sorted(by_name), n=1)
        suggestion = f", do you mean {meant[0]!r}?" if meant else ""
        raise ConfigError(
            f"{source}: unknown key {unknown[0]!r}{suggestion}; keys are the options with _ for -"
        )
    for name, value in values.items():
        option = by_name[name]
        is_list = isinstance(option, click.Option) and option.multiple
        if is_list and not isinstance(value, list):
            raise ConfigError(f"{source}: {name}={value!r} must be a list")
        if not all(fits(option.type, one) for one in (value if is_list else [value])):
            raise ConfigError(f"{source}: {name}={value!r} must be {option.type.name}")


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


def set_up_logging(*, verbose: bool, log_format: LogFormat = "text") -> None:
    logs.set_up_logging(logging.INFO if verbose else logging.WARNING, log_format)
