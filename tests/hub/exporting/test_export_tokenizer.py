"""What an export gives other programs beside the weights: ids as ours, a chat template, defaults of `generate`."""

from __future__ import annotations

import json

import pytest
from tiny_runs import WORDS, made_run
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from equimoe.data.chat_template import find_template
from equimoe.data.tokenizer import load_tokenizer, parse_tokenizer, train_tokenizer
from equimoe.errors import EquimoeError
from equimoe.hub.exporting.export import export
from equimoe.sampling.generation import prompt_ids

transformers = pytest.importorskip("transformers", reason="needs pip install 'equimoe[torch]'")

TEXTS = ["the router joins", " two  spaces\n\nand lines ", "", "naïve — 数学 🙂", "a"]
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def trained(post_processor=None, *, prefix_space=False, extra=()) -> str:
    """tokenizer.json of a small byte-level BPE with that post-processor."""
    inner = Tokenizer.from_str(train_tokenizer([" ".join(WORDS)], 280).json)
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in extra])
    if prefix_space:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if post_processor is not None:
        inner.post_processor = post_processor(inner)
    return inner.to_str()


def template(single):
    return lambda inner: processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=[(BEGIN, 0), (END, 1)]
    )


POST_PROCESSORS = {
    "none": None,
    "byte level": lambda inner: processors.ByteLevel(trim_offsets=True),
    "text and end": template(f"$A {END}"),
    "begin, text and end": template(f"{BEGIN} $A {END}"),
    "twice the begin": template(f"{BEGIN} {BEGIN} $A"),
    "byte level, then begin": lambda inner: processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template(f"{BEGIN} $A")(inner)]
    ),
    "roberta": lambda inner: processors.RobertaProcessing((END, 1), (BEGIN, 0), trim_offsets=True),
    "bert": lambda inner: processors.BertProcessing((END, 1), (BEGIN, 0)),
}
NAMES = {  # other names, and none
    "as ours": {},
    "sentencepiece": {BEGIN: "<s>", END: "</s>"},
    "no begin": {BEGIN: "[CLS]"},
    "neither": {BEGIN: "[CLS]", END: "[SEP]", "<|pad|>": "[X]"},
}


def auto(run, out):
    """What `AutoTokenizer` makes of an export, and our tokenizer of the run."""
    folder = export(run, out, verified=False).folder
    ours = load_tokenizer(next((run / "checkpoints").iterdir()) / "tokenizer.json")
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True), ours


KINDS = [(kind, "as ours") for kind in POST_PROCESSORS]
KINDS += [(kind, names) for kind in ("none", "begin, text and end", "bert") for names in list(NAMES)[1:]]


@pytest.mark.parametrize(("kind", "names"), KINDS)
def test_ids_of_others_are_those_that_we_prompt_with(tmp_path, kind, names):
    text, names = trained(POST_PROCESSORS[kind]), NAMES[names]
    for before, after in names.items():
        text = text.replace(before, after)
    theirs, ours = auto(made_run(tmp_path / "run", tokenizer=text), tmp_path / "out")
    assert (ours.begin is None) == (names.get(BEGIN) == "[CLS]")
    for each in TEXTS:
        assert theirs(each).input_ids == prompt_ids(ours, each), each
    batch = theirs(TEXTS[:2]).input_ids
    assert batch == [prompt_ids(ours, each) for each in TEXTS[:2]]
    for name, token in (("bos", ours.begin), ("eos", ours.end), ("pad", ours.padding)):
        assert getattr(theirs, f"{name}_token_id") == token
    assert theirs.decode(theirs(TEXTS[3]).input_ids, skip_special_tokens=True) == TEXTS[3]


def test_what_a_file_says_of_spaces_cutting_and_filling(tmp_path):
    """A space in front of the text counts; a limit and padding in the file would change texts in silence."""
    inner = Tokenizer.from_str(trained(prefix_space=True))
    inner.enable_truncation(4)
    inner.enable_padding(length=9, pad_token="<|pad|>", pad_id=2)
    theirs, ours = auto(made_run(tmp_path / "run", tokenizer=inner.to_str()), tmp_path / "out")
    for each in TEXTS:
        assert theirs(each).input_ids == prompt_ids(ours, each), each


def test_offsets_are_trimmed_as_the_tokenizers_own_file_says(tmp_path):
    found = {}
    for trims in (True, False):
        text = trained(lambda inner, trims=trims: processors.ByteLevel(trim_offsets=trims))
        export(made_run(tmp_path / f"run{trims}", tokenizer=text), tmp_path / f"{trims}", verified=False)
        written = Tokenizer.from_file(str(tmp_path / f"{trims}" / "tokenizer.json"))
        assert written.encode(" the the").offsets[1:] == Tokenizer.from_str(text).encode(" the the").offsets
        found[trims] = written.encode(" the the").offsets
    assert found[True] != found[False]


def test_control_tokens_in_a_text_as_the_card_says(tmp_path):
    """transformers parses them by default, as for any model; with an argument it takes them as the training did."""
    theirs, ours = auto(made_run(tmp_path / "run"), tmp_path / "out")
    text = f"{END} ends a text"
    assert theirs(text).input_ids[1] == ours.end and ours.end not in prompt_ids(ours, text)
    assert theirs(text, split_special_tokens=True).input_ids == prompt_ids(ours, text)
    assert "`tokenizer(text, split_special_tokens=True)`" in (tmp_path / "out" / "README.md").read_text()


# Chat.

HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What joins them? "},
    {"role": "assistant", "content": "The router."},
    {"role": "user", "content": "Why?"},
]


def test_a_model_without_chat_has_no_template(exported):
    assert not (exported / "chat_template.jinja").exists()
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": 0,
        "pad_token_id": 2,
        "eos_token_id": 1,
        "do_sample": True,
        "temperature": 0.8,
    }
    assert "equimoe chat" not in (exported / "README.md").read_text()


def test_llama_headers_bring_the_built_in_template(tmp_path):
    run = made_run(tmp_path / "run", tokenizer=trained(extra=HEADERS))
    theirs, ours = auto(run, tmp_path / "out")
    expected = find_template([run], ours).encode(TALK)
    assert theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False) == expected
    assert expected.count(ours.inner.token_to_id("<|eot_id|>")) == 4 and expected[0] == ours.begin
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [ours.end, ours.inner.token_to_id("<|eot_id|>")]
    assert "equimoe chat MODEL" in (tmp_path / "out" / "README.md").read_text()
    again = find_template([tmp_path / "out"], load_tokenizer(tmp_path / "out"))
    assert again.encode(TALK) == expected and set(again.stop_ids) == set(generation.eos_token_id)


def test_a_template_in_the_run_comes_along_as_it_is(tmp_path):
    run = made_run(tmp_path / "run", tokenizer=trained(extra=HEADERS))
    text = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}  \n\n"
    (run / "chat_template.jinja").write_text(text)
    theirs, ours = auto(run, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == text
    ids = theirs.apply_chat_template(TALK[1:2], return_dict=False)
    assert ids == find_template([run], ours).encode(TALK[1:2], add_generation_prompt=False)


def test_a_broken_template_is_refused_before_anything_is_written(tmp_path):
    run = made_run(tmp_path / "run")
    (run / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(EquimoeError, match="chat template: must be Jinja, but line 1"):
        export(run, tmp_path / "out", verified=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tokenizer_without_control_tokens_leaves_them_out(tmp_path):
    text = trained()
    for name in (BEGIN, END, "<|pad|>"):
        text = text.replace(name, f"plain{len(name)}")
    assert parse_tokenizer(text, "x").end is None
    export(made_run(tmp_path / "run", tokenizer=text), tmp_path / "out", verified=False)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "do_sample": True,
        "temperature": 0.8,
    }
