"""A vocabulary of the 256 bytes, each of which is a token."""

from runtime.grammar.limits import GrammarLimits
from runtime.grammar.tokenizer import GrammarTokenizer
from runtime.grammar.vocabulary import Vocabulary

EOS = 256


def make_tokenizer(limits: GrammarLimits) -> GrammarTokenizer:
    token_bytes = [*(bytes([byte]) for byte in range(256)), b""]
    vocabulary = Vocabulary(token_bytes=token_bytes, special_ids=frozenset({EOS}))
    return GrammarTokenizer(vocabulary, eos_token_ids=[EOS], limits=limits)


def ids_of(text: str) -> list[int]:
    return [*text.encode()]
