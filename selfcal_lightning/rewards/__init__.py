"""Process reward models: formats, scoring, training, rollouts and search."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "formats": ["REWARD_FORMATS", "RewardFormat", "register_reward_format", "reward_format"],
        "module": ["QuantileRewardModule", "RewardBatch"],
        "heads": ["StepScores", "folded_outputs", "monotone_quantiles"],
        "reading": ["RewardReader", "open_rewards"],
        "search": [
            "Continuation",
            "Path",
            "distinct",
            "grow",
            "particle_weights",
            "paths_to_keep",
            "required_samples",
            "samples_per_path",
            "select_topk",
            "unscored",
        ],
    },
)
