from dataclasses import replace
from pathlib import Path

import pytest
from support.command_lines import ON_CPU, given_to, instantiated

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.presets import CommonCase, as_arguments, prepare
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.ssc.stored_rows import check_prompts
from selfcal_lightning.engines.opening import load_chat
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.answering import ask_question
from selfcal_lightning.inference.choices import CalibratedDefaults
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt, PromptExample, put_prompt
from selfcal_lightning.records import Message, Question, SamplingSettings
from selfcal_lightning.training.export import write_export
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHOT = PromptExample("What is 1+1?", "Answer: 2")
BRIEF = Prompt(system="Be brief.", examples=(SHOT,))


def put(prompt: Prompt | None) -> list[tuple[str, str]]:
    [question] = put_prompt([ask_question("What is 2+2?", task="local_number")], prompt)
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
        [found] = put_prompt([chat], prompt)
        assert [(message.role, message.content) for message in found.messages] == bare
    assert put(Prompt(base="none", examples=(SHOT,))) == bare


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sytem": "x"}, "Did you mean 'system'"),
        ({"system": 3}, "`prompt.system` .* 3"),
        ({"base": "non"}, "`prompt.base` .* 'non'"),
        ({"format": "html"}, "`prompt.format` .* 'html'"),
        ({"examples": "x"}, "`prompt.examples` .* 'x'"),
        ({"examples": [{"question": "x"}]}, "`response` .* None"),
        ({"examples": [{"question": "x", "answer": "y"}]}, "'answer'"),
        ({"examples": ["x"]}, "`question` and `response`, but got 'x'"),
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
