"""bench.py soak: it passes on the engine as it is, and fails for each kind of loss that it looks for."""

import json
import random
import re

import pytest

import bench
from nanobeacon import answers
from nanobeacon.engine import Engine
from nanobeacon.measure import soak
from nanobeacon.pages import PagePool
from nanobeacon.policies import POLICIES
from nanobeacon.request import Request
from nanobeacon.scheduler import Scheduler


def soaked(capsys, *options) -> tuple[int, str, dict]:
    """Exit status, table and the last line's object of a soak."""
    status = bench.main(["soak", "--threads", "1", *options])
    *table, last = capsys.readouterr().out.splitlines()
    return status, "\n".join(table), json.loads(last)


def test_a_short_soak_of_every_policy_loses_nothing(capsys, monkeypatch):
    monkeypatch.setattr(soak, "WAVE", 5)
    status, table, result = soaked(capsys, "--requests", "80")
    assert status == 0 and result["wrong"] is None and "nothing lost" in table
    assert {row["policy"] for row in result["llms"]} == POLICIES.keys()
    assert sum(row["requests"] for row in result["llms"]) == result["requests"] >= 80
    for kind in ("length", "abort", "evictions", "prefix_tokens", "compared"):
        assert sum(row[kind] for row in result["llms"]) > 0, kind


@pytest.mark.slow
def test_what_fits_into_two_minutes_loses_nothing_and_grows_by_nothing(capsys):
    status, _, result = soaked(capsys, "--requests", "4000", "--seed", "1")
    assert status == 0 and result["requests"] >= 4000
    assert result["growth"]["bytes"] and result["growth"]["objects"]
    for kind in ("stop", "length", "abort", "error", "evictions", "preemptions", "prefix_tokens", "compared"):
        assert sum(row[kind] for row in result["llms"]) > 0, kind


# ------------------------------------------------------------------------------------ that it can also fail


def lose_a_page(patch):
    release = PagePool.release
    patch.setattr(PagePool, "release", lambda pool, pages: release(pool, list(pages)[1:]))


def lose_a_row(patch):
    release = Scheduler._release

    def without_row(scheduler, request):
        release(scheduler, request)
        scheduler.free_rows.pop()

    patch.setattr(Scheduler, "_release", without_row)


def lose_a_request(patch):
    add = Scheduler.add
    patch.setattr(
        Scheduler, "add", lambda s, request: request.completion or request.arrival % 3 or add(s, request)
    )


def end_too_early(patch):
    append = Request.append

    def ends(request, token_id):
        append(request, token_id)
        if len(request.output_token_ids) == 3:
            request.finish_reason = "length"

    patch.setattr(Request, "append", ends)


def mix_up_rows(patch):
    first_look = answers.first_look
    patch.setattr(answers, "first_look", lambda *how: first_look(*how).roll(1))


def stay_in_memory(patch):
    hoard = []
    close = Engine._close

    def keeps(self, request):
        hoard.append(bytes(200_000))
        hoard.extend(object() for _ in range(100))
        close(self, request)

    patch.setattr(Engine, "_close", keeps)


FAULTS = {
    lose_a_page: r"page \d+ counts 1 owners and has 0",
    lose_a_row: "row",
    lose_a_request: "ended by None",
    end_too_early: "ended by 'length'",
    mix_up_rows: "alone",
    stay_in_memory: "memory grows by .* (bytes|objects) a request",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_soak_notices(fault, capsys, monkeypatch):
    monkeypatch.setattr(soak, "POLICIES", {"beacon": POLICIES["beacon"]})
    monkeypatch.setattr(soak, "WAVE", 1 if fault is stay_in_memory else 6)
    monkeypatch.setattr(soak, "COMPARED", 0 if fault is stay_in_memory else 1)
    monkeypatch.setattr(soak, "LONGEST_OUTPUT", 4 if fault is stay_in_memory else 48)
    fault(monkeypatch)
    status = bench.main(["soak", "--threads", "1", "--requests", "80"])
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert status == 1
    assert re.search(FAULTS[fault], result["wrong"]), result["wrong"]
    assert result["wrong"] in err and "Traceback" not in err


def test_what_is_impossible_is_refused(capsys):
    for option in ("--minutes", "--requests"):
        assert bench.main(["soak", option, "0"]) == 2
        assert f"{option} 0" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ growth of memory


def samples(per_request: float, noise: float, count: int = 100) -> list[dict[str, float]]:
    draw = random.Random(0)
    return [
        {"requests": 50 * i, "bytes": 1e8 + per_request * 50 * i + draw.gauss(0, noise)} for i in range(count)
    ]


@pytest.mark.parametrize("per_request", [0, 1000])
def test_growth_is_found_within_its_interval(per_request):
    found = soak.growth_of(samples(per_request, noise=20_000), "bytes")
    assert found["low"] < per_request < found["high"]
    assert found["high"] - found["low"] < 100
    grows = soak._leak({"bytes": found})
    assert (grows is None) == (per_request == 0)


def test_warming_up_is_no_growth_and_few_samples_say_nothing():
    flat = samples(0, noise=1)
    for sample in flat[:40]:
        sample["bytes"] /= 2
    assert abs(soak.growth_of(flat, "bytes")["slope"]) < 1
    assert soak.growth_of(flat[:35], "bytes") is None
