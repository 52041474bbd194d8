"""Process reward models: formats, scoring, training, rollouts and search."""
