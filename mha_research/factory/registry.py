"""Name in a config -> function of the update rule, or of the schedule of the rate."""

RULES = {
    "adamw": "mha_research.factory.optimizer:adamw",
    "sgd": "mha_research.factory.optimizer:sgd",
}

SCHEDULES = {
    "constant": "mha_research.factory.optimizer:constant",
    "cosine": "mha_research.factory.optimizer:cosine",
    "linear": "mha_research.factory.optimizer:linear",
    "inverse_sqrt": "mha_research.factory.optimizer:inverse_sqrt",
}
