"""Confidence in a response: estimators, scalers, fusion, and scoring of recorded responses."""

import lazy_loader

_NAMES = {
    "base": "MissingConfidenceError SampleScorer add_scores check_confidence confidence_of entry_ids how_to_get",
    "features": "ConfidenceScores ResponseTable required_confidences score_confidence scores_text",
    "fitted_files": "check_fitted_target load_fitted save_fitted",
    "fusion": """
        FittedScorer Fusion FusionTarget WeighedPool carried_confidences default_confidences fit_confidences fit_fusion
        is_probability load_scorers save_scorers scorer_digests weigh_pool
    """,
    "registry": """
        EstimatorClass KnownConfidence check_name_tells estimator_settings recorded_confidences refuse_looking_ahead
    """,
    "scaling": "Scaler fit_scaler",
    "scoring": "PoolScoring ScoreReport StoreScoring score_pool score_store",
    "scoring_model": "ModelSettings",
    "splits": "FittedOn check_disjoint check_not_fitted_on halve_pool leading_ids",
    "token_reader": "TokenReader",
}

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={module: names.split() for module, names in _NAMES.items()}
)
