"""Policies and their settings: the paper's tables, the rule for a budget, every impossible combination.

No tensors; what a policy then keeps is tested where caches are.
"""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanobeacon.policies import POLICIES, EvictionSettings, Policy, Stage, settle

EVICTING = [name for name in POLICIES if name != "full"]
ASKING = [name for name in EVICTING if POLICIES[name].ranking == "queries"]
OTHER = {"window": 40, "beacons": 7, "recents": 9}  # none of them a default or a policy's own number


def refusal(**options) -> str:
    with pytest.raises(ValueError) as caught:
        settle(**options)
    return str(caught.value)


# Section 3's table.


@pytest.mark.parametrize(
    "budget, kept, period, reductions",
    [(256, 224, 32, 3), (512, 448, 64, 5), (1024, 896, 128, 9), (2048, 1792, 256, 17)],
)
def test_the_table_of_budgets(budget, kept, period, reductions):
    s = settle("beacon", budget)
    assert (s.kept, s.period, s.budget) == (kept, period, budget)
    assert (s.capacity, s.recents, s.freeze, s.window) == (32, 16, budget - 16, 32)
    # One cycle as counts: a query a step from B_min on; the buffer is reduced when it is full, at the freeze
    # and after the eviction. Those that change nothing count.
    held, runs = s.policy.beacons, 0
    for evictable in range(s.kept + 1, s.budget + 1):
        held += 1
        if held == s.capacity and evictable <= s.freeze:
            held, runs = s.policy.beacons, runs + 1
        if evictable == s.freeze:
            held, runs = s.policy.beacons, runs + 1
        assert held <= s.capacity
    assert held == s.policy.beacons + s.recents and runs + 1 == reductions


@pytest.mark.parametrize(
    "budget, kept, period, recents, freeze",
    [(64, 56, 8, 8, 56), (128, 112, 16, 16, 112), (135, 119, 16, 16, 119), (37, 33, 4, 4, 33)],
)
def test_small_budgets_have_only_the_recents_of_a_period(budget, kept, period, recents, freeze):
    s = settle("beacon", budget)
    assert (s.kept, s.period, s.recents, s.freeze) == (kept, period, recents, freeze)
    # The others keep their rows across evictions, so a short period takes none away.
    assert settle("recent", budget).recents == 32 and settle("initial", budget).recents == 16


@pytest.mark.parametrize("budget", [2, 3, 7, 8, 9, 15, 16])
def test_the_smallest_budgets_still_make_room_for_one_token(budget):
    s = settle("streaming", budget)
    assert s.period == max(1, budget // 8) and s.kept == budget - s.period >= 1


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(ASKING), st.integers(34, 5000), st.integers(0, 40), st.integers(0, 40))
def test_numbers_of_any_settings_belong_together(name, budget, beacons, recents):
    try:
        s = settle(name, budget, window=0, beacons=beacons, recents=recents)
    except ValueError as error:
        assert any(f"{n}=" in str(error) for n in ("beacons", "recents", "budget"))
        return
    policy = s.policy
    assert 1 <= s.period and s.kept + s.period == budget and s.kept > s.window
    assert s.kept <= s.freeze <= budget or not s.reduces
    assert s.recents <= policy.recents and s.capacity >= policy.beacons + s.recents
    assert s.capacity > policy.beacons, "a full buffer would be reduced to itself, for ever"
    if s.reduces:
        assert s.recents <= s.period and policy.beacons > 0


# Section 5's table: queries (kind, beacons, recents), softmax, group, pool, smoothing, window, capacity.

TABLE = {
    "beacon": ("fps", 16, 16, "all", "max", "max", None, 32, 32),
    "beacon-mean": ("fps", 16, 16, "all", "max", "mean", None, 32, 32),
    "recent": ("none", 0, 32, "all", "max", "max", None, 32, 32),
    "initial": ("first", 16, 16, "all", "max", "max", None, 32, 32),
    "random-query": ("reservoir", 16, 16, "all", "max", "max", None, 32, 32),
    "rpc": ("none", 0, 32, "evictable", "layer", "sum", "avg", 32, 32),
    "snapkv": ("none", 0, 8, "before-recents", "logits", "mean", "max", 32, 8),
    "rkv": ("none", 0, 8, "before-recents", "logits", "mean", "max", 8, 8),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_policies(name):
    s = settle(name, 1024)
    p = s.policy
    numbers = (p.select, p.beacons, p.recents, p.domain, p.group, p.pool, p.smoothing, s.window, s.capacity)
    assert numbers == TABLE[name] and p.ranking == "queries" and s.reduces == (p.select == "fps")
    assert p.attention_share == (0.1 if name == "rkv" else None)


@pytest.mark.parametrize("name, ranking, window", [("streaming", "newest", 0), ("random", "random", 32)])
def test_policies_that_ask_nobody_have_no_buffer(name, ranking, window):
    s = settle(name, 1024)
    assert (s.policy.ranking, s.window, s.capacity, s.reduces) == (ranking, window, 0, False)


def test_half_by_beacons_half_by_the_neighbourhood():
    s = settle("beacon-half", 1024)
    beacons, rest = s.policy.scores
    assert (s.policy.select, s.policy.beacons, s.policy.recents, s.window) == ("fps", 24, 8, 32)
    assert s.reduces and s.capacity == 32 + 32
    assert beacons == Stage(slots=0.5, domain="all", group="max", pool="max")
    assert rest.latest == 32 and rest.slots is None
    assert (rest.domain, rest.group, rest.pool, rest.smoothing) == ("evictable", "mean", "sum", "avg")
    assert beacons.slots_of(free=864, left=864) == rest.slots_of(free=864, left=432) == 432


def test_the_papers_policies_are_there_and_all_are_named():
    assert {*TABLE, "beacon-half", "streaming", "random", "full"} == set(POLICIES)
    assert all(policy.name == name for name, policy in POLICIES.items())


# The rule for a budget.


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(EVICTING), st.integers(1, 500), st.integers(0, 200), st.integers(0, 40))
def test_a_budget_is_refused_exactly_where_nothing_could_be_chosen(name, budget, window, recents):
    policy, options = POLICIES[name], {}
    if policy.ranking != "newest":
        options["window"] = window
    if policy.recents and recents:
        options["recents"] = recents
    always = options.get("window", policy.window)
    if policy.domain == "before-recents":  # without a score they stay too
        always = max(always, options.get("recents", policy.recents))
    kept = budget - max(1, budget // 8)
    if kept > always:
        s = settle(name, budget, **options)
        assert (s.kept, s.window) == (kept, always)
        return
    message = refusal(policy=name, budget=budget, **options)
    assert f"budget={budget}:" in message and f"leaves {kept} tokens" in message
    smallest = int(message.rsplit(" ", 1)[1])
    assert smallest > budget and settle(name, smallest, **options).kept > always
    assert "smallest" in refusal(policy=name, budget=smallest - 1, **options)


@pytest.mark.parametrize(
    "name, smallest",
    [
        ("beacon", 37),
        ("recent", 37),
        ("rpc", 37),
        ("snapkv", 37),
        ("rkv", 10),
        ("random", 37),
        ("streaming", 2),
    ],
)
def test_the_smallest_budget_of_each_policy(name, smallest):
    assert settle(name, smallest).budget == smallest
    assert refusal(policy=name, budget=smallest - 1).endswith(f"possible is {smallest}")


def test_smaller_windows_make_smaller_budgets_possible():
    assert settle("beacon", 2, window=0).kept == 1
    assert settle("beacon", 18, window=15).kept == 16


# Everything that cannot be, and how it is said.

IMPOSSIBLE = [
    ({"policy": "beacons"}, ["policy='beacons'", *POLICIES]),
    ({"policy": ""}, ["policy=''", "beacon"]),
    ({"policy": "Beacon", "budget": 256}, ["policy='Beacon'"]),
    *[
        ({"budget": b}, [f"budget={b!r}", "whole number of at least 1"])
        for b in (0, -1, 1.5, 256.0, True, "256")
    ],
    *[({"budget": b}, [f"budget={b}", "smallest budget possible is 37"]) for b in (1, 8, 32, 36)],
    *[
        ({"budget": 256, name: value}, [f"{name}={value!r}", "whole number of at least 0"])
        for name in OTHER
        for value in (-1, 1.0, "16", True)
    ],
    *[
        ({"budget": 256, "protect": value}, [f"protect={value!r}", "'prompt'", "at least 0"])
        for value in (-1, 4.0, "all", "4", True, None)
    ],
    ({"budget": 256, "beacons": 0, "recents": 0}, ["beacons=0", "recents=0", "at least one query"]),
    ({"policy": "recent", "budget": 256, "recents": 0}, ["recents=0", "at least one query"]),
    ({"policy": "rpc", "budget": 256, "recents": 0}, ["recents=0", "at least one query"]),
    ({"budget": 256, "window": 224}, ["budget=256", "224", "smallest budget possible is 257"]),
    ({"policy": "snapkv", "budget": 64, "recents": 56}, ["budget=64", "newest 56", "possible is 65"]),
    ({"policy": "full", "budget": 2048}, ["budget=2048", "'full'", "leave the budget out"]),
    # Without a budget nothing of all this acts, and that is said rather than ignored.
    *[({"policy": name}, ["budget=None", repr(name)]) for name in EVICTING if name != "beacon"],
    *[({name: value}, ["budget=None"]) for name, value in OTHER.items()],
    ({"protect": 4}, ["budget=None"]),
    ({"protect": 0}, ["budget=None"]),
    # A number that the policy does not have.
    ({"policy": "streaming", "budget": 256, "window": 40}, ["window=40", "'streaming'", "leave it out"]),
    *[
        ({"policy": name, "budget": 256, "beacons": 7}, ["beacons=7", repr(name), "leave it out"])
        for name in EVICTING
        if not POLICIES[name].beacons
    ],
    *[
        ({"policy": name, "budget": 256, "recents": 9}, ["recents=9", repr(name), "leave it out"])
        for name in ("streaming", "random")
    ],
]


@pytest.mark.parametrize("options, words", IMPOSSIBLE, ids=[str(options) for options, _ in IMPOSSIBLE])
def test_impossible_options_are_named(options, words):
    message = refusal(**options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name, value", [*OTHER.items(), ("protect", 4)])
def test_a_full_cache_ignores_no_number_silently(name, value):
    assert f"{name}={value}" in refusal(policy="full", **{name: value})


@pytest.mark.parametrize("policy", [None, 5, b"beacon", ["beacon"]])
def test_a_policy_that_is_none_is_refused(policy):
    assert "policy=" in refusal(policy=policy, budget=256)


@pytest.mark.parametrize("name", ["ranking", "select", "domain", "group", "pool", "smoothing"])
def test_an_unknown_word_in_a_policy_is_named(name):
    with pytest.raises(ValueError, match=f"{name}='typo'"):
        replace(Policy("mine"), **{name: "typo"})


@pytest.mark.parametrize(
    "name, value",
    [("beacons", -1), ("recents", 2.5), ("window", -3), ("buffer", 5)]
    + [("attention_share", 2), ("attention_share", float("nan")), ("attention_share", -1)],
)
def test_an_impossible_number_in_a_policy_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        replace(Policy("mine", "queries"), **{name: value})


def test_beacons_that_nobody_finds_are_refused():
    with pytest.raises(ValueError, match="beacons=16"):
        Policy("mine", select="none")


def test_a_policy_of_ones_own_needs_a_budget_whatever_its_name():
    with pytest.raises(ValueError, match="acts only under a budget"):
        settle(Policy("beacon", pool="mean"))


# What is possible arrives.


def test_without_a_budget_there_are_no_settings():
    assert settle() is settle("beacon", None) is settle("full") is None
    assert settle("beacon", None, window=None, beacons=None, recents=None, protect="prompt") is None


# Among them the numbers that are some other policy's own: a number that is given always wins.
@pytest.mark.parametrize("name", ["recent", "rpc", "snapkv", "rkv", "beacon", "initial"])
@pytest.mark.parametrize("recents", [8, 16, 32])
def test_any_number_of_recents_overrides_the_policys_own(name, recents):
    assert settle(name, 1024, recents=recents).policy == replace(POLICIES[name], recents=recents)
    assert settle(name, 1024, recents=None).policy == POLICIES[name]


def test_a_window_that_is_beacons_own_overrides_another_policys():
    assert settle("rkv", 1024, window=32).window == 32 and settle("rkv", 1024).window == 8
    mine = Policy("mine", window=8, beacons=4, recents=2)
    s = settle(mine, 1024, window=32, beacons=16, recents=16)
    assert (s.window, s.policy.beacons, s.recents) == (32, 16, 16)


@pytest.mark.parametrize("name, value", [("window", 32), ("beacons", 16), ("recents", 16)])
def test_a_given_number_acts_or_is_refused_even_if_it_is_beacons_own(name, value):
    assert f"{name}={value}: acts only under a budget" in refusal(**{name: value})
    assert f"{name}={value}: policy 'streaming'" in refusal(policy="streaming", budget=64, **{name: value})


def test_a_policys_own_number_may_be_said():
    assert settle("recent", 256, beacons=0) == settle("recent", 256)
    assert settle("streaming", 256, window=0, recents=0) == settle("streaming", 256)


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("option", OTHER)
def test_a_number_is_taken_or_refused_but_never_ignored(name, option):
    value = OTHER[option]
    try:
        s = settle(name, 1024, **{option: value})
    except ValueError as error:
        assert f"{option}={value}: policy {name!r} has no {option}" in str(error)
        assert not getattr(POLICIES[name], option) or POLICIES[name].ranking != "queries"
        return
    assert s.policy == replace(POLICIES[name], **{option: value})
    arrived = {"window": s.window, "beacons": s.policy.beacons, "recents": s.recents}
    assert arrived[option] == value
    if option != "window" and POLICIES[name].buffer is None:
        assert s.capacity == s.policy.beacons + s.policy.recents + s.policy.latest


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize(
    "protect, prompt, protected", [("prompt", 100, 100), (4, 100, 4), (0, 9, 0), (50, 9, 50)]
)
def test_protect(name, protect, prompt, protected):
    assert settle(name, 1024, protect=protect).protected(prompt) == protected


@pytest.mark.parametrize("name", ["beacon", "beacon-mean", "initial", "random-query"])
def test_without_beacons_the_recents_alone_are_asked_and_stay_across_evictions(name):
    s = settle(name, 64, beacons=0)
    assert (s.policy.select, s.reduces, s.recents, s.capacity) == ("none", False, 16, 16)


def test_without_recents_the_buffer_still_has_room_for_one_query():
    s = settle("beacon", 256, recents=0)
    assert (s.recents, s.freeze, s.capacity) == (0, 256, 17)


def test_settings_are_values_and_leave_the_table_alone():
    before = dict(POLICIES)
    one, other = settle("beacon", 256, window=8), settle(POLICIES["beacon"], 256, window=8)
    assert one == other and hash(one) == hash(other) and one != settle("beacon", 256)
    with pytest.raises(FrozenInstanceError):
        one.budget = 1
    assert before == POLICIES


def test_a_policy_of_ones_own_is_a_few_words():
    mine = Policy("mine", select="first", pool="mean", window=8)
    s = settle(mine, 64)
    assert s == EvictionSettings(mine, 64) and s.window == 8 and s.capacity == 32
    assert settle(mine, 64, beacons=4).policy == replace(mine, beacons=4)
    assert "'mine'" in refusal(policy=mine)
    # Every field has a default but the name, so that a row says only what differs from beacon's.
    assert Policy("beacon") == POLICIES["beacon"]


@pytest.mark.parametrize("ranking", ["random", "newest"])
def test_a_policy_of_ones_own_that_asks_nobody_reduces_nothing(ranking):
    s = settle(Policy("mine", ranking=ranking, beacons=0, recents=0), 256)
    assert s.capacity == 0 and not s.reduces
    s = settle(Policy("mine", ranking=ranking), 256)
    assert s.capacity == 0 and not s.reduces
