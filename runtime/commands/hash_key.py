"""`lockstep hash-key`: how a key is kept in files."""

import secrets
import sys

import click

from runtime.errors import ConfigError
from runtime.frontend.keys import hashed

# Of those that are made; shorter ones may be guessed from their hashes.
KEY_BYTES = 24
MIN_KEY_CHARACTERS = 20


@click.command("hash-key")
@click.option("--make", is_flag=True, help="Make a key, and show it with its hash.")
def hash_key(make: bool) -> None:
    """Reads a key from standard input and prints what --api-key and --api-keys take in its place.

    Who reads the hash can't call with it. That holds for keys that can't be guessed: better let
    --make make one.
    """
    if make:
        key = secrets.token_urlsafe(KEY_BYTES)
        click.echo(f"key:  {key}")
        click.echo(f"hash: {hashed(key)}")
        return
    key = _read_key()
    click.echo(hashed(key))
    if len(key) < MIN_KEY_CHARACTERS:
        click.echo(
            f"lockstep: a key of {len(key)} characters may be guessed from its hash: "
            f"{MIN_KEY_CHARACTERS} random ones or more can't",
            err=True,
        )


def _read_key() -> str:
    if sys.stdin.isatty():
        try:
            key: str = click.prompt("key", hide_input=True, confirmation_prompt=True, err=True)
        except click.Abort as error:
            raise ConfigError("no key was typed") from error
        return key
    # What isn't UTF-8 is refused below, in words that don't show it.
    lines = sys.stdin.buffer.read().decode(errors="replace").splitlines()
    if len(lines) != 1:
        raise ConfigError(f"standard input has {len(lines)} lines, must have one: the key")
    return lines[0]
