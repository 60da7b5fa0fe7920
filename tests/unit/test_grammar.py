"""Structured output: what is sampled by the masks is what was asked for."""

import json
import random
import re
from functools import cache

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from runtime.grammar.limits import GrammarLimits
from runtime.grammar.masks import masks_of
from runtime.grammar.matcher import CompiledGrammar, Matcher
from runtime.grammar.source import write_source
from runtime.grammar.tokenizer import GrammarTokenizer
from runtime.grammar.vocabulary import Vocabulary
from runtime.scheduling.token_masks import WORD_BITS, MaskKind
from runtime.structure import Structure, StructureKind
from tests.frontend import make_byte_fallback_tokenizer
from tests.quick import quick
from tests.structures import CHOICES, GRAMMARS, REGEXES, SCHEMAS, TREE

pytestmark = pytest.mark.unit

EOS = (1, 5)
LINES = [json.dumps(schema, ensure_ascii=False) for schema in SCHEMAS]
LIMITS = GrammarLimits()
MAX_TOKENS = 400
SEEDS = range(4)
TEXTS = {
    "json_schema": json.dumps(SCHEMAS[35]),
    "regex": r"[a-zé👍]{2,9}\d*",
    "grammar": GRAMMARS[1][0],
    "choices": json.dumps(CHOICES[3]),
}
CLOSING = (b"]", b"}", b'"', b")")


def train_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<pad>", "<unk>", "<turn>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


TOKENIZERS = {
    "byte-level": train_byte_level(),
    "byte-fallback": make_byte_fallback_tokenizer(LINES[:20]),
}


@cache
def grammar_tokenizer(name: str, vocab_size: int = 640) -> GrammarTokenizer:
    """The model's vocabulary is larger than the tokenizer's."""
    contents = json.loads(TOKENIZERS[name].to_str())
    vocabulary = Vocabulary.of(contents, vocab_size=vocab_size)
    return GrammarTokenizer(vocabulary, eos_token_ids=EOS, limits=LIMITS)


def compile_structure(
    kind: StructureKind, text: str, *, name: str = "byte-level", vocab_size: int = 640
) -> CompiledGrammar:
    source = write_source(Structure(kind=kind, text=text), max_bytes=LIMITS.max_source_bytes)
    return CompiledGrammar(grammar_tokenizer(name, vocab_size), kind, source)


def allowed_ids(matcher: Matcher) -> list[int]:
    masks = masks_of([matcher])
    (kind,), words = masks.kinds, masks.words
    if kind == MaskKind.ALLOWED:
        return words.tolist()
    if kind == MaskKind.FORBIDDEN:
        return sorted({*range(matcher.tokenizer.vocab_size)} - {*words.tolist()})
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def sample(grammar: CompiledGrammar, seed: int) -> list[int] | None:
    """Random tokens, closing ones preferred; None where no end is in sight."""
    draw, matcher, token_ids = random.Random(seed), grammar.matcher(), []
    token_bytes = vocabulary_of(grammar)
    for _ in range(MAX_TOKENS):
        allowed = allowed_ids(matcher)
        closing = [i for i in allowed if i in EOS or token_bytes[i].startswith(CLOSING)]
        token_id = draw.choice(closing if closing and draw.random() < 0.4 else allowed)
        matcher.advance(token_id)
        assert matcher.error is None
        if token_id in EOS:
            assert matcher.is_finished
            return token_ids
        token_ids.append(token_id)
    return None


def vocabulary_of(grammar: CompiledGrammar) -> list[bytes]:
    tokenizer = grammar.tokenizer
    return [tokenizer.tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]


def sample_texts(kind: StructureKind, text: str, name: str) -> list[str]:
    """What the tokenizer itself makes of the samples that ended."""
    grammar = compile_structure(kind, text, name=name)
    samples = [sample(grammar, seed) for seed in SEEDS]
    texts = [TOKENIZERS[name].decode(ids) for ids in samples if ids is not None]
    assert len(texts) >= len(SEEDS) // 2, "cut too often: no end within the limit"
    return texts


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_every_sample_of_a_schema_is_valid(schema, name):
    validator = jsonschema.Draft202012Validator(schema)
    for text in sample_texts("json_schema", json.dumps(schema), name):
        validator.validate(json.loads(text))


@pytest.mark.nightly
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_every_one_of_many_samples_is_valid(schema):
    grammar = compile_structure("json_schema", json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema)
    for seed in range(300):
        token_ids = sample(grammar, seed)
        if token_ids is not None:
            validator.validate(json.loads(TOKENIZERS["byte-level"].decode(token_ids)))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("regex", REGEXES)
def test_every_sample_of_a_regex_matches(regex, name):
    for text in sample_texts("regex", regex, name):
        assert re.fullmatch(regex, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("grammar", "regex"), GRAMMARS)
def test_every_sample_of_a_grammar_is_of_its_language(grammar, regex, name):
    for text in sample_texts("grammar", grammar, name):
        assert re.fullmatch(regex, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("choices", CHOICES)
def test_samples_of_choices_are_choices(choices, name):
    assert {*sample_texts("choices", json.dumps(choices), name)} <= {*choices}


@pytest.mark.parametrize(
    ("kind", "name", "vocab_size"),
    quick(
        [(kind, *each) for kind in TEXTS for each in (("byte-level", 320), ("byte-fallback", 560))],
        ("json_schema", "byte-level", 320),
        ("regex", "byte-fallback", 560),
    ),
)
def test_a_token_is_allowed_where_it_can_be_taken(kind, name, vocab_size):
    """One vocabulary cuts off some of the tokenizer's ids, the other has ids beyond them."""
    draw = random.Random(3)
    grammar = compile_structure(kind, TEXTS[kind], name=name, vocab_size=vocab_size)
    matcher = grammar.matcher()
    for _ in range(4):
        takes = [i for i in range(vocab_size) if matcher.state.deep_copy().consume_token(i)]
        assert allowed_ids(matcher) == takes
        assert max(takes) < TOKENIZERS[name].get_vocab_size()
        matcher.advance(draw.choice([i for i in takes if i not in EOS] or takes))


def encode_bytes(grammar: CompiledGrammar, text: str) -> list[int]:
    single = {b: i for i, b in enumerate(vocabulary_of(grammar)) if len(b) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("eos", EOS)
def test_only_the_end_follows_what_is_complete(eos):
    grammar = compile_structure("regex", "ab?")
    matcher, ended = grammar.matcher(), grammar.matcher()
    a, b = encode_bytes(grammar, "ab")
    matcher.advance(a)
    ended.advance(a)
    assert {*EOS} < {*allowed_ids(matcher)}
    assert matcher.is_complete
    assert not matcher.is_finished, "a b may follow"
    ended.advance(eos)
    matcher.advance(b)
    for finished in (matcher, ended):
        assert finished.is_finished
        assert allowed_ids(finished) == [*EOS]


def test_the_end_may_come_again():
    """A sequence that ignores its end-of-sequence token goes on with more of them."""
    grammar = compile_structure("regex", "a")
    matcher = grammar.matcher()
    matcher.replay([*encode_bytes(grammar, "a"), EOS[0], EOS[1], EOS[0]])
    assert matcher.error is None
    assert matcher.is_finished
    assert allowed_ids(matcher) == [*EOS]


def test_a_replayed_matcher_stands_where_the_first_one_stood():
    grammar = compile_structure("json_schema", json.dumps(SCHEMAS[40]))
    matcher, token_ids = grammar.matcher(), sample(grammar, 1)
    for count in range(len(token_ids)):
        resumed = grammar.matcher()
        resumed.replay(token_ids[:count])
        assert allowed_ids(resumed) == allowed_ids(matcher)
        matcher.advance(token_ids[count])


def test_a_token_that_is_not_allowed_ends_its_matcher_alone():
    grammar = compile_structure("regex", "[ab]+")
    wrong, right = grammar.matcher(), grammar.matcher()
    a, c = encode_bytes(grammar, "ac")
    for matcher, last in ((wrong, c), (right, a)):
        matcher.replay([a, a])
        matcher.advance(last)
    assert "regex: after 2 tokens" in str(wrong.error)
    masks = masks_of([wrong, right])
    assert masks.num_words[0] == 0
    assert masks.kinds[0] == MaskKind.ALLOWED
    assert masks.num_words[1] > 0
    assert right.error is None


def test_a_mask_past_its_limit_allows_nothing():
    vocabulary = Vocabulary.of(json.loads(TOKENIZERS["byte-level"].to_str()), vocab_size=640)
    limits = GrammarLimits(step_max_items=1)
    tokenizer = GrammarTokenizer(vocabulary, eos_token_ids=EOS, limits=limits)
    text = "start: LETTER{1,50}\nLETTER: /[a-z]/"
    source = write_source(Structure(kind="grammar", text=text), max_bytes=1000)
    matcher = CompiledGrammar(tokenizer, "grammar", source).matcher()
    assert allowed_ids(matcher) == []
    assert "grammar: after 0 tokens: parser error: Too many items (limit 1" in str(matcher.error)


def test_ids_past_the_vocabulary_are_refused():
    matcher = compile_structure("regex", "a+").matcher()
    matcher.advance(10**6)
    assert matcher.error is not None


def test_json_has_at_most_one_space_after_comma_and_colon():
    grammar = compile_structure("json_schema", json.dumps(SCHEMAS[34]))
    for text, fits in [
        ('{"x":1,"y":2}', True),
        ('{"x": 1, "y": 2}', True),
        ('{"x":  1,"y":2}', False),
        ('{ "x":1,"y":2}', False),
        ('{"x":1 ,"y":2}', False),
        ('{"x":1,\n"y":2}', False),
        ('{"y":2,"x":1}', False),
    ]:
        matcher = grammar.matcher()
        matcher.replay(encode_bytes(grammar, text))
        assert matcher.is_complete == fits, text


def test_masks_of_a_batch_are_those_of_its_members():
    grammars = [
        compile_structure("json_schema", json.dumps(schema)) for schema in (*SCHEMAS[8:12], TREE)
    ]
    matchers = [grammar.matcher() for grammar in grammars]
    batch = masks_of(matchers)
    alone = [masks_of([matcher]) for matcher in matchers]
    assert batch.rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.kinds.tolist() == [mask.kinds[0] for mask in alone]
    assert batch.num_words.tolist() == [mask.num_words[0] for mask in alone]
    assert batch.words.tolist() == np.concatenate([mask.words for mask in alone]).tolist()


def test_no_matchers_have_no_masks():
    masks = masks_of([])
    assert len(masks.rows) == len(masks.kinds) == len(masks.num_words) == len(masks.words) == 0


def test_a_model_without_an_end_token_finishes():
    contents = json.loads(TOKENIZERS["byte-level"].to_str())
    for vocab_size in (608, 600):  # the end token that llguidance needs takes another word, or not
        vocabulary = Vocabulary.of(contents, vocab_size=vocab_size)
        tokenizer = GrammarTokenizer(vocabulary, eos_token_ids=(), limits=LIMITS)
        source = write_source(Structure(kind="regex", text="ab"), max_bytes=1000)
        grammar = CompiledGrammar(tokenizer, "regex", source)
        matcher = grammar.matcher()
        matcher.replay(encode_bytes(grammar, "ab"))
        assert matcher.is_finished
        assert allowed_ids(matcher) == []
        assert masks_of([matcher]).num_words.tolist() == [0]


def test_bits_take_one_word_for_32_tokens():
    masks = masks_of([compile_structure("regex", ".*", vocab_size=641).matcher()])
    assert masks.num_words.tolist() == [-(-641 // WORD_BITS)]
