"""Tokenizer, chat templates and growing text, on tokenizers built here: byte-level and SentencePiece-like."""

import json
import random
import string
from datetime import datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from nanobeacon.tokenizer import CHARACTER, UNKNOWN, WINDOW, TextStream, Tokenizer

# One to four bytes each: letters, accents, combining marks, CJK, emoji, a joiner and a variation selector.
ALPHABET = "ab .\né\u0301ñß\u0905\u094d语言가👩\u200d🚀\ufe0f𝄞"
TEXTS = st.text(st.sampled_from(ALPHABET), max_size=40)
QUICK = settings(max_examples=150, deadline=None, database=None)

# How byte-level tokenizers write bytes: printable ones as themselves, the rest from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {byte: chr(byte) for byte in PRINTABLE}
LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in LETTERS)}


def byte_level() -> Backend:
    """All bytes, and all strings of two or three bytes in pairs of characters: borders may be anywhere."""
    pairs = [(a + b).encode() for a in ALPHABET for b in ALPHABET]
    longer = {pair[i : i + n] for pair in pairs for n in (2, 3) for i in range(len(pair) - n + 1)}
    tokens = [bytes([byte]) for byte in range(256)] + sorted(longer)
    vocabulary = {"".join(LETTERS[byte] for byte in token): i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


def sentencepiece(metaspace: bool) -> Backend:
    """As Llama 2: words begin with a low line, rare characters are byte tokens, the first space goes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *string.ascii_lowercase, ".", "\n", "▁a", "▁b", "ab", "▁ab", "▁▁"]
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "b"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        spaces = decoders.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), spaces])
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
        backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


BYTES = Tokenizer(byte_level())
LLAMA, METASPACE = Tokenizer(sentencepiece(False)), Tokenizer(sentencepiece(True))
IDS = {token: i for token, i in BYTES.backend.get_vocab().items()}


def cut(data: bytes, source: random.Random) -> list[int]:
    """Ids of bytes, cut at random wherever the vocabulary allows it."""
    ids, at = [], 0
    while at < len(data):
        parts = [data[at : at + n] for n in (1, 2, 3) if at + n <= len(data)]
        names = ["".join(LETTERS[byte] for byte in part) for part in parts]
        name = source.choice([name for name in names if name in IDS])
        ids.append(IDS[name])
        at += len(name)
    return ids


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """The pieces of a stream; on the way, that joined they are always its text."""
    text = TextStream(tokenizer, prompt, stop)
    pieces = []
    for token_id in ids:
        pieces.append(text.push(token_id))
        assert "".join(pieces) == text.text
    pieces.append(text.finish())
    assert "".join(pieces) == text.text and text.finish() == ""
    return pieces


# ---- text that grows ----


@QUICK
@given(TEXTS, TEXTS, st.randoms(use_true_random=False))
def test_streamed_pieces_join_to_the_text_of_all_ids(prompt, output, source):
    before, ids = cut(prompt.encode(), source), cut(output.encode(), source)
    assert "".join(stream(BYTES, before, ids)) == output == BYTES.decode(ids)


@QUICK
@given(TEXTS, TEXTS, st.sampled_from([LLAMA, METASPACE]))
@example("a", " b", LLAMA)
@example("👩🚀" * 3, "👩🚀" * 9, METASPACE)
def test_streamed_pieces_follow_the_prompt_with_sentencepiece_like_decoders(prompt, output, tokenizer):
    ids = tokenizer.encode("a" + prompt + output)
    whole = tokenizer.decode(ids)
    for border in range(2, len(ids) + 1):
        head = tokenizer.decode(ids[:border])
        if not whole.startswith(head) or head.endswith(UNKNOWN):
            continue  # the border is inside a character
        assert head + "".join(stream(tokenizer, ids[:border], ids[border:])) == whole


def test_a_leading_space_is_kept_behind_a_prompt_and_dropped_behind_none():
    for tokenizer in (LLAMA, METASPACE):
        (word,) = tokenizer.encode("ab", special=False)
        assert tokenizer.decode([word]) == "ab"
        assert stream(tokenizer, tokenizer.encode("a"), [word, word]) == [" ab", " ab", ""]
        assert stream(tokenizer, [1], [word, word]) == ["ab", " ab", ""]  # behind a BOS
        special = stream(tokenizer, [*tokenizer.encode("a"), 2, 1], [word, 2, 2, word])
        assert special == [" ab", "", "", " ab", ""]
        assert stream(tokenizer, [], []) == [""]


def test_partial_characters_are_held_until_whole():
    pieces = stream(BYTES, [], list("a🚀é".encode()))
    assert pieces == ["a", "", "", "", "🚀", "", "é", ""]
    byte = {value: LLAMA.backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    assert stream(LLAMA, [], [byte[value] for value in "🚀é".encode()]) == ["", "", "", "🚀", "", "é", ""]


def test_the_whole_part_of_a_token_that_ends_inside_a_character_is_given():
    lead, tail = "语".encode()[:1], "语".encode()[1:]
    ids = [IDS["".join(LETTERS[byte] for byte in part)] for part in (b"a" + lead, tail)]
    assert stream(BYTES, [], ids) == ["a", "语", ""]


def test_finish_gives_a_character_that_stays_broken():
    assert stream(BYTES, [], list("a🚀".encode()[:-1])) == ["a", "", "", "", UNKNOWN]


def test_broken_bytes_are_not_held_for_ever():
    for tokenizer in (BYTES, LLAMA):
        byte = 0x80 if tokenizer is BYTES else LLAMA.backend.token_to_id("<0x80>")
        text = TextStream(tokenizer)
        for count in range(1, 100):
            text.push(byte)
            assert len(text.text) >= count - CHARACTER + 1
        text.finish()
        assert text.text == UNKNOWN * 99


def test_text_is_right_again_after_broken_bytes():
    whole = list("🚀 ab".encode())
    for broken in range(1, 3 * WINDOW):
        assert "".join(stream(BYTES, [], [0x80] * broken + [97] + whole)) == UNKNOWN * broken + "a🚀 ab"
    assert "".join(stream(BYTES, [], [0xF0] + whole)) == UNKNOWN + "🚀 ab"


@QUICK
@given(st.binary(max_size=60), st.binary(max_size=20), st.randoms(use_true_random=False))
def test_any_bytes_stream_and_lag_by_at_most_three_characters(data, prompt, source):
    ids = cut(data, source)
    text = TextStream(BYTES, cut(prompt, source))
    for count, token_id in enumerate(ids, 1):
        text.push(token_id)
        assert len(text.text) >= len(BYTES.decode(ids[:count]).rstrip(UNKNOWN)) - CHARACTER + 1
    text.finish()
    if len(data) < WINDOW:
        assert text.text == BYTES.decode(ids)


def test_a_real_replacement_character_is_text():
    assert "".join(stream(BYTES, [], list("a\ufffdb\ufffd".encode()))) == "a\ufffdb\ufffd"


def test_a_prompt_that_ends_inside_a_character_does_not_spill():
    rocket = list("🚀".encode())
    for inside in (1, 2, 3):
        pieces = stream(BYTES, [97, *rocket[:inside]], [*rocket[inside:], 98])
        assert "🚀" not in "".join(pieces) and "".join(pieces).endswith("b")
        assert "".join(pieces) == BYTES.decode([*rocket[inside:], 98])
        byte = [LLAMA.backend.token_to_id(f"<0x{value:02X}>") for value in rocket]
        output = [*byte[inside:], *LLAMA.encode("b", special=False)]
        pieces = stream(LLAMA, [*LLAMA.encode("a"), *byte[:inside]], output)
        assert "🚀" not in "".join(pieces) and "".join(pieces).endswith("b")


def test_new_bytes_that_spoil_the_bytes_before_do_not_change_what_was_given():
    byte = {value: LLAMA.backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in "é".encode()] + [byte[0xF0], LLAMA.backend.token_to_id("a")]
    assert LLAMA.decode(ids) == UNKNOWN * 3 + "a"  # this decoder forgives nothing in a run of bytes
    assert "".join(stream(LLAMA, [], ids)) == "é" + UNKNOWN + "a"
    assert "".join(stream(LLAMA, [], [byte[value] for value in "é🚀🚀".encode()])) == "é🚀🚀"


def test_special_tokens_are_not_text_and_other_added_tokens_are():
    bos, think = BYTES.backend.token_to_id("<|bos|>"), BYTES.backend.token_to_id("<think>")
    assert stream(BYTES, [], [bos, 97, bos, think, 98]) == ["", "a", "", "<think>", "b", ""]
    assert stream(BYTES, [], [0xC3, bos, 0xA9]) == ["", "", "é", ""]  # not even inside a character
    assert stream(BYTES, [BYTES.size + 5], [97, BYTES.size + 3]) == ["a", "", ""]
    assert BYTES.decode([bos, 97, bos, think, BYTES.size + 3]) == "a<think>"
    (word,) = LLAMA.encode("ab", special=False)
    assert "".join(stream(LLAMA, [1], [word, *[2] * 3 * WINDOW, word])) == "ab ab"  # nor do many hide a space


def test_the_cost_of_a_token_does_not_grow_with_the_text(monkeypatch):
    seen = []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: seen.append(len(ids)) or decode(self, ids))
    source = random.Random(0)
    text = "".join(source.choice(ALPHABET) for _ in range(20_000))
    ids = cut(text.encode(), source)
    assert len(ids) > 20_000
    out = TextStream(BYTES, ids, stop=("never", "語"))
    assert "".join([out.push(token_id) for token_id in ids] + [out.finish()]) == text
    specials = TextStream(BYTES, [])
    for _ in range(1000):
        specials.push(BYTES.backend.token_to_id("<|eos|>"))
        specials.push(0x80)
    assert max(seen) <= 2 * WINDOW and len(seen) < 3 * len(ids)


# ---- stop strings ----


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Letter by letter: at the first letter that completes stop strings, cut before the longest of them."""
    for end in range(len(text) + 1):
        complete = [len(each) for each in stop if text[:end].endswith(each)]
        if complete:
            return text[: end - max(complete)]
    return text


SMALL_TEXTS = st.text(st.sampled_from("ab é🚀"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab é🚀"), min_size=1, max_size=4), max_size=3).map(tuple)


@QUICK
@given(SMALL_TEXTS, STOPS, st.randoms(use_true_random=False))
def test_stop_strings_cut_exactly_whatever_the_token_borders(text, stop, source):
    ids = cut(text.encode(), source)
    assert "".join(stream(BYTES, [], ids, stop)) == cut_at_stop(text, stop)


@QUICK
@given(SMALL_TEXTS, STOPS, st.randoms(use_true_random=False))
def test_only_what_could_begin_a_stop_string_is_held(text, stop, source):
    out, ids = TextStream(BYTES, [], stop), cut(text.encode(), source)
    for count, token_id in enumerate(ids, 1):
        out.push(token_id)
        if out.stopped:
            break
        so_far = BYTES.decode(ids[:count]).rstrip(UNKNOWN)
        begun = [n for each in stop for n in range(len(each)) if so_far.endswith(each[:n])]
        assert out.text == so_far[: len(so_far) - max(begun, default=0)]


def test_a_stop_string_over_token_borders():
    ids = list(b"abcSTOPd")
    assert stream(BYTES, [], ids, ("STOP",)) == ["a", "b", "c", "", "", "", "", "", ""]
    out = TextStream(BYTES, [], ("STOP",))
    assert [out.push(token_id) or out.stopped for token_id in ids[:7]][-1] is True and out.text == "abc"
    assert out.push(100) == "" and out.finish() == "" and out.text == "abc"


def test_held_text_is_released_when_generation_ends_otherwise():
    assert stream(BYTES, [], list(b"aSTO"), ("STOP",)) == ["a", "", "", "", "STO"]
    assert stream(BYTES, [], list(b"aSTx"), ("STOP",)) == ["a", "", "", "STx", ""]
    assert stream(BYTES, [], list("a🚀".encode()[:3]), ("a🚀",)) == ["", "", "", "a" + UNKNOWN]


def test_a_stop_string_is_not_looked_for_in_the_prompt():
    assert "".join(stream(BYTES, list(b"xST"), list(b"OPy"), ("STOP",))) == "OPy"


def test_a_stop_string_that_only_the_end_completes():
    out = TextStream(BYTES, [], (UNKNOWN,))
    assert out.push(0xF0) == "" and not out.stopped
    assert out.finish() == "" and out.stopped and out.text == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop"):
        TextStream(BYTES, [], ("a", ""))


# ---- ids ----


def test_bos_is_not_doubled():
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer(sentencepiece(False), {"bos_token": "<s>"}, template)
    rendered = tokenizer.render_chat([{"role": "user", "content": "ab"}])
    assert rendered == "<s>ab"
    assert tokenizer.encode(rendered, special=False).count(1) == 1
    assert tokenizer.encode("ab")[0] == 1 and tokenizer.encode("ab").count(1) == 1
    assert 1 not in tokenizer.encode("ab", special=False)


def test_tokenizer_json_alone_decides_about_bos():
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|bos|>", "add_bos_token": True})
    assert tokenizer.encode("a") == [97] and tokenizer.bos_token_id is not None


def test_encoding_neither_truncates_nor_pads():
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("ab" * 10) == list(b"ab" * 10) and tokenizer.encode("a") == [97]


@pytest.mark.parametrize("text", ["a\ud800", None, 7])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(ValueError, match="UTF-8"):
        BYTES.encode(text)


def test_size_counts_added_tokens_and_gaps():
    assert BYTES.size == max(IDS.values()) + 1 == IDS["<think>"] + 1
    backend = Backend(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(backend).size == 10


def test_special_tokens_as_text_as_dict_as_null_and_unknown():
    named = {"bos_token": {"content": "<|bos|>", "lstrip": False}, "eos_token": "<|eos|>", "pad_token": None}
    tokenizer = Tokenizer(byte_level(), named | {"add_bos_token": True, "unk_token": "<none>"})
    assert tokenizer.bos_token_id == tokenizer.backend.token_to_id("<|bos|>")
    assert tokenizer.eos_token_id == tokenizer.backend.token_to_id("<|eos|>")
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<none>"}
    assert Tokenizer(byte_level(), {"bos_token": "<none>", "eos_token": None}).bos_token_id is None
    assert Tokenizer(byte_level()).eos_token_id is None


# ---- folders ----


def write(folder, config=None, backend=None, **files):
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"])
def test_other_tokenizer_files_without_tokenizer_json_are_an_error(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is needed.*" + name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_an_error_that_names_the_folder(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match="cannot be read") as error:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_special_tokens_map_names_what_tokenizer_config_does_not(tmp_path):
    write(
        tmp_path,
        {"eos_token": "<|eos|>"},
        special_tokens_map__json='{"bos_token": "<|bos|>", "eos_token": "a"}',
    )
    tokenizer = Tokenizer.from_folder(str(tmp_path))
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


# ---- chat ----

USER = [{"role": "user", "content": "hi"}]


def test_the_template_is_found_in_each_of_its_places(tmp_path):
    write(tmp_path, {})
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    write(tmp_path, {}, chat_template__json=json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_folder(tmp_path).render_chat(USER) == "json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    write(tmp_path, {"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).render_chat(USER) == "named"
    write(tmp_path, {"chat_template": "config"})
    assert Tokenizer.from_folder(tmp_path).render_chat(USER) == "config"
    write(tmp_path, {"chat_template": "config"}, chat_template__jinja="jinja é")
    assert Tokenizer.from_folder(tmp_path).render_chat(USER) == "jinja é"


@pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": "tools"}]])
def test_chat_without_a_template_is_an_error_that_says_so(tmp_path, template):
    write(tmp_path, {"chat_template": template})
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat(USER)
    assert tokenizer.encode("a") == [97]


TEMPLATE = """{{- bos_token }}
{%- if tools is not none %}tools{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<' + message.role + '>' + message.content + eos_token }}
    {%- if loop.index0 == 5 %}
        {% break %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}
{{- pad_token }}"""
EOS = {"__type": "AddedToken", "content": "<|eos|>"}
NAMES = {"bos_token": "<|bos|>", "eos_token": EOS, "pad_token": None}
TURNS = [
    {"role": "system", "content": "be <brief> & plain"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "语"},
]


def test_a_template_gets_what_templates_expect():
    tokenizer = Tokenizer(byte_level(), NAMES, TEMPLATE)
    wanted = "<|bos|><user>hi<|eos|><assistant>语<|eos|>"
    assert tokenizer.render_chat(TURNS) == wanted + "<assistant>"
    assert tokenizer.render_chat(TURNS, enable_thinking=False) == wanted + "<assistant><think></think>"
    assert tokenizer.render_chat(TURNS, add_generation_prompt=False) == wanted
    assert tokenizer.render_chat(TURNS, tools=[{}]) == wanted.replace("<user>", "tools<user>") + "<assistant>"


def test_templates_render_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    layout = "{% for m in messages %}\n  {% if true %}\n  {{ m | tojson }}\n  {% endif %}\n{% endfor %}\n\n"
    others = ["{{ messages | tojson(indent=2) }} \n", "{{ documents is none }}{{ x }}"]
    for template in (TEMPLATE, layout, *others):
        write(tmp_path, NAMES | {"chat_template": template})
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        for thinking in (True, False):
            wanted = theirs.apply_chat_template(
                TURNS, tokenize=False, add_generation_prompt=True, enable_thinking=thinking, x=3
            )
            assert Tokenizer.from_folder(tmp_path).render_chat(TURNS, thinking, x=3) == wanted


def test_tojson_neither_escapes_html_nor_ascii():
    tokenizer = Tokenizer(byte_level(), {}, "{{ messages[0].content | tojson }}")
    assert tokenizer.render_chat([{"role": "user", "content": "<b> & 'é'"}]) == "\"<b> & 'é'\""


def test_strftime_now_is_there():
    tokenizer = Tokenizer(byte_level(), {}, "{{ strftime_now('%Y') }}")
    assert abs(int(tokenizer.render_chat(USER)) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[0].content.nothing.at_all }}", "chat template"),
        ("{{ 'a' + 1 }}", "chat template"),
        ("{{ messages.append(1) }}", "chat template"),  # immutable
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),  # the sandbox
    ],
)
def test_a_template_that_fails_is_a_value_error(template, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(byte_level(), {}, template).render_chat(USER)


@pytest.mark.parametrize("messages", ["hi", [{"content": "hi"}], ["hi"], []])
def test_messages_that_are_none_are_refused(messages):
    with pytest.raises(ValueError, match="role"):
        Tokenizer(byte_level(), {}, "x").render_chat(messages)


# ---- tokens that tokenizer.json lacks ----

NEXT = byte_level().get_vocab_size(with_added_tokens=True)  # the id of the first token added behind it


def entry(text: str, special: bool = True) -> dict:
    return {"content": text, "special": special, "normalized": False}


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_added_tokens_decoder_are_tokens_as_in_transformers(tmp_path, special):
    transformers = pytest.importorskip("transformers")
    decoder = {str(NEXT): entry("<|im_start|>"), str(NEXT + 1): entry("<|im_end|>", special)}
    write(tmp_path, {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"})
    ours = Tokenizer.from_folder(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "<|im_start|>ab<|im_end|>"
    assert ours.encode(text) == theirs.encode(text) == [NEXT, *ours.encode("ab"), NEXT + 1]
    assert ours.size == NEXT + 2 and ours.eos_token_id == NEXT + 1
    assert ours.decode(ours.encode(text)) == ("ab" if special else "ab<|im_end|>")


def test_tokens_of_added_tokens_json_are_tokens_special_where_a_file_names_them(tmp_path):
    added = json.dumps({"<|im_end|>": NEXT, "<tool>": NEXT + 1, "<|pad|>": NEXT + 2})
    settings = {"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["<|pad|>"]}
    write(tmp_path, settings, added_tokens__json=added)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("a<tool>b<|pad|><|im_end|>")
    assert ids == [97, NEXT + 1, 98, NEXT + 2, NEXT] and tokenizer.decode(ids) == "a<tool>b"


def test_a_token_of_the_vocabulary_becomes_special_with_its_own_id(tmp_path):
    write(tmp_path, {"added_tokens_decoder": {"97": entry("a")}})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a b") == [97, *tokenizer.encode(" b")] and not tokenizer.has_text(97)


@pytest.mark.parametrize(
    "decoder, message",
    [
        ({"97": "<|im_end|>"}, r"<\|im_end\|>.*id 97, but that id is 'a'"),
        ({"3": "<|eos|>"}, "eos"),
        ({str(NEXT + 5): "<|im_end|>"}, f"id {NEXT + 5}, but the token has id {NEXT}"),
    ],
)
def test_added_tokens_whose_ids_disagree_are_an_error(tmp_path, decoder, message):
    write(tmp_path, {"added_tokens_decoder": {token_id: entry(text) for token_id, text in decoder.items()}})
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_two_files_that_give_one_id_to_two_tokens_are_an_error(tmp_path):
    added = json.dumps({"<one>": NEXT})
    write(tmp_path, {"added_tokens_decoder": {str(NEXT): entry("<two>")}}, added_tokens__json=added)
    with pytest.raises(ValueError, match="'<one>' in one file and '<two>' in another"):
        Tokenizer.from_folder(tmp_path)


# ---- stop strings that name special tokens ----

SPECIALS = Tokenizer(byte_level())
BOS_ID, EOS_ID = (SPECIALS.backend.token_to_id(text) for text in ("<|bos|>", "<|eos|>"))


@pytest.mark.parametrize(
    "stop, ids, text, stopped",
    [
        (("<|eos|>",), [97, EOS_ID, 98], "a", True),
        (("<|eos|>",), [97, BOS_ID, 98], "ab", False),
        (("a<|eos|>b",), [97, EOS_ID, 98, 99], "", True),
        (("a<|eos|>b",), [97, EOS_ID, 97, EOS_ID, 99], "aac", False),
        (("<|bos|><|eos|>",), [97, BOS_ID, BOS_ID, EOS_ID], "a", True),
        (("b", "<|eos|>"), [97, EOS_ID, 98], "a", True),
        (("a<|eos|>",), [97, BOS_ID, EOS_ID], "", True),  # <|bos|> is shown only where a stop names it
    ],
)
def test_a_stop_string_that_names_a_special_token_fires_on_it(stop, ids, text, stopped):
    stream = TextStream(SPECIALS, [], stop)
    pieces = [stream.push(token_id) for token_id in ids]
    pieces.append(stream.finish())
    assert ("".join(pieces), stream.text, stream.stopped) == (text, text, stopped)


def test_the_spelling_of_a_special_token_is_not_the_token():
    stream = TextStream(SPECIALS, [], ("<|eos|>",))
    pieces = [stream.push(byte) for byte in b"<|eos|>"]  # the tokens of single bytes have the bytes as ids
    assert "".join([*pieces, stream.finish()]) == "<|eos|>"
    assert not stream.stopped


# ---- what templates hold and get ----


def test_generation_blocks_render_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n{% generation %}\n{{ m.content }}"
        "{%- set x = 1 %}!{% endgeneration %}{{ x }}\n{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    write(tmp_path, {"chat_template": template})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.from_folder(tmp_path).render_chat(TURNS) == wanted


def test_a_template_has_its_own_default_of_enable_thinking():
    template = "{% set t = enable_thinking if enable_thinking is defined else 'own' %}{{ t }}"
    tokenizer = Tokenizer(byte_level(), {}, template)
    rendered = [tokenizer.render_chat(USER, thinking) for thinking in (None, True, False)]
    assert rendered == ["own", "True", "False"]


@pytest.mark.parametrize(
    "template, wanted",
    [
        ("{{ messages[0].content }}", ""),
        ("{{ 'x' + messages[0].content }}", "x"),
        ("{{ 'x' ~ messages[0].content }}", "x"),
        ("{% if messages[0].content is none %}null{% endif %}", "null"),
        ("{% if messages[0].content is not none %}text{% endif %}", ""),
        ("{% if messages[0].tool_calls is defined %}tools{% endif %}", ""),
        ("{% if 'name' in messages[0] %}name{% endif %}", ""),
        ("{{ messages[0].name }}", ""),
    ],
)
def test_null_fields_of_a_message_are_no_text(template, wanted):
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": None}
    assert Tokenizer(byte_level(), {}, template).render_chat([message]) == wanted


PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    "template, wanted",
    [
        ("<{{ messages[0].content }}>", "<one two>"),
        ("{{ '<' + messages[0].content + '>' }}", "<one two>"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", "one two"),
        ("{{ messages[0].content.strip() }}", "one two"),
        ("{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}", "[one ][two]"),
    ],
)
def test_content_of_text_parts_is_joined_where_a_template_wants_text(template, wanted):
    messages = [{"role": "user", "content": PARTS}]
    assert Tokenizer(byte_level(), {}, template).render_chat(messages) == wanted
    assert messages == [{"role": "user", "content": PARTS}]


@pytest.mark.parametrize("part", [{"type": "image", "url": "x"}, "text", {"type": "text", "text": None}])
def test_a_part_that_is_no_text_is_refused_by_name(part):
    with pytest.raises(ValueError, match="content: a part is"):
        Tokenizer(byte_level(), {}, "x").render_chat([{"role": "user", "content": [part]}])


@pytest.mark.parametrize("content", ["语", "and so ", PARTS])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_final_message_is_continued_as_in_transformers(tmp_path, content, trim):
    transformers = pytest.importorskip("transformers")
    shown = "{% if m.content is string %}{{ m.content" + trim + " }}{% else %}{{ m.content[0].text }}"
    shown += "{{ m.content[1].text" + trim + " }}{% endif %}"
    template = "{% for m in messages %}<{{ m.role }}>" + shown + "<|eos|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    write(tmp_path, {"chat_template": template})
    messages = [*USER, {"role": "assistant", "content": content}]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert Tokenizer.from_folder(tmp_path).render_chat(messages, continue_final=True) == wanted


@pytest.mark.parametrize("last", [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}])
def test_what_cannot_be_continued_is_refused_by_name(last):
    with pytest.raises(ValueError, match="continue_final"):
        Tokenizer(byte_level(), {}, TEMPLATE).render_chat([last], continue_final=True)
