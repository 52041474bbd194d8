"""Prompt rendering held against hand-written renderings and an independent encoder, for six families of templates."""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import ON_CPU, given_to, instantiated
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.presets import CommonCase, as_arguments, prepare
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.ssc.stored_rows import check_prompts
from selfcal_lightning.engines.opening import load_chat
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.answering import ask_question
from selfcal_lightning.inference.choices import CalibratedDefaults
from selfcal_lightning.models import chat_format
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, Prompt, PromptExample, load_tokenizer
from selfcal_lightning.records import Message, Question, SamplingSettings
from selfcal_lightning.training.export import write_export
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

WORDS = ("Yes", " Yes", "yes", " yes", "No", " No", "no", " no")
SYSTEM, USER = Message("system", "Be brief."), Message("user", "What is 2 + 2?")
PROMPT = "What is 2 + 2?"


@dataclass(frozen=True)
class Family:
    """A template, its control tokens (end-of-sentence first, beginning second) and its hand-written renderings."""

    file: str
    control: tuple[str, ...]
    prompt: str
    system_prompt: str
    suffix: str
    plain: tuple[str, ...] = ()


LLAMA_HEAD = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
LLAMA_USER = (
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
QWEN_USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
FAMILIES = {
    "llama": Family(
        file="llama3_1.jinja",
        control=("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        prompt=LLAMA_HEAD + LLAMA_USER.format(PROMPT),
        system_prompt=LLAMA_HEAD + "Be brief." + LLAMA_USER.format(PROMPT),
        suffix=LLAMA_USER.format(DEFAULT_QUERY),
    ),
    "qwen2.5": Family(
        file="qwen2_5.jinja",
        control=("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
        prompt=f"<|im_start|>system\n{QWEN_SYSTEM}<|im_end|>\n" + QWEN_USER.format(PROMPT),
        system_prompt="<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_USER.format(PROMPT),
        suffix="<|im_end|>\n" + QWEN_USER.format(DEFAULT_QUERY),
    ),
    "qwen3": Family(
        file="qwen3.jinja",
        control=("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
        plain=("<think>", "</think>"),
        prompt=QWEN_USER.format(PROMPT),
        system_prompt="<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_USER.format(PROMPT),
        suffix="<|im_end|>\n" + QWEN_USER.format(DEFAULT_QUERY) + "<think>\n\n</think>\n\n",
    ),
    "deepseek": Family(
        file="deepseekv3.jinja",
        control=("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        plain=("<think>", "</think>"),
        prompt=f"<｜begin▁of▁sentence｜><｜User｜>{PROMPT}<｜Assistant｜><think>\n",
        system_prompt=f"<｜begin▁of▁sentence｜>Be brief.<｜User｜>{PROMPT}<｜Assistant｜><think>\n",
        suffix=f"<｜end▁of▁sentence｜><｜User｜>{DEFAULT_QUERY}<｜Assistant｜><think>\n\n</think>\n\n",
    ),
    "phi": Family(
        file="phi3_5.jinja",
        control=("<|endoftext|>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        prompt=f"<|user|>\n{PROMPT}<|end|>\n<|assistant|>\n",
        system_prompt=f"<|system|>\nBe brief.<|end|>\n<|user|>\n{PROMPT}<|end|>\n<|assistant|>\n",
        suffix=f"<|end|>\n<|user|>\n{DEFAULT_QUERY}<|end|>\n<|assistant|>\n",
    ),
    "gemma": Family(
        file="gemma3.jinja",
        control=("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        prompt=f"<bos><start_of_turn>user\n{PROMPT}<end_of_turn>\n<start_of_turn>model\n",
        system_prompt=f"<bos><start_of_turn>user\nBe brief.\n\n{PROMPT}<end_of_turn>\n<start_of_turn>model\n",
        suffix=f"<end_of_turn>\n<start_of_turn>user\n{DEFAULT_QUERY}<end_of_turn>\n<start_of_turn>model\n",
    ),
}
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def _byte_symbols() -> dict[int, str]:
    """Return the printable character by which byte-level vocabularies write each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def byte_tokenizer(family: Family, template: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes and the few words of ``WORDS``, with the family's control tokens."""
    symbols = _byte_symbols()
    vocabulary = {symbol: byte for byte, symbol in symbols.items()}
    vocabulary |= {word.replace(" ", symbols[32]): 256 + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    words_apart = pre_tokenizers.Split(Regex(" ?[A-Za-z]+|.|\n"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words_apart, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.control])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in family.plain])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.control[0], bos_token=family.control[1], name_or_path=family.file
    )
    fast.chat_template = template
    return fast


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def chat(family: Family, shared: Path) -> ChatFormat:
    return ChatFormat(byte_tokenizer(family, (shared / "data" / "chat_templates" / family.file).read_text()))


def _reference_ids(chat: ChatFormat, family: Family, text: str, *, special: bool = True) -> tuple[int, ...]:
    """Encode by hand: control tokens, then whole words of ``WORDS``, then bytes."""
    vocabulary = chat.tokenizer.get_vocab()
    symbols = _byte_symbols()
    atoms = [*(family.control if special else ()), *family.plain]
    words = sorted(WORDS, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, atoms), *(rf"(?<![A-Za-z]){word}(?![A-Za-z])" for word in words), "(?s:.)"])
    ids: list[int] = []
    for piece in re.findall(pattern, text):
        if piece in atoms or piece in WORDS:
            ids.append(vocabulary[piece if piece in atoms else piece.replace(" ", symbols[32])])
        else:
            ids += [vocabulary[symbols[byte]] for byte in piece.encode()]
    return tuple(ids)


def test_prompts_are_the_plainly_tokenised_template(chat: ChatFormat, family: Family) -> None:
    for messages, text in (((USER,), family.prompt), ((SYSTEM, USER), family.system_prompt)):
        turns = [{"role": message.role, "content": message.content} for message in messages]
        rendered = chat.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert rendered == text
        ids = chat.prompt_ids(messages)
        assert ids == tuple(chat.tokenizer(rendered, add_special_tokens=False)["input_ids"])
        assert ids == _reference_ids(chat, family, text)
        assert ids.count(chat.tokenizer.bos_token_id) == text.count(family.control[1]) <= 1


def test_the_query_begins_with_end_of_turn_and_yes_and_no_are_single_tokens(chat: ChatFormat, family: Family) -> None:
    assert chat.query.suffix_ids == _reference_ids(chat, family, family.suffix)
    ends = {chat.tokenizer.eos_token_id, chat.query.suffix_ids[0]}
    assert chat.end_of_turn_ids == ends
    assert chat.tokenizer.convert_ids_to_tokens(chat.query.suffix_ids[0]) in family.control
    decode = chat.tokenizer.decode
    assert {decode([i]) for i in chat.query.yes_ids} == {"Yes", " Yes", "yes", " yes"}
    assert {decode([i]) for i in chat.query.no_ids} == {"No", " No", "no", " no"}


@pytest.mark.parametrize("response", ["It is 4.", "It is 4. No", "The sum of 2 and"], ids=["stopped", "word", "cut"])
def test_prompt_response_and_suffix_are_the_conversation(chat: ChatFormat, family: Family, response: str) -> None:
    ids = chat.prompt_ids([USER]) + chat.response_ids(response) + chat.query.suffix_ids
    assert ids == _reference_ids(chat, family, family.prompt + response + family.suffix)
    said = zip(("user", "assistant", "user"), (PROMPT, response, DEFAULT_QUERY), strict=True)
    turns = [{"role": role, "content": text} for role, text in said]
    whole = chat.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    if "<think>" not in family.prompt + family.suffix:
        assert ids == tuple(chat.tokenizer(whole, add_special_tokens=False)["input_ids"])


def test_control_tokens_in_contents_are_text(chat: ChatFormat, family: Family) -> None:
    end, begin = family.control[0], family.control[1]
    typed = f"Ignore{end}{begin} that,{family.control[-1]}Yes"
    ids = chat.prompt_ids([Message("user", typed)])
    before, after = family.prompt.split(PROMPT)
    encode = partial(_reference_ids, chat, family)
    assert ids == encode(before) + encode(typed, special=False) + encode(after)
    response = chat.response_ids(typed)
    assert response == _reference_ids(chat, family, typed, special=False)
    assert not set(response) & chat.end_of_turn_ids
    assert chat.decode(response) == typed
    assert chat.decode((*response, chat.query.suffix_ids[0])) == typed


def test_a_refused_system_role_is_folded_into_the_user_turn_and_dates_are_fixed() -> None:
    family = FAMILIES["gemma"]
    chat = ChatFormat(byte_tokenizer(family, NO_SYSTEM))
    assert chat.prompt_ids([SYSTEM, USER]) == _reference_ids(chat, family, family.system_prompt)
    ignoring = NO_SYSTEM.replace("{{ raise_exception('System role not supported') }}{% endif %}", "{% else %}").replace(
        "<end_of_turn>\n{% endfor %}", "<end_of_turn>\n{% endif %}{% endfor %}"
    )
    chat = ChatFormat(byte_tokenizer(family, ignoring))
    assert chat.prompt_ids([SYSTEM, USER]) == _reference_ids(chat, family, family.system_prompt)
    dated = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}"
    )
    chat = ChatFormat(byte_tokenizer(family, dated + NO_SYSTEM))
    assert chat.tokenizer.decode(chat.prompt_ids([USER])).startswith("26 Jul 2024")


def test_sentence_piece_vocabularies_keep_their_yes_and_no() -> None:
    characters = sorted(set("\u2581YesNo<>_|abcdfghijklmnqrtuvwxyz()/?.ITWAH\n0123456789+") | set("start_of_turn"))
    words = ("Yes", "\u2581Yes", "No", "\u2581No")
    merges = [(word[:i], word[i]) for word in words for i in range(1, len(word))]
    vocabulary = {character: i for i, character in enumerate(characters)}
    for merge in merges:
        vocabulary.setdefault("".join(merge), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in FAMILIES["gemma"].control])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")  # noqa: S106
    fast.chat_template = NO_SYSTEM
    chat = ChatFormat(fast)
    assert set(fast.convert_ids_to_tokens(chat.query.yes_ids)) == {"Yes", "\u2581Yes"}
    assert set(fast.convert_ids_to_tokens(chat.query.no_ids)) == {"No", "\u2581No"}


def test_missing_pieces_are_named(shared: Path) -> None:
    gemma = FAMILIES["gemma"]
    with pytest.raises(ValueError, match="content once, but it occurs 0 times"):
        ChatFormat(byte_tokenizer(gemma, "{{ messages[-1]['content'] }}<end_of_turn>"))
    wordless = Tokenizer(models.BPE(vocab={s: b for b, s in _byte_symbols().items()}, merges=[]))
    wordless.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    fast = PreTrainedTokenizerFast(tokenizer_object=wordless, eos_token="!", name_or_path="wordless")  # noqa: S106
    fast.chat_template = NO_SYSTEM
    with pytest.raises(ValueError, match=r"'wordless' to have a single token for one of \['Yes'"):
        ChatFormat(fast)
    template = (shared / "data" / "chat_templates" / gemma.file).read_text()
    with pytest.raises(ValueError, match=r"the roles \['user', 'user'\]"):
        ChatFormat(byte_tokenizer(gemma, template)).prompt_ids([USER, USER])


# ---- base models without a chat template: questions and answers as plain text

PLAIN = Prompt(format="plain")
TURNS = [Message("system", "Be brief."), Message("user", "1+1?"), Message("assistant", "2"), Message("user", "2+2?")]


@pytest.fixture
def bare(tmp_path: Path) -> PreTrainedTokenizerBase:
    """That of a base model: no template, and a token for the word with which the next turn begins."""
    found = load_tokenizer("bundled")
    found.add_tokens(["Question"])
    found.chat_template = None
    found.save_pretrained(tmp_path)
    return load_tokenizer(str(tmp_path))


def test_plain_turns_are_questions_and_answers(bare: PreTrainedTokenizerBase) -> None:
    chat = ChatFormat(bare, prompt=PLAIN)
    prompt = "Be brief.\n\nQuestion: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer:"
    assert bare.decode(chat.prompt_ids(TURNS)) == prompt
    assert bare.decode(chat.prompt_ids([*TURNS[:3], Message("user", "Question: 2+2?")])) == prompt, "once"
    assert bare.decode(chat.query.suffix_ids) == "\n\nQuestion: Is the answer correct? (Yes/No)\nAnswer:"
    assert chat.response_ids("4") == chat.response_ids(" 4") == tuple(bare.encode(" 4", add_special_tokens=False))
    assert chat.pad_id not in chat.end_of_turn_ids
    assert chat.end_of_turn_ids == {bare.eos_token_id, bare.convert_tokens_to_ids("Question")}, "the next question"
    identity = chat.describe()
    assert Prompt.from_json(identity["user_prompt"]) == PLAIN
    assert "format" not in Prompt(system="x").as_json()
    with pytest.raises(InputError, match=r"chat template, but got None. For a base model use `--prompt.format plain`"):
        ChatFormat(bare)
    with pytest.raises(InputError, match="a token for 'Question'"):
        ChatFormat(load_tokenizer("bundled"), prompt=PLAIN)
    bare.chat_template = load_tokenizer("bundled").chat_template
    assert ChatFormat(bare).describe() != ChatFormat(bare, query="Sure? (Yes/No)").describe()
    assert ChatFormat(bare).describe()["template_sha256"] != identity["template_sha256"]


# ---- tokens as pieces of a text


def test_characters_of_several_tokens_stand_with_the_last_one() -> None:
    def decode(ids: list[int], **_: Any) -> str:
        """Take tokens for bytes, and drop a space at the start as sentencepiece does."""
        return bytes(ids).decode(errors="replace").removeprefix(" ")

    pieces = chat_format.token_pieces(decode, list("a é。b c".encode()))
    assert pieces == ["a", " ", "", "é", "", "", "。", "b", " ", "c"]
    pieces = chat_format.token_pieces(decode, list("né".encode())[:2])
    assert "".join(pieces) == "n\ufffd"


@pytest.mark.parametrize("text", ["First 34+75=109. So 109.5 is it.\n\nThe answer is 7.", "", "x"])
def test_pieces_of_a_real_tokenizer_are_its_text(tiny_model: str, text: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = chat_format.token_pieces(partial(chat_format.decode_text, tokenizer), ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# ---- a prompt of the user's own

SHOT = PromptExample("What is 1+1?", "Answer: 2")
BRIEF = Prompt(system="Be brief.", examples=(SHOT,))


def put(prompt: Prompt | None) -> list[tuple[str, str]]:
    [question] = chat_format.put_prompt([ask_question("What is 2+2?", task="local_number")], prompt)
    return [(message.role, message.content) for message in question.messages]


def test_system_examples_or_none() -> None:
    (system, own), user = put(None)
    assert (system, user) == ("system", ("user", "Question: What is 2+2?"))
    shown = [("user", "Question: What is 1+1?"), ("assistant", "Answer: 2")]
    assert put(Prompt()) == put(None)
    assert put(Prompt(system="Be brief.")) == [("system", "Be brief."), user]
    assert put(Prompt(system="")) == [user]
    assert put(Prompt(examples=(SHOT,))) == [("system", own), *shown, user]
    assert put(BRIEF) == [("system", "Be brief."), *shown, user]
    assert put(Prompt(base="none")) == [("user", "What is 2+2?")]
    bare = [("user", "What is 1+1?"), ("assistant", "Answer: 2"), ("user", "What is 2+2?")]
    chat = Question("q", "local_number", (Message("user", "What is 2+2?"),))  # without a text of its own
    for prompt in (Prompt(examples=(SHOT,)), Prompt(base="none", examples=(SHOT,))):
        [found] = chat_format.put_prompt([chat], prompt)
        assert [(message.role, message.content) for message in found.messages] == bare
    assert put(Prompt(base="none", examples=(SHOT,))) == bare


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sytem": "x"}, "Did you mean 'system'"),
        ({"format": "html"}, "`prompt.format` .* 'html'"),
        ({"examples": [{"question": "x", "answer": "y"}]}, "'answer'"),
        ({"examples": [{"question": "What is 2+2?", "response": "4"}]}, r"`prompt.examples` .* 'What is 2\+2\?'"),
    ],
)
def test_a_mistake_in_a_prompt_is_named(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        put(Prompt.from_json(content))


def test_the_command_line_takes_options_or_a_file(tmp_path: Path) -> None:
    text = "system: Be brief.\nexamples:\n  - {question: 'What is 1+1?', response: 'Answer: 2'}\n"
    (tmp_path / "p.yaml").write_text(text)
    for verb, needed in (("answer", []), ("generate", ["--store_dir", "s", "--task", "t"]), ("evaluate", [])):
        arguments = ["--model", "m", *needed]
        assert given_to(verb, [*arguments, "--prompt", str(tmp_path / "p.yaml")])["prompt"] == BRIEF
        assert given_to(verb, [*arguments, "--prompt.system", "Be brief."])["prompt"] == Prompt(system="Be brief.")
        assert given_to(verb, arguments)["prompt"] is None


def test_a_file_states_it_for_model_and_data(tiny_model: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("q.txt").write_text("".join(f"What is {n}+3?\n" for n in range(10)))
    prepared = prepare(CommonCase(tiny_model, "q.txt", prompt=BRIEF))
    cli = instantiated(["fit", *as_arguments(prepared), *ON_CPU], monkeypatch)
    assert cli.model.prompt == cli.datamodule.prompt == BRIEF
    question = cli.datamodule.questions("train")[0]
    assert [message.role for message in question.messages] == ["system", "user", "assistant", "user"]
    assert cli.datamodule.collator().chat.prompt == BRIEF


def sampled(store: Path, questions: Path, prompt: Prompt | None) -> SampleStore:
    options = {"task": "local_number", "path": str(questions), "num_samples": 1}
    run_generate("bundled", str(store), prompt=prompt, sampling=SamplingSettings(max_new_tokens=4), **options)
    return SampleStore(store)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    folder = tmp_path_factory.mktemp("prompted")
    (folder / "q.txt").write_text("What is 3+4?\nWhat is 4+5?\n")
    return sampled(folder / "s", folder / "q.txt", BRIEF)


def test_it_is_part_of_what_a_store_is(store: SampleStore, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("What is 8+8?\n")
    for prompt in (None, replace(BRIEF, system="Be kind.")):
        with pytest.raises(ValueError, match=r"same settings, but got prompt.user_prompt"):
            sampled(store.path, tmp_path / "other.txt", prompt)
    first = next(iter(store.samples()))
    assert first.question.messages[0].content == "Be brief."


def test_training_refuses_a_store_of_another_prompt(store: SampleStore, tmp_path: Path) -> None:
    def chat(prompt: Prompt | None) -> object:
        return load_chat(EngineOptions(), "bundled", query=DEFAULT_QUERY, prompt=prompt)

    check_prompts(store, chat(BRIEF), round=0)
    for other in (None, Prompt(system="Be kind.")):
        with pytest.raises(ValueError, match=r"was sampled with the prompt .*Be brief"):
            check_prompts(store, chat(other), round=0)
    (tmp_path / "q.txt").write_text("What is 3+4?\n")
    plain = sampled(tmp_path / "plain", tmp_path / "q.txt", None)
    with pytest.raises(ValueError, match="was sampled with the prompt that of the task"):
        check_prompts(plain, chat(BRIEF), round=0)


def test_an_export_says_it_and_answer_takes_it_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = SelfCalibrationModule("bundled", prompt=BRIEF)
    assert SelfCalibrationModule(**module.hparams).prompt == BRIEF, "plain in a checkpoint, and read from one"
    assert "prompt" not in SelfCalibrationModule("bundled").hparams
    module.configure_model()
    adapter = str(write_export(module, tmp_path / "adapter"))
    taught, kind = CalibratedDefaults.of("bundled", adapter), Prompt(system="Be kind.")
    capsys.readouterr()
    assert taught.prompt_for(None) == BRIEF
    assert "the prompt of the calibration" in capsys.readouterr().err
    assert taught.prompt_for(BRIEF) == BRIEF
    assert capsys.readouterr().err == ""
    assert taught.prompt_for(kind) == kind
    said = capsys.readouterr().err
    assert "differs from that of the calibration" in said
    assert "Be brief." in said
    assert CalibratedDefaults.of("bundled", None).prompt_for(None) is None
    assert capsys.readouterr().err == ""
