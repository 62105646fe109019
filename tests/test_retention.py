"""The retention page against the trace: its encoding in Python, and what a real browser makes of it."""

import json
from html import escape

import pytest
import torch
from browser import CHROMIUM, MISSING, work
from tiny import prompt_of, text_folder

import generate
from nanobeacon import LLM, SamplingParams
from nanobeacon.eviction import EvictionEvent
from nanobeacon.llm import output_of
from nanobeacon.measure import retention
from nanobeacon.reasoner import demo

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
NASTY = ["</script><img src=x onerror=\"errors.push('markup')\">", "<b>", "&amp;", "\u2028", '"']


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(llm, output) of a tiny model with several evictions."""
    folder = text_folder(tmp_path_factory.mktemp("model"), eos=False)
    llm = LLM(str(folder), device="cpu", dtype="float32", budget=48, window=8, trace=True, max_num_seqs=1)
    (output,) = llm.generate([prompt_of(21)], SamplingParams(max_tokens=120, temperature=1.0, seed=3))
    return llm, output


def held_sets(trace, stored, ran, pair, heads):
    """The positions that a pair holds after `ran` evictions, straight from the trace."""
    if ran == 0:
        return set(range(trace[0].position + 1 if trace else stored))
    kept = trace[ran - 1].kept[pair // heads, pair % heads].tolist()
    end = trace[ran - 1].position + 1
    return set(kept) | (set(range(end, stored)) if ran == len(trace) else set())


def test_survivals_say_who_holds_what_after_every_eviction(run):
    _, output = run
    total = len(output.prompt_token_ids) + len(output.token_ids)
    survived = retention.survivals(output.trace, total, 4)
    assert len(output.trace) > 5 and survived.shape == (total, 4)
    for ran in range(1, len(output.trace) + 1):
        end = output.trace[ran - 1].position + 1
        before = torch.tensor([sum(e.position < token for e in output.trace[:ran]) for token in range(end)])
        for pair in range(4):
            held = (survived[:end, pair] >= ran - before).nonzero().flatten().tolist()
            assert set(held) == held_sets(output.trace, end, ran, pair, heads=2)


def test_token_texts_joined_are_the_text(run):
    llm, _ = run
    text = "a line\n  çà 🙂 end"
    ids = llm.tokenizer.encode(text)
    texts = retention.token_texts(llm.tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == "<bos>" + text
    assert texts[-8:-4] == ["", "", "", "🙂"]  # one token a byte: the last has the character
    assert retention.token_texts(None, [5, 7]) == ["5 ", "7 "]


def test_what_a_model_wrote_cannot_become_markup(run):
    llm, output = run
    data = retention.record(llm, output, {"model": "</script>"})
    data["tokens"] = NASTY
    page = retention.page([data])
    assert page.count("</script>") == 2  # the data's own, and the program's
    start = page.index('id="records">') + len('id="records">')
    assert json.loads(page[start : page.index("</script>", start)])[0]["tokens"] == NASTY


@pytest.fixture(scope="module")
def long_run():
    """(trace, record) of 32K tokens, 36 layers, 8 KV heads, budget 2048.

    It is made up, and the hardest to compress: what an eviction keeps is drawn at random.
    """
    layers, heads, tokens, budget = 36, 8, 32768, 2048
    generator = torch.Generator().manual_seed(0)
    kept = torch.arange(budget).expand(layers, heads, -1)
    trace = []
    for position in range(budget - 1, tokens, budget // 8):
        if trace:
            new = torch.arange(trace[-1].position + 1, position + 1).expand(layers, heads, -1)
            kept = torch.cat((trace[-1].kept, new), dim=-1)
        dropped = torch.rand(kept.shape, generator=generator).topk(budget // 8).indices
        stays = torch.ones_like(kept, dtype=torch.bool).scatter_(-1, dropped, False)
        beacons = torch.randint(position + 1, (layers, 4 * heads, 16), generator=generator, dtype=torch.int32)
        kept = kept[stays].view(layers, heads, -1)
        trace.append(EvictionEvent(position, kept.int(), beacons))
    about = {"title": "made up", "settings": {}, "prompt": 200, "window": 32, "tokenBytes": 147456}
    shape = {"layers": layers, "kvHeads": heads, "heads": 4 * heads}
    text = {"tokens": [" token\n" if i % 40 == 39 else " token" for i in range(tokens)], "stored": tokens}
    encoded = retention.encode_trace(trace, tokens, layers * heads, beacons=16)
    return trace, about | shape | text | encoded


def test_a_long_run_of_a_large_model_stays_small(long_run):
    trace, record = long_run
    assert len(trace) == 121 and len(retention.page([record])) < 15e6


@needs_browser
def test_a_long_run_of_a_large_model_stays_usable(long_run, tmp_path):
    """All of it is there, the slider and the filters work, and what they show is the trace's."""
    trace, record = long_run
    script = """
    const at = (stop, layer, head) => {
      for (const [id, value] of Object.entries({ layer, head, stop })) byId(id).value = value;
      byId("stop").dispatchEvent(new Event("input"));
      return [...runs[0].held];
    };
    found.spans = document.querySelectorAll(".token").length;
    found.end = [...runs[0].held];
    found.middle = at(60, -1, -1);
    found.onePair = at(60, 7, 3);
    runs[0].spans[5].focus();
    found.cells = byId("map").querySelectorAll("rect").length;
    document.querySelector(".text").remove(); // or the whole text comes back with what was found
    """
    found = work(retention.page([record]), script, tmp_path)
    assert found["errors"] == [] and found["spans"] == 32768 and found["cells"] == 36 * 8
    for stop, shown in ((60, "middle"), (len(trace), "end")):
        kept = trace[stop - 1].kept.flatten().long()
        counts = torch.zeros(32768, dtype=torch.int64).scatter_add_(0, kept, torch.ones_like(kept))
        if shown == "end":
            counts[trace[-1].position + 1 : record["stored"]] = 36 * 8
        assert found[shown] == counts.tolist()
    held = [token for token, count in enumerate(found["onePair"]) if count]
    assert held == trace[59].kept[7, 3].tolist()


@needs_browser
@pytest.mark.parametrize("runs", [1, 2])
def test_nothing_runs_over_the_edge_of_a_small_screen(run, runs, tmp_path):
    """At 360 px, in a frame: a headless window is not that narrow."""
    llm, output = run
    data = retention.record(llm, output, {"model": "a name without any space " + "x" * 80})
    inner = escape(retention.page([data] * runs))
    page = '<!doctype html><html data-ready="yes"><head></head><body>'
    page += f'<iframe style="border: 0; width: 360px; height: 800px" srcdoc="{inner}"></iframe>'
    script = """
    const frame = document.querySelector("iframe");
    while (frame.contentDocument?.documentElement?.dataset.ready !== "yes") { // it may not be there yet
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    const small = frame.contentDocument;
    for (const details of small.querySelectorAll("details")) details.open = true;
    small.querySelector(".token").focus();
    found.width = small.documentElement.clientWidth;
    found.overflow = small.documentElement.scrollWidth - small.documentElement.clientWidth;
    found.beyond = [...small.body.querySelectorAll("*")]
      .filter((element) => element.getBoundingClientRect().right > 361 && !element.closest("svg"))
      .map((element) => element.className || element.id || element.tagName);
    """
    found = work(page, script, tmp_path)
    assert found["errors"] == []
    width = found.pop("width")
    assert 340 <= width <= 360 and found == {"overflow": 0, "beyond": [], "errors": []}


# What a user does: the slider, a filter, the keyboard; what the page then says of each token.
EXERCISE = """
    const heldNow = () => runs.map((run) => [...run.held]);
    const set = (id, value) => {
      byId(id).value = value;
      byId(id).dispatchEvent(new Event(id === "stop" ? "input" : "change"));
    };
    found.texts = runs.map((run) => run.tokens.length);
    found.moments = moments.length;
    found.end = heldNow();
    found.shades = runs[0].spans.map((span) => Number(span.style.getPropertyValue("--shade")));
    found.stops = [];
    for (let stop = 0; stop < moments.length; stop++) {
      set("stop", stop);
      found.stops.push({ held: runs[0].held.slice(), ran: runs[0].ran, written: runs[0].written });
      found.stops[stop].held = [...found.stops[stop].held];
      found.stops[stop].beacons = [...runs[0].beacons.keys()].sort((a, b) => a - b);
    }
    set("stop", 2);
    set("layer", 1);
    set("head", 0);
    found.onePair = heldNow();
    found.says = byId("now").textContent;
    set("layer", -1);
    set("head", -1);
    byId("forth").click();
    found.afterButton = Number(byId("stop").value);
    runs[0].spans[0].focus();
    const press = (key) => document.activeElement.dispatchEvent(
      new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    press("ArrowRight");
    press("ArrowDown");
    found.focused = document.activeElement.dataset.token;
    found.detail = byId("says").innerText;
    found.cells = byId("map").querySelectorAll("rect").length;
    found.heldCells = byId("map").querySelectorAll("rect.held").length;
    found.tabStops = runs[0].spans.filter((span) => span.tabIndex === 0).length;
    found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    found.columns = new Set([...document.querySelectorAll(".run")].map((run) => run.offsetLeft)).size;
    found.foreign = document.querySelectorAll(".run img, .run b, .run script").length;
"""


@needs_browser
@pytest.mark.parametrize("width", [1280, 500])  # a headless window is not narrower than 500
def test_the_numbers_on_the_page_are_those_of_the_trace(run, tmp_path, width):
    llm, output = run
    data = retention.record(llm, output, {"model": "tiny"})
    data["tokens"][30 : 30 + len(NASTY)] = NASTY
    found = work(retention.page([data, data]), EXERCISE, tmp_path, width)
    assert found["errors"] == [] and found["foreign"] == 0
    trace, total = output.trace, len(data["tokens"])
    assert found["texts"] == [total] * 2 and found["moments"] == len(trace) + 2

    def held(ran, stored, pairs=range(4)):
        sets = [held_sets(trace, stored, ran, pair, heads=2) for pair in pairs]
        return [sum(token in held for held in sets) for token in range(total)]

    for stop, shown in enumerate(found["stops"]):
        ran = min(stop, len(trace))
        end = total - 1 if stop == len(trace) + 1 else trace[max(ran - 1, 0)].position + 1
        assert (shown["ran"], shown["written"]) == (ran, end)
        # Just after the last eviction nothing that comes later is there yet
        expected = [n if token < end else 0 for token, n in enumerate(held(ran, end))]
        assert shown["held"] == expected, stop
        origins = set(trace[ran - 1].beacons.flatten().tolist()) - {-1} if ran else set()
        assert shown["beacons"] == sorted(origins)
    assert found["end"] == [held(len(trace), total - 1)] * 2
    assert found["shades"] == [round(15 + 85 * n / 4) if n else 0 for n in found["end"][0]]
    assert found["onePair"][0] == held(2, trace[1].position + 1, pairs=[2])
    assert "after eviction 2" in found["says"] and "layer 1, KV head 0" in found["says"]
    assert found["afterButton"] == 3
    # Right and down: 1 + 10. The panel says of that token what the trace says.
    assert found["focused"] == "11" and found["tabStops"] == 1
    count = held(3, trace[2].position + 1)[11]
    assert "position 11" in found["detail"] and f"held by {count} of 4" in found["detail"]
    assert found["cells"] == 4 and found["heldCells"] == count
    assert found["overflow"] <= 0 and found["columns"] == (2 if width == 1280 else 1)


@needs_browser
def test_the_page_of_the_demonstration(tmp_path):
    llm, output = demo.traced("beacon")
    data = retention.record(llm, output, {"model": "the embedded reasoner"})
    found = work(retention.page([data]), "found.end = [...runs[0].held];", tmp_path)
    shape, total = output.trace[-1].kept.shape, len(data["tokens"])
    expected = [0] * total
    for pair in range(shape[0] * shape[1]):
        for token in held_sets(output.trace, total - 1, len(output.trace), pair, shape[1]):
            expected[token] += 1
    assert found == {"end": expected, "errors": []}


@needs_browser
@pytest.mark.real
def test_the_page_of_a_real_model(tmp_path, real_folder):
    llm = LLM(real_folder, device="cpu", budget=256, trace=True, max_num_seqs=1)
    prompt = llm.tokenizer.encode("The history of tea.")
    words = llm.tokenizer.encode(" One two three four five six seven eight nine ten." * 140)[:1500]
    neutral = SamplingParams(max_tokens=1500, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    (request,) = llm.engine.submit(prompt, neutral, forced=words)  # what is given is quicker than drawn
    for _ in llm.run([request]):
        pass
    output = output_of(request)
    data = retention.record(llm, output, {"model": "SmolLM2"})
    found = work(retention.page([data]), "found.end = [...runs[0].held];", tmp_path)
    kept = output.trace[-1].kept.flatten(0, 1)
    counts = torch.zeros(len(data["tokens"]), dtype=torch.int64)
    counts.scatter_add_(0, kept.flatten().long(), torch.ones(kept.numel(), dtype=torch.int64))
    counts[output.trace[-1].position + 1 : data["stored"]] = len(kept)
    assert found == {"end": counts.tolist(), "errors": []}


@pytest.fixture(scope="module")
def real_folder():
    from real_checkpoint import real_checkpoint

    return str(real_checkpoint())


def test_a_run_without_evictions_and_without_a_budget_has_a_page_too(run):
    llm, output = run
    short = retention.encode_trace([], 20, pairs=4, beacons=16)
    assert short["positions"] == [] and short["beaconSlots"] == 0 and "beacons" not in short


def test_generate_writes_the_page_and_compares(run, tmp_path, capsys):
    folder = str(text_folder(tmp_path / "model", eos=False))
    file = tmp_path / "out.html"
    words = ["--model", folder, "--raw", "--prompt", "abc", "--max-tokens", "60", "--budget", "40"]
    words += ["--temperature", "1", "--seed", "1", "--trace", str(file), "--compare", "full"]
    assert generate.main(words) == 0
    page = file.read_text(encoding="utf-8")
    start = page.index('id="records">') + len('id="records">')
    first, second = json.loads(page[start : page.index("</script>", start)])
    assert [first["title"], second["title"]] == ["beacon, budget 40", "full cache"]
    assert len(first["positions"]) == 1 + (59 - 40) // 5 and second["positions"] == []
    assert first["settings"]["seed"] == "1" and str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, says",
    [
        (["--compare", "recent"], "--trace FILE"),
        (["--trace", "x.html", "--compare", "best"], "possible"),
        (["--trace", "x.html", "--n", "2"], "one completion"),
        (["--trace", "/no/such/folder/x.html"], "folder that exists"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_anything_runs(words, says, capsys):
    assert generate.main(["--prompt", "x", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
