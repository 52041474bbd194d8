import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.house import Script
from support.module_batches import MIXED, NO_DROPOUT, batch_of
from support.processes import run_command

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "quality"


def test_the_learned_token_is_one_more_row_of_the_output_layer(script: Script, tiny_model: str) -> None:
    made = script("_targets_training").LearnedTokenModule
    module = made(tiny_model, lora=replace(NO_DROPOUT, activated=True), torch_dtype="float32")
    module.configure_model()
    batch = batch_of(MIXED[:6], module.chat)
    weight = module.model.get_output_embeddings().weight.detach()
    module.token.data.copy_(weight[7] + 0.5 * weight[9])
    hidden = module.model(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    last = hidden.hidden_states[-1].flatten(0, 1)[batch.query_position].detach()
    enlarged = torch.cat([weight, module.token.detach()[None]])
    wanted = (last @ enlarged.T).softmax(-1)[:, -1]
    torch.testing.assert_close(module.chance(batch), wanted, atol=1e-5, rtol=0)
    loss, generation, confidence = module._losses(batch)
    loss.backward()
    assert generation == 0.0
    assert torch.equal(confidence, module.chance(batch))
    assert module.token.grad.abs().max() > 0.0
    assert any(p.grad is not None and p.grad.abs().max() > 0.0 for n, p in module.named_parameters() if "lora_B" in n)


def entry(brier: float, change: float, high: float) -> dict:
    difference = {"Brier": {"value": change, "low": change - 0.01, "high": high}}
    return {"values": {"Brier": {"value": brier}}, "minus_first": difference, "minus_ssc": difference}


@pytest.mark.parametrize(("high", "clearly"), [(-0.001, True), (0.002, False)])
def test_the_choice_is_the_best_without_labels(high: float, clearly: bool, script: Script) -> None:
    study, training = script("targets_study"), script("_targets_training")
    table = {name: entry(0.2, 0.0, 0.0) for name in training.VARIANTS}
    labelled = {"true labels": entry(0.1, -0.1, -0.05), training.LEARNED_TOKEN: entry(0.05, -0.15, -0.1)}
    for best, clearly_than_ssc in (("vote share", clearly), ("SSC", False)):  # no variant is better than itself
        chosen = study.choose({**table, **labelled, best: entry(0.18, -0.02, high)})
        assert (chosen["variant"], chosen["clearly"]) == (best, {"minus_first": clearly, "minus_ssc": clearly_than_ssc})


@pytest.mark.slow
def test_the_study_runs_and_goes_on(tmp_path: Path, tiny_model: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "targets_study.py"), "--quick", "--model", tiny_model]
    command += ["--output", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    for _ in range(2):
        run_command(command, cwd=BENCHMARKS)
    study = json.loads((tmp_path / "results" / "targets_study.json").read_text())
    assert set(study["tables"]) == {"calibration", "in-domain test", "out-of-domain test"}
    rows = study["tables"]["calibration"]
    assert rows["leave-one-out"]["minus_first"]["Brier"]["value"] == 0.0
    assert len({round(row["values"]["Brier"]["value"], 9) for row in rows.values()}) > 8, "the variants differ"
    assert (tmp_path / "runs" / "seed-0" / "log.txt").read_text().count("checked. The plan") == 1, "trained once"
