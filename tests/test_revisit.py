"""bench.py revisit: the exact pass against transformers, the findings against plain loops, the report."""

import html
import json
import re

import pytest
import torch
from browser import CHROMIUM, MISSING, work
from tiny import prompt_of, text_folder, tiny_folder, tiny_model

import bench
from nanobeacon import LLM
from nanobeacon.measure import exact, revisit, revisit_page

PROMPT, OUTPUT, TOP, DISTANCE = 20, 90, 6, 15.0


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def seen(request, tmp_path_factory):
    """(attention weights [L, H, T, T], queries [L, T, H, D], transformers' weights) of one text."""
    llm = LLM(
        str(tiny_folder(tmp_path_factory.mktemp("model"), request.param)), device="cpu", dtype="float32"
    )
    ids = prompt_of(PROMPT + OUTPUT)
    weights: list[list] = [[], []]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "CHUNK_ELEMENTS", 4 * len(ids) * 17)  # 17 queries at a time
        passes = exact.layers(llm, ids, PROMPT, lambda layer, first, w: weights[layer].append(w.clone()))
        queries = list(passes)
    assert len(weights[0]) == -(-len(ids) // 17)
    ours = torch.stack([torch.cat(chunks, dim=1) for chunks in weights])
    model = tiny_model(request.param, attn_implementation="eager")
    with torch.no_grad():
        theirs = torch.cat(model(torch.tensor([ids]), output_attentions=True).attentions)
    return ours, torch.stack(queries), theirs


def test_attention_weights_are_those_of_transformers(seen):
    ours, queries, theirs = seen
    assert ours.shape == theirs.shape and queries.shape[:2] == (2, PROMPT + OUTPUT)
    assert (ours - theirs).abs().max() < 1e-5


def gathered(weights, queries):
    """Findings that were given the weights in chunks, as a pass gives them."""
    options = bench.parse("revisit", revisit, ["--interval", "40"])
    found = revisit.Findings(PROMPT, OUTPUT, TOP, DISTANCE, options)
    for layer in range(len(weights)):
        for first in range(0, PROMPT + OUTPUT, 17):
            found.see(layer, first, weights[layer][:, first : first + 17])
        found.take_queries(queries[layer])
    return found


def test_global_queries_are_those_that_a_plain_loop_finds(seen):
    _, queries, theirs = seen
    found = gathered(theirs, queries)
    means = torch.stack(found.means)
    assert means[..., :TOP].isnan().all() and not means[..., TOP:].isnan().any()
    histogram = {True: [0] * revisit.BINS, False: [0] * revisit.BINS}
    for layer in range(2):
        for head in range(4):
            for index in range(TOP, OUTPUT):
                row = theirs[layer, head, PROMPT + index, PROMPT : PROMPT + index + 1].tolist()
                best = sorted(range(index + 1), key=lambda i, row=row: -row[i])[:TOP]
                mean = sum(index - i for i in best) / TOP
                assert means[layer, head, index] == pytest.approx(mean)
                for i in best:
                    histogram[mean > DISTANCE][(index - i) // found.bin_width] += 1
    numbers = found.numbers(["x"] * (PROMPT + OUTPUT))
    assert numbers["judged"] == OUTPUT - TOP
    assert numbers["histogram"]["global"] == histogram[True]
    assert numbers["histogram"]["local"] == histogram[False]
    counts = (means > DISTANCE).sum(-1)
    assert numbers["global_counts"] == counts.tolist() and 0 < counts.sum() < 8 * (OUTPUT - TOP)
    for token in numbers["revisiting"]:
        assert token["heads"] == int((means[..., token["position"] - PROMPT] > DISTANCE).sum())


def test_sets_foresee_later_queries_as_plain_cosines_say(seen):
    _, queries, theirs = seen
    numbers = gathered(theirs, queries).numbers(["x"] * (PROMPT + OUTPUT))
    now = PROMPT + OUTPUT // 2
    curve = numbers["foreseen"]["choices"]["32 recents"]
    assert len(curve) == PROMPT + OUTPUT - now
    for step in (0, 11, len(curve) - 1):
        best = []
        for layer in queries:
            for head in range(4):
                later = layer[now + step, head]
                past = [torch.cosine_similarity(later, layer[i, head], dim=0) for i in range(now - 32, now)]
                best.append(max(past))
        assert curve[step] == pytest.approx(torch.stack(best).mean().item(), abs=1e-5)
    # Every set has 16 of the newest in common; a set is no better than everything before it
    for values in numbers["foreseen"]["choices"].values():
        assert all(-1 <= value <= 1.00001 for value in values)
    drawn = numbers["drawn"]
    assert len(drawn["points"]) == len(drawn["global"]) == 40 and len(set(drawn["picks"])) == 16


def test_the_report_holds_the_numbers_and_opens_without_an_error(tmp_path, capsys):
    folder = str(text_folder(tmp_path / "model", eos=False))
    prompt, report = tmp_path / "prompt.txt", tmp_path / "report.html"
    prompt.write_text("</pre><script>errors.push('markup')</script> & so on", encoding="utf-8")
    words = f"--tokens 120 --top 5 --distance 20 --temperature 1 --report {report} --threads 1".split()
    threads = torch.get_num_threads()
    status = bench.main(["revisit", "--model", folder, "--prompt-file", str(prompt), *words])
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert status == 0 and "global queries" in out and str(report) in out
    result = json.loads(out.splitlines()[-1])
    assert result["output_tokens"] == 120 and result["judged"] == 115
    page = report.read_text(encoding="utf-8")
    numbers = json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)[1]))
    assert numbers["global_counts"] == result["global_counts"]
    result["revisiting"][0] |= {"before": "<img src=x>", "token": "<script>errors.push('markup')</script>"}
    nasty = revisit_page.page("<b>model</b>", result, [[1.0, 0.5], [0.5, 1.0]])
    assert "<script" not in nasty and "<img" not in nasty and "<b>model" not in nasty
    if CHROMIUM is None:
        pytest.skip(MISSING)
    ready = page.replace('<html lang="en">', '<html lang="en" data-ready="yes">')  # nothing to wait for
    script = "found.figures = document.querySelectorAll('svg').length;"
    script += "found.wide = document.documentElement.scrollWidth - innerWidth;"
    found = work(ready, script, tmp_path, width=500)
    assert found["errors"] == [] and found["figures"] == 5 and found["wide"] <= 0


@pytest.mark.parametrize(
    "words, says",
    [
        ("--tokens 10", "tokens=10: at least 64 is possible"),
        ("--top 0", "top=0"),
        ("--distance 0", "distance=0"),
        ("--layer 1", "--layer and --head"),
        ("--layer 3 --head 0", "layer=3: possible are 0 to 2"),
        ("--prompt-file x", "--model and --prompt-file"),
        ("--report /no/such/x.html", "is no folder"),
    ],
)
def test_what_is_impossible_is_said_in_one_line(words, says, capsys):
    threads = torch.get_num_threads()
    assert bench.main(["revisit", *words.split()]) == 2
    torch.set_num_threads(threads)
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
