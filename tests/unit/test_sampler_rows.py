"""What sampled rows need beyond one value each, beside what each of them says alone."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.scheduling.sampler_inputs import SamplerInputs, no_inputs
from runtime.scheduling.sampler_rows import SamplerRows
from runtime.scheduling.sequence import Sequence
from tests.masks import allowed_by
from tests.scheduling import make_sequence

pytestmark = pytest.mark.unit

VOCAB_SIZE = 70  # no multiple of a mask's words
FEW = 6  # so that words are met in what was said
NEVER = float("-inf")

token_ids = st.integers(0, FEW - 1) | st.integers(0, VOCAB_SIZE - 1)
few_ids = st.integers(0, FEW - 1)
penalties = st.sampled_from([0.0, 0.0, 0.5, -2.0])
biases = st.sampled_from([-100.0, -0.25, 0.0, 3.5, 100.0])


def gather(rows: SamplerRows, sampled: list[Sequence]) -> SamplerInputs:
    """What these need in a step that samples a token of each."""
    for each in sampled:
        each.num_pending_tokens = 1
    return rows.find(sampled).gather()


@dataclass
class Effect:
    """What becomes of one row's logits."""

    biases: dict[int, float] = field(default_factory=dict)
    allowed: set[int] | None = None
    ends_a_word: set[int] = field(default_factory=set)  # tokens that would complete one
    outputs: Counter[int] = field(default_factory=Counter)  # where a penalty counts them
    seen: set[int] = field(default_factory=set)  # where a penalty asks for them


@st.composite
def sequences(draw: st.DrawFn, sequence_id: int) -> Sequence:
    prompt = draw(st.lists(few_ids, min_size=1, max_size=6))
    output = draw(st.lists(few_ids, max_size=6))
    params = {
        "presence_penalty": draw(penalties),
        "frequency_penalty": draw(penalties),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.5, 0.01])),
        "logit_bias": draw(st.none() | st.dictionaries(token_ids, biases, max_size=4)),
        "allowed_token_ids": tuple(draw(st.lists(token_ids, max_size=70))),
        "stop_token_ids": tuple(draw(st.lists(token_ids, max_size=3))),
    }
    words = draw(st.lists(st.lists(few_ids, max_size=4).map(tuple), max_size=4))
    if draw(st.booleans()):
        params = {}
    if draw(st.booleans()):
        words = []
    sequence = make_sequence(
        sequence_id,
        prompt,
        min_tokens=draw(st.integers(0, 7)),
        params=params,
        bad_words=tuple(words),
    )
    sequence.token_ids.extend(output)
    return sequence


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Sequence], list[Sequence]]:
    """Sequences that hold blocks, and those of them that are sampled, in any order."""
    count = draw(st.integers(1, 6))
    every = [draw(sequences(sequence_id)) for sequence_id in range(count)]
    sampled = draw(st.permutations(every))[: draw(st.integers(0, count))]
    return every, sampled


def wanted(sequence: Sequence) -> Effect:
    """By the definitions of the parameters alone."""
    params = sequence.params
    tokens = sequence.token_ids.tolist()
    output = tokens[sequence.num_prompt_tokens :]
    effect = Effect(biases=dict(params.logit_bias or {}))
    for word in sequence.bad_words:
        if len(word) == 1:
            effect.biases[word[0]] = NEVER
        elif len(word) > 1 and tokens[-len(word) + 1 :] == [*word[:-1]]:
            effect.ends_a_word.add(word[-1])
    if len(output) < params.min_tokens:
        effect.biases |= dict.fromkeys(params.stop_token_ids, NEVER)
    if params.allowed_token_ids:
        effect.allowed = {*params.allowed_token_ids}
    if params.presence_penalty or params.frequency_penalty:
        effect.outputs = Counter(output)
    if params.repetition_penalty != 1:
        effect.seen = {*tokens}
    return effect


def found(inputs: SamplerInputs, sampled: list[Sequence]) -> list[Effect]:
    """By the arrays alone, for rows with the penalties of `sampled`."""
    effects = [Effect() for _ in sampled]
    given_biases = inputs.biases
    for row, token, value in zip(
        given_biases.rows, given_biases.token_ids, given_biases.values, strict=True
    ):
        assert token not in effects[row].biases, "a token has two biases"
        effects[row].biases[int(token)] = float(value)
    for row, allowed in allowed_by(inputs.masks, VOCAB_SIZE).items():
        effects[row].allowed = allowed
    histories = {}
    tokens = inputs.history.token_ids.tolist()
    for row, length, num_prompt in zip(
        inputs.history.rows.tolist(),
        inputs.history.lengths.tolist(),
        inputs.history.num_prompt_tokens.tolist(),
        strict=True,
    ):
        history, tokens = tokens[:length], tokens[length:]
        histories[row] = history
        params = sampled[row].params
        if params.presence_penalty or params.frequency_penalty:
            effects[row].outputs = Counter(history[num_prompt:])
        if params.repetition_penalty != 1:
            effects[row].seen = {*history}
    assert not tokens, "a history is longer than told"
    words = inputs.bad_words.token_ids.tolist()
    for row, length in zip(
        inputs.bad_words.rows.tolist(), inputs.bad_words.lengths.tolist(), strict=True
    ):
        word, words = words[:length], words[length:]
        assert length > 1
        history = histories.get(row, [])
        if len(history) >= length - 1 and history[len(history) - length + 1 :] == word[:-1]:
            effects[row].ends_a_word.add(word[-1])
    assert not words, "a word is longer than told"
    return effects


def rows_of(sequences: list[Sequence]) -> SamplerRows:
    rows = SamplerRows(VOCAB_SIZE)
    for sequence in sequences:
        rows.add(sequence)
    return rows


@given(batches())
def test_rows_have_the_effects_that_their_parameters_define(
    batch: tuple[list[Sequence], list[Sequence]],
) -> None:
    every, sampled = batch
    inputs = gather(rows_of(every), sampled)
    assert found(inputs, sampled) == [wanted(each) for each in sampled]


@given(batches())
def test_rows_rise_and_nothing_is_sent_in_vain(
    batch: tuple[list[Sequence], list[Sequence]],
) -> None:
    every, sampled = batch
    inputs = gather(rows_of(every), sampled)
    for kind in (inputs.biases, inputs.masks, inputs.bad_words, inputs.history):
        assert kind.rows.tolist() == sorted(kind.rows.tolist())
    assert len({*inputs.history.rows.tolist()}) == len(inputs.history.rows)
    for row, length, num_prompt in zip(
        inputs.history.rows,
        inputs.history.lengths,
        inputs.history.num_prompt_tokens,
        strict=True,
    ):
        sequence = sampled[row]
        needed = max([len(word) - 1 for word in sequence.bad_words if len(word) > 1], default=0)
        if sequence.params.has_penalties:
            needed = max(needed, sequence.num_output_tokens)
        needed = min(needed, sequence.num_tokens)
        before = 0  # the prompt's ids, each once, where not all is sent already
        if sequence.params.repetition_penalty != 1 and needed < sequence.num_tokens:
            before = len({*sequence.token_ids[: sequence.num_prompt_tokens]})
        assert 0 < length == before + needed
        assert num_prompt == max(0, length - sequence.num_output_tokens)


def test_a_long_prompt_is_sent_as_a_set() -> None:
    prompt = [7, 8] * 500
    sequence = make_sequence(1, prompt, params={"repetition_penalty": 1.5})
    sequence.token_ids.extend([9, 9])
    history = gather(rows_of([sequence]), [sequence]).history
    assert history.token_ids.tolist() == [7, 8, 9, 9]
    assert history.num_prompt_tokens.tolist() == [2]


def test_choices_share_what_is_made_of_their_parameters() -> None:
    first = make_sequence(1, [1, 2, 3], params={"allowed_token_ids": (4, 5), "n": 2})
    fork = first.fork(2, seed=9)
    fork.release(block_size=4)
    rows = rows_of([first])
    made = first.sampler_needs
    rows.add(fork)
    rows.remove(1)
    rows.add(first)  # preempted meanwhile
    assert made is not None
    assert first.sampler_needs is made
    masks = gather(rows, [fork, first]).masks
    assert allowed_by(masks, VOCAB_SIZE) == {0: {4, 5}, 1: {4, 5}}


@given(batches(), st.data())
def test_who_left_needs_nothing(
    batch: tuple[list[Sequence], list[Sequence]], data: st.DataObject
) -> None:
    every, sampled = batch
    rows = rows_of(every)
    left = data.draw(st.sets(st.sampled_from([each.sequence_id for each in every])))
    for sequence_id in left:
        rows.remove(sequence_id)
    rows.remove(99)  # never joined
    staying = [each for each in sampled if each.sequence_id not in left]
    effects = found(gather(rows, sampled), sampled)
    assert [
        effect
        for effect, each in zip(effects, sampled, strict=True)
        if each.sequence_id not in left
    ] == [wanted(each) for each in staying]
    for effect, each in zip(effects, sampled, strict=True):
        if each.sequence_id in left:
            assert effect == Effect()


def test_rows_without_needs_cost_nothing() -> None:
    rows = rows_of([make_sequence(1, [5, 6], min_tokens=3), make_sequence(2, [7])])
    assert gather(rows, []) is no_inputs()


def test_stop_tokens_are_forbidden_until_there_are_enough() -> None:
    params = {"stop_token_ids": (4,), "logit_bias": {4: 2.0, 5: 1.0}}
    sequence = make_sequence(1, [9], min_tokens=2, params=params)
    rows = rows_of([sequence])
    seen = []
    for token in (7, 8, 9):
        seen.append(found(gather(rows, [sequence]), [sequence])[0].biases)
        sequence.token_ids.append(token)
    assert seen == [{4: NEVER, 5: 1.0}, {4: NEVER, 5: 1.0}, {4: 2.0, 5: 1.0}]
