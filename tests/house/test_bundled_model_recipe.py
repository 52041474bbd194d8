"""What the bundled model learns from: a pupil's slips are real ones, and every wrong character is marked."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from selfcal_lightning.data.tasks.word_problems import Equation, Problem, WordProblems, sample_problem, write_solution
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import resolve_model

NUM_PROBLEMS = 300
STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


@pytest.fixture
def slips(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("bundled_model_data")


@pytest.fixture
def labels(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("bundled_model_data")


@pytest.fixture
def turns(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("bundled_model_verification")


@pytest.fixture
def verification(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("bundled_model_verification")


@pytest.fixture
def chat() -> ChatFormat:
    return ChatFormat(load_tokenizer("bundled"))


@pytest.fixture
def untrained(script: Callable[[str], ModuleType], chat: ChatFormat) -> LlamaForCausalLM:
    return script("bundled_model_training").build_model(chat.tokenizer, 0)


@pytest.fixture
def problems() -> list[Problem]:
    rng = random.Random(3)
    return [sample_problem(rng, "pretrain") for _ in range(NUM_PROBLEMS)]


def test_a_pupil_who_forgets_nothing_computes_rightly(slips: ModuleType) -> None:
    rng = random.Random(0)
    for _ in range(2_000):
        left, right = rng.randint(1, 9_990), rng.randint(1, 999)
        for equation in (Equation(left, "+", right), Equation(left, "*", rng.randint(2, 9))):
            assert slips.compute_forgetfully(equation, rng, 0.0) == equation.result
        equation = Equation(max(left, right) + 1, "-", min(left, right))
        assert slips.compute_forgetfully(equation, rng, 0.0) == equation.result


def test_only_carries_are_forgotten(slips: ModuleType) -> None:
    rng = random.Random(0)
    for equation in (Equation(123, "+", 456), Equation(456, "-", 123), Equation(123, "*", 3), Equation(936, "/", 3)):
        assert slips.compute_forgetfully(equation, rng, 1.0) == equation.result
    for equation, slipped in (
        (Equation(128, "+", 456), 574),
        (Equation(451, "-", 128), 333),
        (Equation(128, "*", 3), 364),
    ):
        assert slips.compute_forgetfully(equation, rng, 1.0) == slipped


def test_a_slip_is_carried_through_to_the_answer(slips: ModuleType, problems: list[Problem]) -> None:
    task, rng = WordProblems(), random.Random(1)
    right = 0
    for problem in problems:
        solution = slips.write_pupil_solution(problem, rng, 0.3)
        steps = STEP.findall(solution)
        assert [step[1] for step in steps] == [equation.operator for equation in problem.equations]
        assert task.extract(solution) == steps[-1][3]
        right += task.extract(solution) == str(problem.answer)
    assert 0.2 * NUM_PROBLEMS < right < 0.8 * NUM_PROBLEMS


def test_nothing_is_marked_in_a_right_solution_either_way_round(labels: ModuleType, problems: list[Problem]) -> None:
    rng = random.Random(2)
    for problem in problems:
        solution = write_solution(problem, rng)
        assert not labels.mark_wrong_characters(problem, solution).any()
        turned = re.sub(r"(\d+)([+*])(\d+)=", r"\3\2\1=", solution)
        assert not labels.mark_wrong_characters(problem, turned).any()


def test_the_marks_of_a_slip_begin_at_its_first_wrong_digit(labels: ModuleType) -> None:
    problem = Problem("trip", 1, "", (Equation(48, "*", 3), Equation(144, "+", 5)))

    def marked(response: str) -> str:
        wrong = labels.mark_wrong_characters(problem, response)
        return "".join(character if flag else "_" for character, flag in zip(response, wrong, strict=True)).strip("_")

    assert marked("First 48*3=124. So 124+5=129. The answer is 129.") == "24."
    assert marked("First 48*3=144. So 144+6=150. The answer is 150.") == "6=150."
    assert marked("First 48*3=144. So 144+5=149. The answer is 194.") == "94."
    assert marked("First 48*3=144. The answer is 144.") == "The answer is 144."
    assert marked("First 48*3=144. So 144+5=149. Then 149+1=150. The answer is 150.") == "The answer is 150."


def test_a_pupil_s_solution_is_marked_where_and_only_where_it_slips(
    slips: ModuleType, labels: ModuleType, problems: list[Problem]
) -> None:
    rng = random.Random(4)
    for problem in problems:
        solution = slips.write_pupil_solution(problem, rng, 0.3)
        wrong = labels.mark_wrong_characters(problem, solution)
        steps = [
            (match.end(), Equation(int(match[1]), match[2], int(match[3])), match[4])
            for match in STEP.finditer(solution)
        ]
        full_stops_of_slips = [end for end, equation, result in steps if str(equation.result) != result]
        assert wrong.any() == bool(full_stops_of_slips)
        assert all(wrong[end] for end in full_stops_of_slips)


def test_a_turn_is_the_project_s_own_query_with_the_true_verdict_and_a_mark_for_each_token(
    turns: ModuleType, chat: ChatFormat
) -> None:
    problem = Problem("trip", 1, "Anna walks.", (Equation(48, "*", 3), Equation(144, "+", 5)))
    text = "First 48*3=124. So 124+5=129. The answer is 129."
    drawn = turns.Drawn(0, text, chat.response_ids(text), "129", correct=False, logprob=-1.0, p_true=None)
    turn = turns.write_turn(chat, problem, drawn)
    rendered = chat.tokenizer.decode(turn.token_ids)
    assert rendered == (
        f"<|bos|><|user|>Anna walks.<|end|><|assistant|>{text}<|end|><|user|>{DEFAULT_QUERY}<|end|><|assistant|>No"
    )
    assert len(turn.token_ids) == len(turn.kinds) == len(turn.marks)
    assert set(turn.kinds[:-1]) == {turns.IGNORED}
    assert turn.kinds[-1] == turns.NO
    of_step = [chat.decode([token]) for token, (mark, _) in zip(turn.token_ids, turn.marks, strict=True) if mark == 1]
    so_far = [chat.decode([token]) for token, (_, mark) in zip(turn.token_ids, turn.marks, strict=True) if mark == 1]
    assert "".join(of_step) == "24."
    assert "".join(so_far) == text.removeprefix("First 48*3=1")


def test_rehearsals_learn_the_response_and_its_end_only(turns: ModuleType, chat: ChatFormat) -> None:
    for turn in turns.write_rehearsals(chat, number=20, seed="test"):
        learnt = [token for token, kind in zip(turn.token_ids, turn.kinds, strict=True) if kind == turns.REHEARSED]
        assert learnt[-1] == chat.tokenizer.eos_token_id
        assert chat.decode(learnt).startswith("First ")
        assert turn.token_ids[-len(learnt) :] == learnt
        assert set(turn.marks) == {(turns.UNMARKED, turns.UNMARKED)}


def test_upper_layers_change_nothing_before_they_are_trained(
    verification: ModuleType, untrained: LlamaForCausalLM
) -> None:
    deeper = verification.add_upper_layers(untrained, seed=0).eval()
    ids = torch.tensor([[1, 4, 70, 71, 72, 2]])
    with torch.inference_mode():
        assert torch.equal(deeper(ids).logits, untrained.eval()(ids).logits)
    assert deeper.config.num_hidden_layers == untrained.config.num_hidden_layers + verification.UPPER_LAYERS
    assert deeper.num_parameters() > untrained.num_parameters()


def test_a_lesson_in_which_yes_counts_more_makes_the_model_believe_itself_more(
    verification: ModuleType,
    turns: ModuleType,
    slips: ModuleType,
    chat: ChatFormat,
    problems: list[Problem],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, rng, judged = WordProblems(), random.Random(5), []
    for problem in problems[:20]:
        text = slips.write_pupil_solution(problem, rng, 0.3)
        correct = task.verify(task.extract(text), str(problem.answer))
        drawn = turns.Drawn(0, text, chat.response_ids(text), task.extract(text), correct, logprob=-1.0, p_true=None)
        judged.append(turns.write_turn(chat, problem, drawn))
    monkeypatch.setattr(verification, "draw_turns", lambda *_, **__: judged)
    lesson = verification.Lesson(
        "test", problems=20, steps=12, lower_share=1.0, mark_weight=0.0, rehearsals=0.0, batch_tokens=1_000
    )
    yes = chat.query.yes_ids
    believed = []
    for weight in (1 / 50, 50.0):
        model = LlamaForCausalLM.from_pretrained(resolve_model("bundled"), dtype=torch.float32)
        verification.give_lesson(model, chat, replace(lesson, yes_weight=weight), seed=0)
        with torch.inference_mode():
            last = torch.stack([model(torch.tensor([turn.token_ids[:-1]])).logits[0, -1] for turn in judged])
        believed.append(last.softmax(-1)[:, list(yes)].sum(-1).mean().item())
    seldom, often = believed
    assert often > seldom + 0.3


def test_a_run_that_broke_off_goes_on_as_if_it_had_not(
    script: Callable[[str], ModuleType], untrained: LlamaForCausalLM, tmp_path: Path
) -> None:
    stages, ran = script("make_bundled_model"), []
    schedule = script("bundled_model_data").Schedule(10)

    def stage(name: str, factor: float, steps: int = 10, *, broken: bool = False) -> object:
        def run(model: LlamaForCausalLM) -> LlamaForCausalLM:
            if broken:
                raise KeyboardInterrupt
            ran.append(name)
            with torch.no_grad():
                model.model.norm.weight.mul_(factor)
            return model

        return stages.Stage(name, replace(schedule, steps=steps), run)

    def run(*chosen: object, seed: int = 0, resume: bool = True) -> float:
        with torch.no_grad():
            untrained.model.norm.weight.fill_(1.0)
        ran.clear()
        model, records = stages.run_stages(list(chosen), untrained, folder=tmp_path, seed=seed, resume=resume)
        assert [record.name for record in records if not record.taken_over] == ran
        assert len(records) == len(chosen)
        return model.model.norm.weight[0].item()

    with pytest.raises(KeyboardInterrupt):
        run(stage("one", 1.1), stage("two", 1.3, broken=True), resume=False)
    assert run(stage("one", 1.1), stage("two", 1.3)) == pytest.approx(1.43)
    assert ran == ["two"]
    assert run(stage("one", 1.1), stage("two", 1.3)) == pytest.approx(1.43)
    assert ran == []
    assert run(stage("one", 2.0, steps=20), stage("two", 1.3)) == pytest.approx(2.6)
    assert ran == ["one", "two"]
    run(stage("one", 2.0, steps=20), stage("two", 1.3), seed=1)
    assert ran == ["one", "two"]


def test_a_model_that_misses_a_target_is_told_which(script: Callable[[str], ModuleType]) -> None:
    targets = script("bundled_model_measuring")
    good = {
        "within_auroc_p_true": 0.75, "auroc_p_true": 0.85, "overconfidence": 0.2, "pass_at_1": 0.45,
        "majority_gain": 0.1, "unreadable": 0.0,
    }  # fmt: skip

    def unmet(**changes: float | None) -> list[str]:
        figures = {name: {"value": value} for name, value in {**good, **changes}.items()}
        return targets.unmet_targets({targets.COLUMN: figures})

    assert unmet() == []
    assert unmet(pass_at_1=0.56) == ["Expected `pass_at_1` to lie in [0.4, 0.55], but got 0.56."]
    assert len(unmet(within_auroc_p_true=None, overconfidence=0.149)) == 2
