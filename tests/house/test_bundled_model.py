from itertools import islice

import pytest
import torch
from support.house import Script
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfcal_lightning.data.tasks.word_problems import stream_problems
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat
from selfcal_lightning.records import Message


@pytest.fixture(scope="module")
def model(bundled_model: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32).eval()


def test_tokens_are_single_digits_and_the_verification_turn_is_the_one_that_was_trained(chat: ChatFormat) -> None:
    encode = chat.tokenizer.encode
    for text in [*"0123456789", "Yes", "No"]:
        assert len(encode(text, add_special_tokens=False)) == 1
    assert len(encode("12*345=4140", add_special_tokens=False)) == len("12*345=4140")
    assert chat.decode(encode("Zoë pays 12 €.", add_special_tokens=False)) == "Zoë pays 12 €."
    prompt = chat.prompt_ids([Message("system", "Be brief."), Message("user", "What is 1+1?")])
    response = chat.response_ids("The answer is 2.")
    trained = [
        "<|bos|><|system|>Be brief.<|end|><|user|>What is 1+1?<|end|><|assistant|>",
        "The answer is 2.<|end|>",
        f"<|user|>{DEFAULT_QUERY}<|end|><|assistant|>",
    ]
    ids = [token for part in trained for token in chat.tokenizer.encode(part, add_special_tokens=False)]
    assert [*prompt, *response, *chat.query.suffix_ids] == ids
    assert chat.end_of_turn_ids == {chat.tokenizer.eos_token_id}


def test_its_verdicts_are_yes_or_no(chat: ChatFormat, model: PreTrainedModel) -> None:
    for problem in islice(stream_problems("validation"), 5):
        response = chat.response_ids(f"The answer is {problem.answer}.")
        ids = [*chat.prompt_ids([Message("user", problem.question)]), *response, *chat.query.suffix_ids]
        with torch.inference_mode():
            p = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
        assert p[[*chat.query.yes_ids, *chat.query.no_ids]].sum() > 0.99


def test_it_tells_right_from_wrong_and_is_too_sure(script: Script, chat: ChatFormat, model: PreTrainedModel) -> None:
    measuring = script("bundled_model_measuring")
    problems = list(islice(stream_problems("validation"), 50))
    edt = measuring.SAMPLING["EDT"]
    drawn = measuring.draw_responses(model, chat, problems, samples=4, sampling=edt, seed=0)
    values = {name: figure["value"] for name, figure in measuring.measure(drawn).items()}
    assert 0.2 < values["pass_at_1"] < 0.7
    assert values["overconfidence"] > 0.05
    assert values["auroc_p_true"] > 0.75
    assert values["within_auroc_p_true"] > 0.6
