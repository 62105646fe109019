"""How many launches a pass makes, counted on "meta": what the GPU's step promises, held without a GPU."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from nanobeacon.measure.kernels import SHAPES  # noqa: E402
from nanobeacon.measure.launches import Counted, count, counted, expected, passes  # noqa: E402
from nanobeacon.staging import send  # noqa: E402

FAMILIES = ("qwen3", "qwen2", "llama")


@pytest.fixture(scope="module")
def rows() -> dict[tuple, dict]:
    return {(row["pass"].split()[0], row["requests"], row["budget"]): row for row in passes()}


def test_a_layer_of_a_decode_step_is_ten_launches(rows):
    for (name, _, _), row in rows.items():
        assert name != "decode" or row["a_layer"] <= 10, row
    assert rows["decode", 14, 2048]["a_layer"] == 10  # with the join, which large batches do without


def test_a_decode_step_of_qwen3_4b_is_400_launches_with_head_and_argmax(rows):
    for (name, _, _), row in rows.items():
        assert name != "decode" or 36 * 9 < row["launches"] <= 400, row


def test_a_step_s_numbers_are_one_copy_whatever_the_pass(rows):
    assert [row["copies"] for row in rows.values()] == [1] * len(rows)


@pytest.mark.parametrize("policy", ["beacon", "recent", "initial", "random-query"])
def test_a_decode_step_that_has_grown_by_pages_is_one_copy_too(policy):
    def grown(subject: Counted) -> None:
        for request in subject.requests[::2]:
            request.pages_sent = len(request.pages) - 1
        subject.step()

    found = counted(SHAPES["qwen3-4b"], "qwen3", 14, 2048, grown, policy)
    assert found.copies == 1 and found.made["index_put_"] >= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_biases_of_a_family_cost_no_launch(family):
    assert counted(SHAPES["qwen3-4b"], family, 14, 2048, Counted.step).total <= 400


def test_a_prefill_step_without_a_budget_has_the_same_kernels(rows):
    assert rows["prefill", 16, None]["a_layer"] <= 10


@pytest.mark.parametrize("policy", ["beacon", "recent", "initial", "random-query"])
def test_a_budget_costs_a_prefill_step_three_launches_a_layer_at_most(policy):
    """However many chunks the step has: their reduction is one launch, copies into a ring are two."""
    layers = SHAPES["qwen3-4b"].layers

    def prefilled(budget, requests):
        step = partial(Counted.prefill, tokens=32)
        return counted(SHAPES["qwen3-4b"], "qwen3", requests, budget, step, policy).total

    without = prefilled(None, 16)
    assert prefilled(2048, 16) - without <= 3 * layers + 10
    assert prefilled(2048, 16) == prefilled(2048, 3)


def test_an_eviction_neither_waits_nor_grows_with_the_layers(rows):
    """On "meta" a read of the device is an error, so that it ran at all says that it does not wait."""
    row = rows["eviction", 14, 2048]
    assert row["a_layer"] == 0 and row["launches"] <= 30


@pytest.mark.parametrize("policy", ["beacon", "beacon-mean", "recent", "initial", "rpc", "snapkv", "rkv"])
def test_the_integers_of_an_eviction_are_one_copy(policy):
    found = counted(SHAPES["qwen3-4b"], "qwen3", 14, 2048, Counted.evict, policy)
    assert found.copies == 1 and found.total <= (40 if policy == "rkv" else 30)


def test_numbers_sent_together_arrive_apart_and_aligned():
    parts = [[1, 2, 3, 4, 5], [], [-1], list(range(8))]
    columns = {str(i): part for i, part in enumerate(parts)}
    there = list(send(columns, torch.device("cpu"), int32=columns).values())
    assert [part.tolist() for part in there] == parts
    assert {(part.data_ptr() - there[0].data_ptr()) % 16 for part in there} == {0}
    assert {part.dtype for part in there} == {torch.int32}


def test_what_is_counted():
    x = torch.ones(4, 4, device="meta", dtype=torch.bfloat16)

    def call() -> None:
        x.view(16)[2:].unsqueeze(0)  # views
        torch.empty_like(x)  # an allocation
        x.float()  # a cast
        x.mul_(2)
        torch.tensor([1, 2], device="meta")  # a copy
        torch.tensor([1, 2]).to("meta")  # and another

    found = count(call)
    assert found.made == {"_to_copy": 1, "mul_": 1} and found.copies == 2
    with pytest.raises(Exception, match="meta"):
        count(x.sum().item)


def test_launches_take_their_share_of_the_papers_rows():
    for row in expected():
        assert 0.3 < row["of_floor"] < 1 and row["expected_tokens_per_s"] < row["floor_tokens_per_s"]
