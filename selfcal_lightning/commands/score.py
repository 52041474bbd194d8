"""``selfcal score``: put further confidences on recorded responses, so that a pool is sampled once and scored often."""

from selfcal_lightning.confidence.registry import CriteriaSettings
from selfcal_lightning.confidence.scoring import PoolScoring, ScoreReport, StoreScoring, score_pool, score_store
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.engines.sampling.running import parse_shard
from selfcal_lightning.engines.settings import EngineSettings


def run_score(
    estimator: list[str] | str,
    store_dir: str | None = None,
    pool: str | None = None,
    output: str | None = None,
    model: str | None = None,
    name: str | None = None,
    split: str | None = None,
    round: int = 0,
    task: str | None = None,
    consistency_samples: int | None = None,
    engine: EngineSettings = EngineSettings(),
    query: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    shard: str = "0/1",
    overwrite: bool = False,
    reward: RewardSettings = RewardSettings(),
    criteria: CriteriaSettings = CriteriaSettings(),
) -> list[ScoreReport]:
    """Score the responses of a store, or of a JSON-lines pool, with estimators of confidence.

    In a store the confidences are kept under ``annotations/NAME``; read them with
    ``SampleStore(...).samples(confidences=[NAME])``. After a kill, the same command continues. To use n GPUs, start n
    processes with ``--shard i/n``.

    Args:
        estimator: Name, or a list of names: p_true, verbalized, verbalized_words, verbalized_percent,
            response_consistency, sequence_logprob, mean_logprob, min_logprob, self_certainty, response_certainty,
            token_entropy, token_steadiness, lowest_group_confidence, step_certainty, step_entropy, step_coe_c,
            step_coe_r (both with _normalised as well), step_self_evaluation, coe_r, coe_c, coe_r_raw, coe_c_raw,
            sasc_std, sasc_certainty, sasc_double, semantic_share, semantic_entropy, cocoa, two_sample_hybrid,
            response_probe; with a reward model prm, prm_lower, prm_min, prm_prod, orm or reward.
        store_dir: Folder of the store to score; or give ``pool``.
        pool: JSON-lines pool to score, one question a line.
        output: Writes the pool with its confidences to this file.
        model: Folder or hub name of the model that scores, or "bundled"; null takes the one that sampled the store.
        name: Name of the confidence if there is one estimator; null is the estimator's own.
        split: Reads this split only; null takes all.
        round: Scores this generation round of the store.
        task: Scores this task of a store only (null takes all); or the task of all questions of a pool.
        consistency_samples: Samples that response_consistency compares with, drawn without replacement; null takes all.
        engine: Which engine answers for p_true and verbalized. Token statistics always come from a local model.
        query: The confidence query of p_true; null takes the store's.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter to score with.
        shard: Scores share i of n of a store's questions, written "i/n", in this process.
        overwrite: Replaces values that another model or other settings gave.
        reward: The reward model for prm, prm_lower, prm_min, prm_prod, orm and reward; it runs in ``engine.dtype``.
        criteria: How token and step scores are combined, for step_certainty, step_entropy, step_coe_c, step_coe_r,
            step_self_evaluation and lowest_group_confidence.
    """
    engine.check_local()
    names = (estimator,) if isinstance(estimator, str) else tuple(estimator)
    settings = ModelSettings(model, query, engine.of(revision=revision, adapter=adapter), reward)
    places = {"store_dir": store_dir, "pool": pool, "output": output}
    given = {option: place for option, place in places.items() if place is not None}
    if given.keys() not in ({"store_dir"}, {"pool", "output"}):
        raise InputError(f"Expected either `store_dir`, or `pool` and `output`, but got {given or 'none of them'}.")
    if store_dir is not None:
        part = parse_shard(shard)
        return score_store(StoreScoring(
            store_dir, names, settings, name, split, round, task, consistency_samples, part, overwrite, criteria,
        ))  # fmt: skip
    of_stores = {"split": (split, None), "round": (round, 0), "shard": (shard, "0/1")}
    for option, (value, unset) in of_stores.items():
        if value != unset:
            raise InputError(f"Expected `{option}` with `store_dir` only, but got {value!r} with `pool`.")
    return score_pool(
        PoolScoring(str(pool), str(output), names, settings, name, task, consistency_samples, overwrite, criteria)
    )


score = run_score
