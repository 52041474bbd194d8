"""The bundled model: small, loadable, with the project's tokenizer, able to answer and to judge, overconfident."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfcal_lightning.data.tasks.word_problems import Difficulty, WordProblems, stream_problems
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, load_tokenizer
from selfcal_lightning.records import Message

FOLDER = Path(__file__).resolve().parents[2] / "selfcal_lightning" / "assets" / "tiny_solver"
EASY = Difficulty(level_weights=(1.0, 0.0, 0.0), step_weights=(0.5, 0.5, 0.0, 0.0, 0.0))
NUM_EASY = 40
NUM_SAMPLED = 50


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(load_tokenizer(str(FOLDER)))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answered(chat: ChatFormat, model: PreTrainedModel) -> list[tuple[str, str, list[int]]]:
    """Greedy responses to easy questions of test_id: (text, reference, prompt and response ids without end-of-turn)."""
    problems = list(islice(stream_problems("test_id", difficulty=EASY), NUM_EASY))
    prompts = [list(chat.prompt_ids([Message("user", problem.question)])) for problem in problems]
    longest = max(map(len, prompts))
    ids = torch.tensor([[chat.pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)[:, longest:].tolist()
    rows = []
    for prompt, problem, response in zip(prompts, problems, output, strict=True):
        end = response.index(chat.tokenizer.eos_token_id)
        rows.append((chat.decode(response[:end]), str(problem.answer), [*prompt, *response[:end]]))
    return rows


def test_digits_and_verdicts_are_single_tokens(chat: ChatFormat) -> None:
    encode = chat.tokenizer.encode
    for text in [*"0123456789", "Yes", "No"]:
        assert len(encode(text, add_special_tokens=False)) == 1
    assert len(encode("12*345=4140", add_special_tokens=False)) == len("12*345=4140")
    assert chat.decode(encode("Zoë pays 12 €.", add_special_tokens=False)) == "Zoë pays 12 €."


def test_the_chat_template_writes_bos_once_and_ends_every_turn(chat: ChatFormat) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "The answer is 2."},
        {"role": "user", "content": DEFAULT_QUERY},
    ]
    rendered = chat.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|bos|><|system|>Be brief.<|end|><|user|>What is 1+1?<|end|><|assistant|>The answer is 2.<|end|>"
        f"<|user|>{DEFAULT_QUERY}<|end|><|assistant|>"
    )


def test_the_verification_turn_of_the_project_is_the_one_that_was_trained(chat: ChatFormat) -> None:
    prompt = chat.prompt_ids([Message("user", "What is 1+1?")])
    response = chat.response_ids("The answer is 2.")
    trained = [
        "<|bos|><|user|>What is 1+1?<|end|><|assistant|>",
        "The answer is 2.<|end|>",
        f"<|user|>{DEFAULT_QUERY}<|end|><|assistant|>",
    ]
    ids = [token for part in trained for token in chat.tokenizer.encode(part, add_special_tokens=False)]
    assert [*prompt, *response, *chat.query.suffix_ids] == ids
    assert chat.end_of_turn_ids == {chat.tokenizer.eos_token_id}


def test_the_weights_are_bfloat16_and_the_config_names_the_control_tokens(chat: ChatFormat) -> None:
    stored = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert stored.dtype == torch.bfloat16
    assert stored.config.model_type == "llama"
    assert stored.config.max_position_embeddings == 512
    assert stored.config.vocab_size == len(chat.tokenizer)
    assert stored.config.eos_token_id == chat.tokenizer.eos_token_id == stored.generation_config.eos_token_id
    assert stored.config.pad_token_id == chat.pad_id


def test_it_answers_easy_questions(answered: list[tuple[str, str, list[int]]]) -> None:
    task = WordProblems()
    right = sum(task.verify(task.extract(text), reference) for text, reference, _ in answered)
    assert right >= 0.7 * NUM_EASY


def test_its_verdicts_are_yes_or_no(
    answered: list[tuple[str, str, list[int]]], chat: ChatFormat, model: PreTrainedModel
) -> None:
    with torch.inference_mode():
        for _, _, ids in answered[:5]:
            scored = torch.tensor([[*ids, *chat.query.suffix_ids]])
            probabilities = model(scored).logits[0, -1].softmax(-1)
            assert sum(probabilities[list(row)].sum() for row in (chat.query.yes_ids, chat.query.no_ids)) > 0.99


def test_it_tells_right_from_wrong_and_says_yes_too_readily(
    script: Callable[[str], ModuleType], chat: ChatFormat, model: PreTrainedModel
) -> None:
    measuring = script("bundled_model_measuring")
    problems = list(islice(stream_problems("validation"), NUM_SAMPLED))
    edt = measuring.SAMPLING["EDT"]
    drawn = measuring.draw_responses(model, chat, problems, samples=4, sampling=edt, seed=0)
    values = {name: figure["value"] for name, figure in measuring.measure(drawn).items()}
    assert 0.2 < values["pass_at_1"] < 0.7
    assert values["overconfidence"] > 0.05
    assert values["auroc_p_true"] > 0.75
    assert values["within_auroc_p_true"] > 0.6
