"""SamplingParams: what is refused and how it is said. Request: tokens, lengths, endings, seeded numbers."""

import math
from dataclasses import FrozenInstanceError, fields
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanobeacon.request import Request, SamplingParams

NAN, INF = math.nan, math.inf
CHANCE = 0.825649843679949
WHOLE = ["3", 1.0, 2.5, NAN, INF, True, False, [1], (1,), {"a": 1}, b"3", 1 + 0j, Decimal(1)]
NUMBER = ["0.5", NAN, INF, -INF, True, False, [0.5], {"a": 1}, b"1", 1j, Decimal("0.5"), Fraction(1, 2)]
# What each field refuses. None is "not given" everywhere but in n and ignore_eos.
REFUSED = {
    "max_tokens": [*WHOLE, 0, -1, -(10**30)],
    "top_k": [*WHOLE, -2],
    "n": [*WHOLE, None, 0, -1],
    "logprobs": [*WHOLE, -1],
    "seed": WHOLE,
    "min_tokens": [*WHOLE, -1],
    "repetition_penalty": [*NUMBER, 0, 0.0, -1],
    "bad_token_ids": [[-1], ["1"], [1.0], [True], [None], [[1]]],
    "logit_bias": [5, "1", [1], {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1: "2"}, {1: NAN}, {1: INF}, {1: None}],
    "logits_processor": [5, "f", [len]],
    "temperature": [*NUMBER, -0.1, -1, -1e-300],
    "top_p": [*NUMBER, -0.5, 1.0000001, 2],
    "min_p": [*NUMBER, -1e-9, 1.0000001, 2, -1],
    "stop": ["", [""], ["a", ""], [1], [None], ["a", b"b"], [["a"]]],
    "stop_token_ids": [[-1], ["1"], [1.0], [True], [None], [1, NAN], [[1]]],
    "ignore_eos": [None, 0, 1, "yes", "", [], NAN],
}
# Not a sequence, or an empty value of a wrong type.
NOT_SEQUENCES = {
    "stop": [5, 0, 1.5, True, False, NAN, b"", b"abc"],
    "stop_token_ids": [5, 0, 1.5, True, False, NAN, "", b"", "12", {"a": 1}],
    "bad_token_ids": [5, 0, "12", {"a": 1}],
}
TOO_LARGE = [("temperature", 10**400), ("top_p", 10**400), ("min_p", 10**400)]


def cases(table):
    return [
        pytest.param(field, value, id=f"{field}={value!r:.20}") for field in table for value in table[field]
    ]


def refusal(field, value) -> str:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    return str(caught.value)


@pytest.mark.parametrize("field, value", cases(REFUSED))
def test_refused_values_are_named_with_their_field_and_what_is_possible(field, value):
    message = refusal(field, value)
    shown = list(value) if field in ("stop_token_ids", "bad_token_ids") else value
    if field == "stop":
        shown = [value] if isinstance(value, str) else list(value)
    assert message.startswith(f"{field}={shown!r}: ") and message.rstrip().endswith("possible")


@pytest.mark.parametrize("field, value", cases(NOT_SEQUENCES))
def test_stops_that_are_no_sequences_are_refused(field, value):
    assert field in refusal(field, value)


@pytest.mark.parametrize("field, value", TOO_LARGE, ids=[field for field, _ in TOO_LARGE])
def test_whole_numbers_beyond_the_floats_are_refused(field, value):
    assert field in refusal(field, value)


@pytest.mark.parametrize(
    "field, values",
    {
        "max_tokens": [None, 1, 10**9],
        "top_k": [None, 0, 1, 200_000],
        "n": [1, 2, 64],
        "logprobs": [None, 0, 20],
        "seed": [None, 0, -1, 2**64, -(2**70)],
        "temperature": [None, 0, 0.0, -0.0, 1, 0.6, 1e-300, 1e300],
        "top_p": [None, 1, 1.0, 0.95, 1e-300],
        "min_p": [None, 0, 1, 0.05],
        "ignore_eos": [True, False],
        "min_tokens": [None, 0, 7],
        "repetition_penalty": [None, 1, 1.05, 0.5],
        "logits_processor": [None, print],
    }.items(),
)
def test_possible_values_stay_as_given(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) is value


@pytest.mark.parametrize("given, kept", [("END", ("END",)), (["a", "b"], ("a", "b")), ((), ()), (None, ())])
def test_stop_strings_become_a_tuple(given, kept):
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize("given, kept", [([2, 0], (2, 0)), ((7,), (7,)), ([], ()), (None, ())])
def test_stop_token_ids_become_a_tuple(given, kept):
    assert SamplingParams(stop_token_ids=given).stop_token_ids == kept


def test_params_are_values():
    one, other = SamplingParams(stop=["a"], stop_token_ids=[1]), SamplingParams(stop="a", stop_token_ids=(1,))
    assert one == other and hash(one) == hash(other)
    with pytest.raises(FrozenInstanceError):
        one.n = 2


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)


# Defaults.


def test_open_fields_are_neutral_without_defaults():
    settled = SamplingParams().with_defaults({})
    assert (settled.repetition_penalty, settled.min_tokens) == (1.0, 0)
    assert (settled.temperature, settled.top_p, settled.top_k, settled.min_p) == (0.0, 1.0, 0, 0.0)


def test_defaults_fill_what_is_open_and_nothing_else():
    defaults = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "eos_token_ids": (1,),
        "max_tokens": 5,
        "n": 9,
    }
    given = SamplingParams(temperature=0, top_k=0, seed=3, n=2, stop="x", ignore_eos=True, logprobs=1)
    settled = given.with_defaults(defaults)
    assert (settled.temperature, settled.top_k) == (0, 0)  # given, though falsy
    assert (settled.top_p, settled.min_p) == (0.95, 0.0)
    assert (settled.seed, settled.n, settled.stop, settled.ignore_eos) == (3, 2, ("x",), True)
    assert settled.max_tokens is None and settled.logprobs == 1
    assert settled.with_defaults({"top_p": 0.5}) == settled and given.top_p is None


def test_a_bias_is_kept_as_a_copy_and_leaves_parameters_hashable():
    bias = {3: -1.5, 0: 2}
    params = SamplingParams(logit_bias=bias, bad_token_ids=[7])
    bias[4] = 1.0
    assert params.logit_bias == {3: -1.5, 0: 2} and params.bad_token_ids == (7,)
    assert hash(params) == hash(SamplingParams(bad_token_ids=(7,))) and params != SamplingParams()


def test_defaults_of_a_penalty_and_a_minimum_are_the_checkpoints():
    settled = SamplingParams(min_tokens=0).with_defaults({"repetition_penalty": 1.05, "min_tokens": 9})
    assert (settled.repetition_penalty, settled.min_tokens) == (1.05, 0)


def test_a_bad_default_is_named_too():
    with pytest.raises(ValueError, match="top_p=1.5"):
        SamplingParams().with_defaults({"top_p": 1.5})


# A request's tokens and lengths.


def request(prompt=4, max_tokens=5, protected=None, **options) -> Request:
    """A request with the prompt 100, 101, …; options of SamplingParams and of Request mixed."""
    known = {f.name for f in fields(SamplingParams)}
    params = SamplingParams(**{k: v for k, v in options.items() if k in known and k != "seed"})
    own = {k: v for k, v in options.items() if k not in known or k == "seed"}
    protected = prompt if protected is None else protected
    return Request(0, list(range(100, 100 + prompt)), params, max_tokens, protected, **own)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 8), st.integers(0, 8), st.data())
def test_tokens_are_slices_of_prompt_and_output_joined(prompt, output, data):
    r = request(prompt, output_token_ids=list(range(200, 200 + output)))
    joined = r.prompt_token_ids + r.output_token_ids
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    assert r.num_tokens == len(joined)
    assert r.tokens(start, stop) == joined[start:stop]
    assert r.prompt_token_ids == list(range(100, 100 + prompt))  # a slice is a copy


@pytest.mark.parametrize(
    "prompt, output, computed, decodes",
    [
        (4, 0, 0, False),  # nothing read yet
        (4, 0, 3, False),  # the last prompt token is prefill, though it is one
        (4, 0, 4, False),  # all read, nothing sampled: not between two steps
        (4, 1, 4, True),
        (4, 3, 6, True),
        (4, 3, 0, False),  # preempted
        (4, 3, 4, False),  # recomputing output: several tokens are missing
        (1, 1, 1, True),
        (1, 0, 0, False),
    ],
)
def test_decodes(prompt, output, computed, decodes):
    r = request(prompt, output_token_ids=[7] * output, num_computed=computed)
    assert r.decodes is decodes


def test_evictable_counts_from_the_protected_tokens():
    assert request(4, cached_length=0).evictable == -4
    assert request(4, cached_length=9).evictable == 5
    assert request(4, protected=0, cached_length=3).evictable == 3


def test_requests_are_equal_only_to_themselves_and_share_no_lists():
    one, other = request(), request()
    assert one != other and one in [one] and one not in [other] and len({one, other}) == 2
    for name in ("output_token_ids", "logprobs", "trace", "pages"):
        assert getattr(one, name) == [] and getattr(one, name) is not getattr(other, name)


# How it ends.


@pytest.mark.parametrize(
    "token, options, reason",
    [
        (5, {}, None),
        (5, {"eos_token_ids": frozenset({5, 6})}, "stop"),
        (6, {"eos_token_ids": frozenset({5, 6})}, "stop"),
        (7, {"eos_token_ids": frozenset({5, 6})}, None),
        (5, {"eos_token_ids": frozenset({5}), "ignore_eos": True}, None),
        (5, {"stop_token_ids": [5]}, "stop"),
        (0, {"stop_token_ids": [0]}, "stop"),
        (5, {"stop_token_ids": [4, 6]}, None),
        (5, {"stop_token_ids": [5], "ignore_eos": True}, "stop"),  # asked for by the user, not the EOS
        (5, {"stop_token_ids": [5], "eos_token_ids": frozenset({5}), "ignore_eos": True}, "stop"),
        (5, {"max_tokens": 1}, "length"),
        (5, {"max_tokens": 1, "stop_token_ids": [5]}, "stop"),  # the ending token at the limit: it stopped
        (5, {"max_tokens": 1, "eos_token_ids": frozenset({5}), "ignore_eos": True}, "length"),
        (5, {"forced": [5, 1], "eos_token_ids": frozenset({5}), "stop_token_ids": [5]}, None),
        (5, {"forced": [5], "max_tokens": 1, "eos_token_ids": frozenset({5})}, "length"),
    ],
)
def test_append(token, options, reason):
    r = request(max_tokens=options.pop("max_tokens", 2), **options)
    r.append(token)
    assert r.output_token_ids == [token]  # the ending token is kept
    assert r.finish_reason == reason and r.error is None


def test_append_ends_at_exactly_max_tokens():
    r = request(max_tokens=3)
    reasons = []
    for token in (5, 6, 7):
        r.append(token)
        reasons.append(r.finish_reason)
    assert reasons == [None, None, "length"]


# Seeded numbers.

seeds = st.integers(-(2**70), 2**70)


@settings(deadline=None, max_examples=100)
@given(seeds, st.integers(0, 5), st.integers(0, 10**6), st.sampled_from(["reservoir", "random eviction"]))
def test_chance_is_a_pure_function_of_seed_completion_purpose_and_position(
    seed, completion, position, purpose
):
    one = request(prompt=1, seed=seed, completion=completion)
    other = request(prompt=1, seed=seed, completion=completion, num_computed=9, cached_length=3, row=4)
    number = one.chance(purpose, position)
    assert 0 <= number < 1
    one.chance(purpose, position + 1)  # leaves nothing behind
    assert number == other.chance(purpose, position) == one.chance(purpose, position)


def test_chance_differs_wherever_it_should():
    drawn = [
        request(prompt=1, seed=seed, completion=completion).chance(purpose, position)
        for seed in (0, 1, -1, 11)
        for completion in (0, 1, 11)
        for purpose in ("reservoir", "random eviction")
        for position in (1, 2, 11, 111)
    ]
    assert len(set(drawn)) == len(drawn)


def test_chance_is_equal_on_every_platform_and_in_every_process():
    assert request(prompt=1, seed=7, completion=2).chance("reservoir", 1234) == CHANCE


def test_chance_is_uniform_enough_for_a_reservoir():
    r = request(prompt=1, seed=1)
    drawn = sorted(r.chance("reservoir", position) for position in range(1, 2001))
    assert max(abs(x - (i + 0.5) / 2000) for i, x in enumerate(drawn)) < 0.04  # Kolmogorov-Smirnov, p < 0.003


@pytest.mark.parametrize("purpose", ["reservoir", "random eviction"])
def test_completions_of_one_prompt_draw_the_same_inside_the_prompt(purpose):
    # A completion that waited for another's prefill takes over its buffer row and its cache; one that was
    # admitted later (fewer seats) prefills for itself. What it keeps must not depend on that.
    leader, late = request(prompt=40, seed=7, completion=0), request(prompt=40, seed=7, completion=1)
    assert all(leader.chance(purpose, p) == late.chance(purpose, p) for p in range(40))
    assert leader.chance(purpose, 40) != late.chance(purpose, 40)
