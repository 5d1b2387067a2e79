"""Name in a config -> class of the task. A new task is its file, and one line here."""

TASKS = {
    "char_lm": "mha_research.tasks.char_lm:CharLM",
    "induction": "mha_research.tasks.synthetic:induction",
    "copy": "mha_research.tasks.synthetic:copy",
    "retrieval": "mha_research.tasks.retrieval:Retrieval",
}
