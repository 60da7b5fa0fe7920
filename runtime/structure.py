"""What a request's output must look like."""

from dataclasses import dataclass
from typing import Literal, get_args

StructureKind = Literal["json_schema", "regex", "grammar", "choices"]
STRUCTURE_KINDS: tuple[StructureKind, ...] = get_args(StructureKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """One structure; equal ones share what is compiled.

    `text` is the JSON schema, the regular expression, the EBNF grammar (the dialect is described
    in `runtime.grammar.dialect`), or for choices a JSON list of strings.
    """

    kind: StructureKind
    text: str
